"""Runs `geoflow` where torchvision was built for CUDA and torch for CPUs, as in the development environment.

python tests/with_torchvision.py embed --images photos/ --out embeddings/ ...
"""

from __future__ import annotations

import sys

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
"""Operators that torchvision looks up on import. They last as long as this object."""


def import_torchvision() -> None:
    """Imports torchvision; if the operators of its compiled part are missing, declares them and tries again."""
    try:
        import torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    assert torchvision.__version__


if __name__ == "__main__":
    import_torchvision()
    from geoflow_fast.cli.app import main

    sys.exit(main())
