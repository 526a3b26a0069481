"""Masked interpolant at the paper's batch: 8192 pairs of 1024-wide embeddings, float32.

Work: each input is read once and each output written once, 8 arrays of 32 MiB. Peers: this library's reference, and
the textbook formula (acos of the dot product, no care at the edges) in as few torch calls as it takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks.common import copy_bandwidth, gate, report, time_together

ROWS, WIDTH = 8192, 1024


def textbook(noise: Tensor, data: Tensor, t: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
    """The paper's interpolant and target velocity for one stream, as one would first write it."""
    t, given = t[:, None], given[:, None]
    w = torch.acos((noise * data).sum(-1, keepdim=True).clamp(-1, 1))
    sin = torch.sin(w)
    point = torch.sin((1 - t) * w) / sin * noise + torch.sin(t * w) / sin * data
    velocity = w / sin * (torch.cos(t * w) * data - torch.cos((1 - t) * w) * noise)
    return torch.where(given, data, point), torch.where(given, 0, velocity)


def run() -> str:
    torch.manual_seed(0)
    streams = [gf.geometry.sample_uniform(ROWS, WIDTH) for _ in range(4)]
    image0, text0, image1, text1 = streams
    t, direction = torch.rand(ROWS), torch.randint(0, 3, (ROWS,), dtype=torch.int8)
    out = tuple(torch.empty_like(x) for x in streams)

    def torch_textbook() -> tuple[Tensor, ...]:
        image = textbook(image0, image1, t, direction == 1)
        text = textbook(text0, text1, t, direction == 2)
        return image[0], text[0], image[1], text[1]

    def op(backend: str, target: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
        return gf.ops.masked_interpolant(*streams, t, direction, backend=backend, out=target)

    truth = op("reference")
    gate("cpu against reference", all(torch.allclose(a, b, atol=2e-6) for a, b in zip(op("cpu"), truth)))
    gate("textbook against reference", all(torch.allclose(a, b, atol=2e-6) for a, b in zip(torch_textbook(), truth)))
    bandwidth = copy_bandwidth()
    # Given rows (a third of the rows, per stream) read one point instead of two.
    given = int((direction != 0).sum())
    traffic = 4 * WIDTH * (8 * ROWS - given)
    seconds = time_together(
        {
            "torch reference": lambda: op("reference"),
            "torch textbook": torch_textbook,
            "C++": lambda: op("cpu"),
            "C++, out= given": lambda: op("cpu", out),
        }
    )
    rows = [
        {
            "implementation": name,
            "ms": 1e3 * value,
            "speed-up over reference": seconds["torch reference"] / value,
            "speed-up over textbook": seconds["torch textbook"] / value,
            "share of copy bandwidth": traffic / value / bandwidth,
        }
        for name, value in seconds.items()
    ]
    return report("masked_interpolant", rows, {"copy bandwidth GB/s": bandwidth / 1e9, "traffic MB": traffic / 1e6})
