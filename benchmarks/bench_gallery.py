"""Gallery posterior: 8 queries of 50 samples against 100,000 items of 1024 coordinates, float32.

Work: 2 d flops and one exponential per (item, sample), 82 GFLOP in all. Peers in plain torch: all scores at once, and
the best chunked form (a slice of items at a time, exponential in place).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks.common import gate, gemm_peak, report, time_together

QUERIES, DRAWS, ITEMS, WIDTH, KAPPA = 8, 50, 100_000, 1024, 100.0


def entropy_of(score: Tensor) -> Tensor:
    log_pi = torch.log_softmax(score, dim=1)
    return -(log_pi.exp() * log_pi).sum(1)


def naive(samples: Tensor, gallery: Tensor) -> Tensor:
    logits = KAPPA * torch.einsum("qmd,nd->qmn", samples, gallery)
    return entropy_of(torch.logsumexp(logits, dim=1) - math.log(DRAWS))


def chunked(samples: Tensor, gallery: Tensor, chunk: int = 2048) -> Tensor:
    flat = samples.view(-1, WIDTH)
    scores = []
    for items in gallery.split(chunk):
        logits = (flat @ items.T).mul_(KAPPA).view(QUERIES, DRAWS, -1)
        peak = logits.amax(1, keepdim=True)
        scores.append(logits.sub_(peak).exp_().mean(1).log_().add_(peak.squeeze(1)))
    return entropy_of(torch.cat(scores, dim=1))


def run() -> str:
    torch.manual_seed(0)
    centre = gf.geometry.sample_uniform(QUERIES, WIDTH)
    noise = gf.geometry.sample_uniform(QUERIES * DRAWS, WIDTH).view(QUERIES, DRAWS, WIDTH)
    samples = gf.geometry.normalize(centre[:, None] + 0.8 * noise)
    gallery = gf.geometry.sample_uniform(ITEMS, WIDTH)
    gallery[: 8 * QUERIES] = gf.geometry.normalize(gallery[: 8 * QUERIES] + 0.3 * centre.repeat(8, 1))
    truth = gf.ops.gallery_posterior(samples.double(), gallery.double(), KAPPA).entropy
    contenders = {
        "torch, all at once": lambda: naive(samples, gallery),
        "torch, chunked": lambda: chunked(samples, gallery),
        "C++": lambda: gf.ops.gallery_posterior(samples, gallery, KAPPA, backend="cpu").entropy,
    }
    for name, contender in contenders.items():
        gate(f"{name} against float64", torch.allclose(contender().double(), truth, atol=2e-4))
    peak = gemm_peak(8192)
    seconds = time_together(contenders, rounds=5)
    flops = 2 * QUERIES * DRAWS * ITEMS * WIDTH
    rows = [
        {
            "implementation": name,
            "ms": 1e3 * value,
            "speed-up over all at once": seconds["torch, all at once"] / value,
            "speed-up over chunked": seconds["torch, chunked"] / value,
            "GFLOP/s": flops / value / 1e9,
            "share of torch.mm's peak": flops / value / peak,
        }
        for name, value in seconds.items()
    ]
    notes = {"torch.mm GFLOP/s": peak / 1e9, "entropy nats": [round(float(h), 3) for h in truth]}
    return report("gallery_posterior", rows, notes)
