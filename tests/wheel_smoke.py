"""Run by `make test-wheel` in an environment that has only the wheel: what an editable install hides shows here."""

from pathlib import Path

import torch

import geoflow_fast as gf
import geoflow_fast.kernels

installed = Path(gf.__file__).resolve()
assert "site-packages" in installed.parts, f"imported {installed}, not the installed wheel"
assert "site-packages" in Path(geoflow_fast.kernels.__file__).resolve().parts
assert (installed.parent / "py.typed").exists(), "py.typed is missing from the wheel"
table = gf.backends()
assert table["masked_interpolant"]["cpu"] == "available", table

image0, text0, image1, text1 = (gf.geometry.sample_uniform(33, d) for d in (20, 10, 20, 10))
t, direction = torch.rand(33), torch.arange(33, dtype=torch.int8) % 3
fast = gf.ops.masked_interpolant(image0, text0, image1, text1, t, direction, backend="cpu")
slow = gf.ops.masked_interpolant(image0, text0, image1, text1, t, direction, backend="reference")
assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(fast, slow))
print(f"geoflow_fast {gf.__version__} works from {installed.parent.name} of the wheel")
