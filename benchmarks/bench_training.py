"""Training of the paper's network: one step against a straightforward twin, the coupling's share, memory on 1M pairs.

The twin is what one would first write in torch: a module per stream, one AdaLN projection per half-block and row,
interpolant and loss from their formulas, torch's own AdamW. Gate: from the same weights, both have the same loss.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import geoflow_fast as gf
from benchmarks.bench_interpolant import textbook
from benchmarks.common import gate, report, time_together
from geoflow_fast.data import IMAGE_FOLDER, TEXT_FOLDER
from geoflow_fast.geometry import sample_uniform
from geoflow_fast.trainer import Ahead
from geoflow_fast.training import Trainer

WIDTH = 1024


class PlainBlock(nn.Module):
    """One dual-stream block, stream by stream."""

    def __init__(self, config: gf.GeoFlowConfig) -> None:
        super().__init__()
        h, width = config.hidden, config.hidden // config.heads
        self.heads = config.heads
        self.norm = nn.LayerNorm(h, elementwise_affine=False)
        self.first = nn.ModuleList(nn.Linear(h, 2 * h) for _ in range(2))
        self.second = nn.ModuleList(nn.Linear(h, 2 * h) for _ in range(2))
        self.gate = nn.ParameterList(torch.zeros(config.heads, width, width) for _ in range(2))
        self.value = nn.ParameterList(torch.zeros(config.heads, width, width) for _ in range(2))
        self.gate_in = nn.ModuleList(nn.Linear(h, config.inner, bias=False) for _ in range(2))
        self.value_in = nn.ModuleList(nn.Linear(h, config.inner, bias=False) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(config.inner, h, bias=False) for _ in range(2))
        self.scales = nn.ParameterList(torch.zeros(h) for _ in range(4))
        self.dropout = nn.Dropout(config.dropout)

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("bhi,hio->bho", x.view(len(x), self.heads, -1), weight).reshape(x.shape)

    def modulate(self, x: Tensor, c: Tensor, layer: nn.Module) -> Tensor:
        shift, scale = layer(c).chunk(2, dim=-1)
        return self.norm(x) * (1 + scale) + shift

    def forward(self, h: list[Tensor], c: list[Tensor]) -> list[Tensor]:
        x = [self.modulate(h[s], c[s], self.first[s]) for s in range(2)]
        gated = [
            torch.sigmoid(self.per_head(x[s], self.gate[s])) * self.per_head(x[1 - s], self.value[1 - s])
            for s in range(2)
        ]
        h = [h[s] + self.scales[s] * self.dropout(gated[s]) for s in range(2)]
        x = [self.modulate(h[s], c[s], self.second[s]) for s in range(2)]
        fed = [self.out[s](functional.silu(self.gate_in[s](x[s])) * self.value_in[s](x[s])) for s in range(2)]
        return [h[s] + self.scales[2 + s] * self.dropout(fed[s]) for s in range(2)]


class PlainFlow(nn.Module):
    """The same network, written plainly."""

    def __init__(self, flow: gf.GeoFlow) -> None:
        super().__init__()
        config = flow.config
        h = config.hidden
        self.encoders = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, h), nn.LayerNorm(h)) for _ in range(2))
        self.decoders = nn.ModuleList(nn.Sequential(nn.LayerNorm(h), nn.Linear(h, WIDTH)) for _ in range(2))
        self.register_buffer("frequencies", flow.conditioning.frequencies.clone())
        self.time, self.direction = nn.Linear(128, h), nn.Embedding(3, h)
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(h, h), nn.SiLU(), nn.Linear(h, h)) for _ in range(2))
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.depth))
        self.copy_weights(flow)

    @torch.no_grad()
    def copy_weights(self, flow: gf.GeoFlow) -> None:
        self.encoders.load_state_dict(flow.encoders.state_dict())
        self.decoders.load_state_dict(flow.decoders.state_dict())
        self.time.load_state_dict(flow.conditioning.time.state_dict())
        self.direction.load_state_dict(flow.conditioning.direction.state_dict())
        for s in range(2):
            for layer, ours in ((0, flow.conditioning.first), (2, flow.conditioning.second)):
                self.mlps[s][layer].weight.copy_(ours.weight[s].T)
                self.mlps[s][layer].bias.copy_(ours.bias[s, 0])
            for number, (plain, block) in enumerate(zip(self.blocks, flow.blocks)):
                weight, bias = flow.modulation.weight[4 * number :, s], flow.modulation.bias[4 * number :, s, 0]
                for half, layer in ((0, plain.first[s]), (2, plain.second[s])):
                    layer.weight.copy_(torch.cat((weight[half], weight[half + 1]), 1).T)
                    layer.bias.copy_(torch.cat((bias[half], bias[half + 1])))
                gate_weight, value_weight = block.cross_weight[s].chunk(2, -1)
                plain.gate[s].copy_(gate_weight)
                plain.value[s].copy_(value_weight)
                gate_in, value_in = block.expand.weight[s].chunk(2, -1)
                plain.gate_in[s].weight.copy_(gate_in.T)
                plain.value_in[s].weight.copy_(value_in.T)
                plain.out[s].weight.copy_(block.contract.weight[s].T)
                plain.scales[s].copy_(block.cross_scale[s, 0])
                plain.scales[2 + s].copy_(block.forward_scale[s, 0])

    def forward(self, image: Tensor, text: Tensor, t: Tensor, direction: Tensor) -> list[Tensor]:
        points, given = (image, text), (direction == 1, direction == 2)
        c = []
        for s in range(2):
            phase = 2 * torch.pi * torch.where(given[s], 0, t)[:, None] * self.frequencies
            features = torch.cat((phase.sin(), phase.cos()), -1)
            c.append(self.mlps[s](self.time(features) + self.direction(direction.long())))
        h = [encoder(x) for encoder, x in zip(self.encoders, points)]
        for block in self.blocks:
            h = block(h, c)
        out = [decoder(x) for decoder, x in zip(self.decoders, h)]
        out = [v - (v * x).sum(-1, keepdim=True) * x for v, x in zip(out, points)]
        return [torch.where(fixed[:, None], 0, v) for v, fixed in zip(out, given)]


def plain_losses(plain: PlainFlow, noise: list[Tensor], data: list[Tensor], t: Tensor, direction: Tensor) -> Tensor:
    image, v_image = textbook(noise[0], data[0], t, direction == 1)
    text, v_text = textbook(noise[1], data[1], t, direction == 2)
    out = plain(image, text, t, direction)
    return (out[0] - v_image).square().sum(1) + (out[1] - v_text).square().sum(1)


def random_pairs(count: int) -> gf.EmbeddingPairs:
    return gf.EmbeddingPairs.from_arrays(sample_uniform(count, WIDTH), sample_uniform(count, WIDTH))


def late_config(**changes: object) -> gf.TrainConfig:
    """The last phase of the curriculum, where 40 % of the rows are joint, from the first step."""
    base = gf.TrainConfig(conditional_share=0.0, ramp_share=0.0, p_drop=0.0, coupling="independent", warmup_steps=0)
    return dataclasses.replace(base, **changes)


def step_time(batch_size: int = 1024, rounds: int = 5) -> str:
    """One whole step, batch to weights, with independent noise."""
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig.paper())
    with torch.no_grad():
        for name, parameter in flow.named_parameters():
            if not name.startswith("encoders"):
                parameter.normal_(0, 0.02)
    pairs = random_pairs(2 * batch_size)
    config = late_config(batch_size=batch_size)
    trainer = Trainer(flow, pairs, pairs, config)
    plain = PlainFlow(flow)
    optimizer = torch.optim.AdamW(plain.parameters(), config.lr, weight_decay=config.weight_decay)

    def plain_step() -> None:
        data = list(pairs[trainer.batches.order[trainer.step]])
        noise = [functional.normalize(torch.randn(batch_size, WIDTH)) for _ in range(2)]
        u, t = torch.rand(batch_size), torch.rand(batch_size)
        direction = torch.where(u < 0.4, 0, torch.where(u < 0.7, 1, 2)).to(torch.int8)
        loss = plain_losses(plain, noise, data, t, direction).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), config.clip)
        optimizer.step()

    def fused_step() -> None:
        trainer.optimise(trainer.batches.training(trainer.step))

    _gate_same_loss(flow, plain, pairs)
    seconds = time_together({"straightforward torch": plain_step, "geoflow_fast": fused_step}, rounds)
    slowest = seconds["straightforward torch"]
    rows = [
        {"implementation": name, "seconds per step": s, "speed-up": slowest / s, "pairs per second": batch_size / s}
        for name, s in seconds.items()
    ]
    return report("training_step", rows, {"batch": batch_size, "parameters": flow.num_parameters()})


def _gate_same_loss(flow: gf.GeoFlow, plain: PlainFlow, pairs: gf.EmbeddingPairs) -> None:
    """Same weights, noise, times and directions, no dropout: same loss in every row."""
    rows = 96
    data, noise = list(pairs[np.arange(rows)]), [sample_uniform(rows, WIDTH) for _ in range(2)]
    t, direction = torch.rand(rows), torch.randint(0, 3, (rows,), dtype=torch.int8)
    flow.eval()
    plain.eval()
    with torch.no_grad():
        image, text, v_image, v_text = gf.ops.masked_interpolant(*noise, *data, t, direction)
        out = flow.velocity(image, text, t, direction)
        ours = (out[0] - v_image).square().sum(1) + (out[1] - v_text).square().sum(1)
        gate("loss against the twin", torch.allclose(ours, plain_losses(plain, noise, data, t, direction), rtol=1e-3))
    flow.train()
    plain.train()


def coupling_share(batch_size: int = 8192, pieces: int = 8, steps: int = 2) -> str:
    """What the coupling adds to whole steps, solved ahead as training does, over steps that need none.

    The gate is that of the coupling itself: the plan's mean cost is below that of independent pairs.
    """
    torch.manual_seed(0)
    pairs = random_pairs(batch_size)
    base = late_config(batch_size=batch_size, accumulate=pieces, steps=1000)
    trainer = Trainer(gf.GeoFlow(gf.GeoFlowConfig.paper()), pairs, pairs, base)
    _gate_coupling_helps(trainer)
    settings: dict[str, dict[str, object]] = {
        "none": {},
        "paper: whole batch": {"coupling": "paper", "conditional_coupling": "paper"},
        "paper, structured noise": {"coupling": "paper", "conditional_coupling": "paper", "noise": "structured"},
        "default: joint rows": {"coupling": "paper"},
        "default, structured noise": {"coupling": "paper", "noise": "structured"},
        "none again": {},
    }
    measured = {}
    for name, changes in settings.items():
        trainer.batches.config = dataclasses.replace(base, **changes)
        measured[name] = _step_and_solve(trainer, steps)
    plain = (measured["none"][0] + measured["none again"][0]) / 2
    rows = [
        {
            "coupling": name,
            "solve s": solve,
            "step s": step,
            "exposed share of the step": max(0.0, step - plain) / step,
            "share if nothing hid it": solve / (plain + solve),
        }
        for name, (step, solve) in measured.items()
    ]
    return report("training_coupling", rows, {"batch": batch_size, "pieces": pieces, "steps": steps})


def _gate_coupling_helps(trainer: Trainer, rows: int = 512) -> None:
    noise = [sample_uniform(rows, WIDTH) for _ in range(2)]
    data = list(trainer.batches.pairs[np.arange(rows)])
    cost = gf.ops.transport_cost(*noise, *data)
    chosen = gf.ops.couple(*noise, *data)
    gate("coupled pairs are closer", bool(cost.gather(1, chosen[:, None]).mean() < cost.diagonal().mean()))


def _step_and_solve(trainer: Trainer, steps: int) -> tuple[float, float]:
    """Seconds of a whole step (median, without the first one, whose solve nothing hides) and of a solve alone."""
    ahead = Ahead(trainer.batches.training, 0, steps + 2, trainer.device, enabled=True)
    times = []
    for step in range(steps + 1):
        start = time.perf_counter()
        trainer.optimise(ahead.get(step))
        times.append(time.perf_counter() - start)
    ahead.close()
    return statistics.median(times[1:]), trainer.batches.training(0).coupling_seconds


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


def memory(count: int = 1_000_000) -> str:
    """Peak resident memory of training on a folder of `count` pairs, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        _write_folder(folder, count)
        command = [sys.executable, "-c", MEMORY_RUN, str(folder)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    beyond = (found["peak"] - found["state"]) / 1e9
    rows = [
        {
            "pairs": found["pairs"],
            "on disk GB": 2 * count * WIDTH * 2 / 1e9,
            "peak resident GB": found["peak"] / 1e9,
            "beyond model and optimiser GB": beyond,
        }
    ]
    gate("resident memory under 2.5 GB beyond model and optimiser", beyond < 2.5)
    return report("training_memory", rows, {"batch": 2048})


def _write_folder(folder: Path, count: int, block: int = 100_000) -> None:
    """Random unit rows, float16, in shards of `block`; every shard is the same block turned by its number."""
    rows = sample_uniform(block, WIDTH).half().numpy()
    for name in (IMAGE_FOLDER, TEXT_FOLDER):
        (folder / name).mkdir()
        for number in range(count // block):
            np.save(folder / name / f"{name}_{number}.npy", np.roll(rows, number, axis=1))


def run() -> str:
    return "\n\n".join((step_time(), coupling_share(), memory()))
