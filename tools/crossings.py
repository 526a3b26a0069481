"""Counts the functions and files of geoflow_fast that one use of each main path crosses.

`python -m tools.crossings` prints one line per path; `--list PATH` also names the functions. Every path is run once
before it is counted, so that imports and caches do not count, and only Python code of the package does: comprehensions
and the methods that dataclasses write for themselves are left out. What a training step crosses is what a run of three
steps calls more often than a run of two.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

import geoflow_fast as gf

PACKAGE = str(Path(gf.__file__).parent)
WIDTH, PAIRS = 24, 512


def calls_of(run: Callable[[], object]) -> Counter[CodeType]:
    """How often a call of `run` enters each function of the package, in its threads too."""
    entered: Counter[CodeType] = Counter()

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            entered[code] += 1

    threading.setprofile(look)
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    comprehensions = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>", "<module>")
    return Counter({code: count for code, count in entered.items() if code.co_name not in comprehensions})


def unit_rows(count: int, seed: int) -> torch.Tensor:
    """Random unit rows [count, WIDTH]."""
    rows = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(rows, dim=-1)


def paths(folder: Path) -> dict[str, Callable[[], set[CodeType]]]:
    """What counts the functions of each main path, by its name."""
    image, text = unit_rows(PAIRS, 0), unit_rows(PAIRS, 1)
    pairs = gf.EmbeddingPairs.from_arrays(image.numpy(), text.numpy())
    flow = gf.GeoFlow(gf.GeoFlowConfig(WIDTH, WIDTH, hidden=32, depth=2, layer_scale=0.1)).eval()
    flow.save_pretrained(folder / "model")
    np.save(folder / "queries.npy", text[:4].numpy())
    np.save(folder / "gallery.npy", image.numpy())
    scorer = gf.RetrievalEntropy(flow, image, "t2i", n_samples=4, n_steps=2)
    head = gf.PosteriorHead(gf.HeadConfig(hidden=32, bank=8), WIDTH, WIDTH).eval()
    by_head = gf.RetrievalEntropy(head, image, "t2i")
    reranker = gf.BayesReranker(flow, image, "t2i", shortlist=4, n_steps=2)
    reranker.calibration = None

    def train(steps: int) -> None:
        config = gf.TrainConfig(steps=steps, batch_size=64, val_every=100, val_batches=1, log_every=1)
        gf.train(gf.GeoFlow(flow.config), pairs, config, val=pairs, progress=False)

    def training_step() -> set[CodeType]:
        train(2)
        shorter, longer = calls_of(lambda: train(2)), calls_of(lambda: train(3))
        return {code for code in longer if longer[code] > shorter[code]}

    def whole(run: Callable[[], object]) -> Callable[[], set[CodeType]]:
        def count() -> set[CodeType]:
            run()
            return set(calls_of(run))

        return count

    def command() -> None:
        from typer.testing import CliRunner

        from geoflow_fast.cli.app import app

        arguments = ["entropy", "--fast", "--samples", "4", "--steps", "2", "--overwrite"]
        for name, path in (("model", "model"), ("queries", "queries.npy"), ("gallery", "gallery.npy")):
            arguments += [f"--{name}", str(folder / path)]
        outcome = CliRunner().invoke(app, [*arguments, "--out", str(folder / "scores.parquet")])
        assert outcome.exit_code == 0, outcome.output
        (folder / "scores.parquet").unlink()

    def rerank() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reranker(text[:1])

    return {
        "training step": training_step,
        "scored query": whole(lambda: scorer(text[:1])),
        "query by a head": whole(lambda: by_head(text[:1])),
        "density": whole(lambda: gf.log_density(flow, image[:1], text[:1], n_steps=2)),
        "command": whole(command),
        "re-ranked query": whole(rerank),
    }


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", metavar="PATH", help="also name the functions that this path crosses")
    chosen = parser.parse_args().list
    with tempfile.TemporaryDirectory() as folder:
        for name, count in paths(Path(folder)).items():
            codes = count()
            print(f"{name:<16} {len(codes):4d} functions {len({code.co_filename for code in codes}):4d} files")
            if name == chosen:
                for function in sorted(f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_qualname}" for code in codes):
                    print("   ", function)


if __name__ == "__main__":
    main()
