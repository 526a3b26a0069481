"""Trains, scores and decides repeatedly in one process, in which memory and open files must not grow.

`python -m tests.reliability.soak --minutes 30`. Each round trains a small flow and a head into folders, scores a file
of queries against a gallery on disk, computes densities, re-ranks with the ladder and over a store, fits a trust,
certifies a rule, looks at a log, and writes the page of it, as a long-lived service or notebook would. The slope of the
resident memory is that of a least-squares line through the samples after the warm-up, the first fifth of the time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import geoflow_fast as gf
from geoflow_fast.explore import sources
from geoflow_fast.explore.page import write_page
from geoflow_fast.jobs.density import density_file
from geoflow_fast.jobs.entropy import score_file
from geoflow_fast.jobs.watch import WatchSettings, watch_file
from geoflow_fast.likelihood.settings import DensitySettings
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime import parquet
from geoflow_fast.stores import CustomStore, StoreReranker
from tests.stores.test_protocol import Fake

WARM_UP = 0.2
MOST_MEGABYTES_PER_MINUTE = 1.0
WIDTH = 16


def resident_megabytes() -> float:
    """The resident memory of this process in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def open_files() -> int:
    """The number of open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def one_round(folder: Path, number: int) -> None:
    """Trains, scores and computes densities, through files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(number)
    image, text, queries = (sample_uniform(n, WIDTH, generator=generator) for n in (600, 600, 200))
    text = gf.geometry.normalize(image + 0.7 * text)
    gf.EmbeddingPairs.from_arrays(image, text).save(folder / "pairs")
    np.save(folder / "queries.npy", queries.numpy())
    np.save(folder / "gallery.npy", image.numpy())
    flow = gf.GeoFlow(gf.GeoFlowConfig(WIDTH, WIDTH, hidden=32, depth=2))
    config = gf.TrainConfig(steps=60, batch_size=128, val_every=30, checkpoint_every=20, seed=number)
    gf.train(flow, gf.EmbeddingPairs.open(folder / "pairs"), config, out=folder / "run")
    scorer = gf.RetrievalEntropy(flow, gf.Gallery(folder / "gallery.npy"), "t2i", n_samples=8, n_steps=4)
    score_file(scorer, folder / "queries.npy", folder / "scores.parquet", block=50)
    density_file(folder / "run", folder / "pairs", folder / "density.parquet", DensitySettings(n_steps=2), block=300)
    decide(folder, number)


def decide(folder: Path, number: int) -> None:
    """Re-ranks with a head, over a gallery and over a store, and makes, applies and watches a rule."""
    pairs = gf.EmbeddingPairs.open(folder / "pairs")
    config = gf.HeadConfig(steps=20, batch_size=64, val_every=10, points=2, hidden=16, bank=32, seed=number)
    head = gf.PosteriorHead.fit(pairs, config, out=folder / "head", progress=False)
    gallery = np.load(folder / "gallery.npy")
    queries = torch.from_numpy(np.load(folder / "queries.npy"))
    gf.RetrievalEntropy(head, gf.Gallery(folder / "gallery.npy"))(queries)
    reranker = gf.BayesReranker(None, gallery, head=head, shortlist=200)
    reranker.calibrate(pairs, max_queries=200, progress=False)
    reranker.save_calibration(folder)
    reranker(queries, no_match_share=0.1)
    store = StoreReranker(CustomStore(Fake(rows=gallery).search, Fake(rows=gallery).fetch, WIDTH), shortlist=(50, 50))
    store.calibrate(pairs, max_queries=100, progress=False)
    store(queries[:20])
    scores = -np.sort(-np.random.default_rng(number).normal(size=(400, 10)), axis=1)
    right = scores[:, 0] - scores[:, 1] > 0.3 * np.random.default_rng(number + 1).random(400)
    trust = gf.Trust().fit(scores[:100], right[:100])
    trust.certify(scores[100:300], right[100:300], max_error=0.4).save(folder / "rule.json")
    rule = gf.Rule.load(folder / "rule.json")
    rule(scores[300:])
    gf.watch(rule, scores[300:])
    look_at(folder, scores, number)


def look_at(folder: Path, scores: NDArray[np.float64], number: int) -> None:
    """Watches a log that grows through its files, and writes the page of it with thumbnails."""
    hits = np.random.default_rng(number).integers(20, size=scores.shape)
    for end in (200, 400):
        parquet.write_columns(folder / "log.parquet", {"index": hits[:end], "scores": scores[:end]}, end)
        watch_file(folder / "rule.json", folder / "log.parquet", folder / "health.parquet", WatchSettings())
    (folder / "photos").mkdir()
    for item in range(20):
        Image.new("RGB", (64, 48), (12 * item, 0, 99)).save(folder / "photos" / f"{item}.png")
    run, nothing = sources.RunFiles.open(folder / "log.parquet", folder / "rule.json"), sources.Described()
    write_page(sources.explored(run, nothing, nothing, images=folder / "photos"), folder / "page.html")


def soak(minutes: float, folder: Path) -> dict[str, float]:
    """Runs rounds for `minutes` and returns figures of memory and of open files."""
    begin, samples, rounds = time.monotonic(), [], 0
    while (now := (time.monotonic() - begin) / 60) < minutes:
        one_round(folder, rounds)
        rounds += 1
        samples.append((now, resident_megabytes(), open_files()))
        print(f"{now:6.2f} min  round {rounds:4d}  {samples[-1][1]:8.1f} MB  {samples[-1][2]} files", flush=True)
    kept = np.array([sample for sample in samples if sample[0] >= WARM_UP * minutes])
    if len(kept) < 5:
        raise SystemExit(f"only {len(kept)} rounds after the warm-up: run for longer")
    return {
        "minutes": round(minutes, 1),
        "rounds": rounds,
        "megabytes_per_minute": round(float(np.polyfit(kept[:, 0], kept[:, 1], 1)[0]), 3),
        "resident_megabytes": round(float(kept[-1, 1]), 1),
        "open_files_first": int(kept[0, 2]),
        "open_files_last": int(kept[-1, 2]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    minutes = parser.parse_args().minutes
    with tempfile.TemporaryDirectory() as folder:
        figures = soak(minutes, Path(folder) / "round")
    print(figures)
    if figures["megabytes_per_minute"] >= MOST_MEGABYTES_PER_MINUTE:
        raise SystemExit(f"memory grows by {figures['megabytes_per_minute']} MB a minute")
    if figures["open_files_last"] > figures["open_files_first"]:
        raise SystemExit(f"open files grow: {figures['open_files_first']} to {figures['open_files_last']}")


if __name__ == "__main__":
    main()
