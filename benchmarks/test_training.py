"""Training: steps of the paper's network against a straightforward twin, the coupling's share, memory on 1M pairs.

The twin is what one would first write in torch: a module per stream, one AdaLN projection per half-block and row,
interpolant and loss from their formulas, torch's own AdamW. Gate: from the same weights, both have the same loss.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import geoflow_fast as gf
from benchmarks import twins
from benchmarks.cases import PEER, Case, Contender, each, in_bfloat16, with_mkl_alone
from benchmarks.inputs import random_flow, row_flops, scratch
from benchmarks.limits import Work
from geoflow_fast.data.pairs import IMAGE_FOLDER, TEXT_FOLDER
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime.malloc import keep_freed_memory
from geoflow_fast.training.batches import Batch, BatchMaker
from geoflow_fast.training.flow_matching import FlowMatching
from geoflow_fast.training.loop import Run

WIDTH = 1024
STEPS = 3
MOST_BEYOND = 2.5
"""GB of resident memory beyond model and optimiser, of any number of pairs."""


def random_pairs(count: int, width: int = WIDTH) -> gf.EmbeddingPairs:
    return gf.EmbeddingPairs.from_arrays(sample_uniform(count, width), sample_uniform(count, width))


def late_config(**changes: Any) -> gf.TrainConfig:
    """The last phase of the curriculum, where 40 % of the rows are joint, from the first step."""
    base = gf.TrainConfig(conditional_share=0.0, ramp_share=0.0, p_drop=0.0, coupling="independent", warmup_steps=0)
    return dataclasses.replace(base, **changes)


@dataclass(frozen=True)
class TwoNetworks:
    """A run of the flow, and its twin from the same weights, on the same pairs."""

    run: Run[Batch]
    half: Run[Batch]
    """The same in bfloat16."""
    batches: BatchMaker
    plain: twins.PlainFlow
    optimizer: torch.optim.Optimizer

    @classmethod
    def start(cls, network: gf.GeoFlowConfig, batch_size: int) -> TwoNetworks:
        flow = random_flow(network).requires_grad_(True).train()
        pairs = random_pairs(2 * batch_size, network.image_dim)
        config = late_config(batch_size=batch_size, precision="float32")
        plain = twins.PlainFlow(flow)
        check_same_loss(flow, plain, pairs)
        optimizer = torch.optim.AdamW(plain.parameters(), config.lr, weight_decay=config.weight_decay)
        objective = FlowMatching(flow, pairs, pairs, config)
        twin = copy.deepcopy(flow)
        half = FlowMatching(twin, pairs, pairs, dataclasses.replace(config, precision="bfloat16"))
        return cls(Run(objective), Run(half), objective.batches, plain, optimizer)

    def plain_step(self) -> float:
        config, pairs = self.run.config, self.batches.pairs
        rows, width = config.batch_size, pairs.image_dim
        data = list(pairs[self.batches.order[self.run.step]])
        noise = [functional.normalize(torch.randn(rows, width)) for _ in range(2)]
        u, t = torch.rand(rows), torch.rand(rows)
        direction = torch.where(u < 0.4, 0, torch.where(u < 0.7, 1, 2)).to(torch.int8)
        loss = twins.plain_losses(self.plain, noise, data, t, direction).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.plain.parameters(), config.clip)
        self.optimizer.step()
        return float(loss.detach())

    def fused_step(self) -> float:
        return float(self.run.optimise(self.batches.training(self.run.step))[0].mean())

    def half_step(self) -> float:
        return float(self.half.optimise(self.batches.training(self.half.step))[0].mean())


def steps(step: Callable[[], float]) -> float:
    """The loss after some steps, whose memory is kept for the next one as in `geoflow train`."""
    keep_freed_memory()
    return [step() for _ in range(STEPS)][-1]


def check_same_loss(flow: gf.GeoFlow, plain: twins.PlainFlow, pairs: gf.EmbeddingPairs, rows: int = 96) -> None:
    """Same weights, noise, times and directions, no dropout: same loss in every row."""
    width = pairs.image_dim
    data, noise = list(pairs[np.arange(rows)]), [sample_uniform(rows, width) for _ in range(2)]
    t, direction = torch.rand(rows), torch.randint(0, 3, (rows,), dtype=torch.int8)
    flow.eval()
    plain.eval()
    with torch.no_grad():
        image, text, v_image, v_text = gf.ops.masked_interpolant(*noise, *data, t, direction)
        out = flow.velocity(image, text, t, direction)
        ours = (out[0] - v_image).square().sum(1) + (out[1] - v_text).square().sum(1)
        theirs = twins.plain_losses(plain, noise, data, t, direction)
        assert torch.allclose(ours, theirs, rtol=1e-3), "the loss differs from the twin's"
    flow.train()
    plain.train()


OURS = Contender("geoflow_fast", lambda nets: steps(nets.fused_step))
CONTENDERS = (
    Contender("torch", lambda nets: steps(nets.plain_step), PEER),
    OURS,
    *with_mkl_alone(OURS),
    *in_bfloat16(Contender("geoflow_fast, bfloat16", lambda nets: steps(nets.half_step))),
)


def case(network: gf.GeoFlowConfig, rows: int, *, quick: bool = False) -> Case:
    # Forward, and twice that backward; 40 % of the rows joint, 30 % of each other direction.
    forward = sum(
        share * row_flops(network, direction) for direction, share in (("joint", 0.4), ("i2t", 0.3), ("t2i", 0.3))
    )
    return Case(
        f"{STEPS} training steps, B = {rows}, d = {network.image_dim}, hidden = {network.hidden}",
        lambda: TwoNetworks.start(network, rows),
        lambda _: None,
        lambda loss, _: 0 < loss < 100,  # the real gate is in `TwoNetworks.start`
        CONTENDERS,
        Work(flops=3 * STEPS * rows * forward),
        quick,
    )


CASES = (case(gf.GeoFlowConfig.small(256, 256), 256, quick=True), case(gf.GeoFlowConfig.paper(), 1024))


@each(CASES)
def test_training(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)


class Coupled:
    """A run whose batches are coupled in one of several ways."""

    def __init__(self, batch_size: int = 8192, pieces: int = 8) -> None:
        pairs = random_pairs(batch_size)
        self.base = late_config(batch_size=batch_size, accumulate=pieces, steps=1000)
        objective = FlowMatching(gf.GeoFlow(gf.GeoFlowConfig.paper()), pairs, pairs, self.base)
        self.run, self.batches = Run(objective), objective.batches
        self.batch = self.batches.training(0)

    def step(self) -> None:
        self.run.optimise(self.batch)

    def solve(self, **changes: Any) -> float:
        """Makes a batch and returns the seconds of its coupling alone."""
        self.batches.config = dataclasses.replace(self.base, **changes)
        return self.batches.training(0).coupling_seconds


PAPER_COUPLING = {"coupling": "paper", "conditional_coupling": "paper"}
COUPLED = (
    Contender("a step of eight pieces, without coupling", Coupled.step, agrees=lambda *_: True),
    Contender("a batch, independent pairs", lambda c: c.solve(), agrees=lambda seconds, _: seconds == 0),
    Contender("a batch, the paper's coupling: one plan over all rows", lambda c: c.solve(**PAPER_COUPLING)),
    Contender("a batch, the default: joint rows only", lambda c: c.solve(coupling="paper")),
)


@each([Case("Coupling in training, B = 8192", Coupled, lambda _: None, lambda seconds, _: seconds > 0, COUPLED)])
def test_coupling_in_training(race: Any, case: Case, contender: Contender) -> None:
    race(case, contender)


MEMORY_RUN = """
import json, sys, torch
import geoflow_fast as gf
pairs = gf.EmbeddingPairs.open(sys.argv[1])
flow = gf.GeoFlow(gf.GeoFlowConfig.paper())
state = 3 * sum(p.numel() for p in flow.parameters()) * 4  # weights and both moments
config = gf.TrainConfig(steps=3, batch_size=2048, accumulate=4, val_batches=1, warmup_steps=0, conditional_share=0.0)
gf.train(flow, pairs, config)
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"pairs": len(pairs), "peak": peak, "state": state}))
"""


def test_memory(benchmark: Any) -> None:
    """Peak resident memory of training on a folder of a million pairs, in a process of its own."""
    count = 1_000_000
    benchmark.group = f"Training on a folder of {count:,} pairs, B = 2048 in four pieces"
    with scratch() as folder:
        _write_folder(folder, count)
        command = [sys.executable, "-c", MEMORY_RUN, str(folder)]
        done = benchmark.pedantic(subprocess.run, (command,), {"check": True, "capture_output": True, "text": True})
    peaks = json.loads(done.stdout)
    beyond = (peaks["peak"] - peaks["state"]) / 1e9
    assert peaks["pairs"] == count
    assert beyond < MOST_BEYOND
    sizes = {"peak resident, GB": peaks["peak"] / 1e9, "beyond model and optimiser, GB": beyond}
    benchmark.extra_info |= {"contender": "three steps in a new process", "kind": "ours", "columns": sizes}


def _write_folder(folder: Path, count: int, block: int = 100_000) -> None:
    """Random unit rows, float16, in shards of `block`; every shard is the same block turned by its number."""
    rows = sample_uniform(block, WIDTH).half().numpy()
    for name in (IMAGE_FOLDER, TEXT_FOLDER):
        (folder / name).mkdir()
        for number in range(count // block):
            np.save(folder / name / f"{name}_{number}.npy", np.roll(rows, number, axis=1))
