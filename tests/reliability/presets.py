"""Uses every preset as it comes, and writes down which lines of the package run: the path of the presets.

`python -m tests.reliability.presets FILE` writes a JSON object with the line numbers by file.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import geoflow_fast as gf
from geoflow_fast.noise import sample_uniform
from tests.reliability.figures import ROOT

WIDTH = 8


def use_presets() -> None:
    """Trains, samples, computes densities, scores, re-ranks and decides, with the settings that users get."""
    torch.manual_seed(0)
    image, text = (sample_uniform(200, WIDTH, generator=torch.Generator().manual_seed(k)) for k in range(2))
    text = torch.nn.functional.normalize(image + 0.5 * text, dim=1)
    pairs, held_out = (
        gf.EmbeddingPairs.from_arrays(image[part], text[part]) for part in (slice(100), slice(100, None))
    )
    flow = gf.GeoFlow(gf.GeoFlowConfig.auto(WIDTH, WIDTH, len(pairs)))
    gf.train(flow, pairs, dataclasses.replace(gf.TrainConfig.auto(len(pairs)), steps=3, val_every=2), progress=False)
    for preset in (gf.TrainConfig.paper(), gf.TrainConfig.small()):
        config = dataclasses.replace(preset, steps=2, batch_size=16, val_every=2, val_batches=1, warmup_steps=1)
        gf.train(gf.GeoFlow(gf.GeoFlowConfig(WIDTH, WIDTH, hidden=16, depth=1)), pairs, config, progress=False)
    for settings in (gf.FAST_SAMPLING, gf.SamplingSettings()):
        gf.sample(flow, text=text[:2], settings=settings)
        # What a GPU samples with runs on a processor in this precision alone.
        gf.sample(flow, text=text[:2], settings=dataclasses.replace(settings, precision="bfloat16"))
    for density in (gf.FAST_DENSITY, gf.PAPER_DENSITY, gf.DensitySettings()):
        gf.epistemic(flow, image[:4], text[:4], settings=density)
    head = gf.PosteriorHead.fit(pairs, gf.HeadConfig(steps=4, batch_size=32, val_every=2, points=2, hidden=16, bank=32))
    for scorer in (gf.RetrievalEntropy.fast(flow, image), gf.RetrievalEntropy(head, image)):
        scorer(text[:4])
    reranker = gf.BayesReranker(flow, image[100:], head=head)
    reranker.calibrate(held_out, progress=False)
    reranker(text[:4])
    scores = (text @ image.T).topk(10, dim=1)
    right = scores.indices == torch.arange(200).unsqueeze(1)
    lists = scores.values.double().numpy()
    trust = gf.Trust().fit(lists[::2], right[::2].numpy())
    trust.certify(lists[1::2], right[1::2].numpy(), max_error=0.5)


def traced() -> dict[str, list[int]]:
    """The lines of the package that `use_presets` runs, by file."""
    lines: defaultdict[str, set[int]] = defaultdict(set)
    own = str(ROOT / "geoflow_fast")

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines[frame.f_code.co_filename].add(frame.f_lineno)
        return local

    def trace(frame: FrameType, _event: str, _: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(own) else None

    sys.settrace(trace)
    try:
        use_presets()
    finally:
        sys.settrace(None)
    return {Path(file).relative_to(ROOT).as_posix(): sorted(numbers) for file, numbers in lines.items()}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(traced()))
