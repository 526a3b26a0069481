"""Estimates for GPUs, by arithmetic alone: seconds per 1,000 queries or pairs, the gallery in the machine's memory."""

from __future__ import annotations

import dataclasses
import math

import geoflow_fast as gf
from geoflow_fast.flow.sampling import FAST_SAMPLING as FAST
from geoflow_fast.jobs.queries import BLOCK_QUERIES
from geoflow_fast.retrieval.gallery import GPU_BLOCK_ROWS
from geoflow_fast.runtime.device import GPU_ROWS_AT_ONCE
from tools import costs

GALLERIES = (10_000, 100_000, 1_000_000, 10_000_000)
THOUSAND = 1000
LINKS = {"a100": 25e9, "h100": 50e9}
"""Bytes per second from the machine's memory to the GPU."""


def rows() -> list[dict[str, str]]:
    """The table: a line for each device and method, a column for each size of the gallery."""
    config, table = gf.GeoFlowConfig.paper(1024, 1024), []
    for device in LINKS:
        seconds = {items: estimate(config, items, device) for items in GALLERIES}
        for title in seconds[GALLERIES[0]]:
            values = {f"N = 1e{len(str(items)) - 1}": f"{seconds[items][title]:.2g}" for items in GALLERIES}
            table.append({"estimated s per 1,000": f"{device.upper()}: {title}", **values})
    return table


def estimate(config: gf.GeoFlowConfig, items: int, device: str) -> dict[str, float]:
    """By method. Searching is bound by bringing the items to the device once per block of queries."""
    rates, passes = costs.PEAKS[device], math.ceil(THOUSAND / BLOCK_QUERIES)
    bringing = passes * 4.0 * items * config.image_dim / (costs.BANDWIDTH_SHARE * LINKS[device])

    def entropy(settings: gf.SamplingSettings) -> float:
        drawn = 2 * settings.n_samples * THOUSAND  # with and without the condition
        batch = min(drawn, GPU_ROWS_AT_ONCE)
        velocity = costs.seconds(costs.velocity_work(config, batch), rates, "float32")
        blocks = math.ceil(items / GPU_BLOCK_ROWS)
        one = costs.scoring_work(BLOCK_QUERIES, settings.n_samples, items / blocks, config.image_dim)
        work = dataclasses.replace(one, kernels=one.kernels + costs.BLOCK_KERNELS) * blocks
        scoring = passes * costs.seconds(work, rates, "bfloat16", replayed=False)
        return max(settings.n_steps * drawn / batch * velocity + scoring, bringing)

    # Midpoint takes two evaluations a step. A re-ranked item has a point and a tangent in one solve, a pair 7 rows.
    pairs = costs.likelihood_work(config, THOUSAND)
    density = 20 * costs.seconds(pairs, rates, "float32")
    rerank = 12 * 2 / 7 * 32 * costs.seconds(pairs, rates, "float32")
    return {
        "plain search": bringing,
        "plain search and `BayesReranker`": bringing + rerank,
        "`RetrievalEntropy.fast`": entropy(FAST),
        "`RetrievalEntropy`, the paper's settings": entropy(gf.SamplingSettings()),
        "epistemic score of 1,000 pairs": density,
    }
