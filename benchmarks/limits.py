"""What this machine can do at best, measured in the same run as the contenders."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from geoflow_fast.ops.product import product_into, served


@dataclass(frozen=True)
class Work:
    """The least that an operation takes, however it is written: float operations of its matrix products, bytes of its
    inputs and outputs moved once, exponentials (and logarithms, sines, arc cosines)."""

    flops: float = 0.0
    bytes: float = 0.0
    exps: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Rates per second: the best of several tries, so that no share is flattered by a slow moment of the machine."""

    flops: float
    """A float32 matrix product by the faster of torch's libraries."""
    bytes: float
    """A streaming read or a copy of a large array, whichever moves more."""
    exps: float
    """torch's exponential, on an array that stays in the cache."""

    @classmethod
    def measure(cls, rounds: int = 5) -> Limits:
        """Takes a few seconds."""
        peak = max(gemm_peak(size, rounds=rounds) for size in (1024, 2048, 4096))
        return cls(peak, max(copy_bandwidth(rounds=rounds), read_bandwidth(rounds=rounds)), exp_rate(rounds=rounds))

    def best(self, other: Limits) -> Limits:
        """The larger of each rate. A machine's clock moves, so limits are measured several times in a run."""
        return Limits(max(self.flops, other.flops), max(self.bytes, other.bytes), max(self.exps, other.exps))

    def parts(self, work: Work) -> dict[str, float]:
        """Seconds of each kind of work alone."""
        return {
            "products": work.flops / self.flops,
            "memory": work.bytes / self.bytes,
            "exponentials": work.exps / self.exps,
        }

    def seconds(self, work: Work) -> float:
        """The longest of the parts: what nothing on this machine can beat without leaving work out."""
        return max(self.parts(work).values())

    def bound_by(self, work: Work) -> str:
        """Which part that is."""
        parts = self.parts(work)
        return max(parts, key=lambda name: parts[name])


def seconds_of(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def gemm_peak(size: int = 4096, inner: int = 1024, rounds: int = 5, dtype: torch.dtype = torch.float32) -> float:
    """Floating-point operations per second of a matrix product by the faster of torch's libraries."""
    shapes = (size, inner), (inner, size), (size, size)
    a, b, out = (torch.randn(shape).to(dtype) for shape in shapes)
    products: list[Callable[[], object]] = [lambda: torch.mm(a, b, out=out)]
    if served(a, b):
        products.append(lambda: product_into(out, a, b))
    return 2 * size * size * inner / min(seconds_of(run) for _ in range(rounds) for run in products)


def copy_bandwidth(megabytes: int = 256, rounds: int = 7) -> float:
    """Bytes read plus bytes written per second by a large memory copy."""
    source = torch.ones(megabytes * 2**18)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds_of(lambda: target.copy_(source)) for _ in range(rounds))


def read_bandwidth(megabytes: int = 256, rounds: int = 7) -> float:
    """Bytes per second of one streaming read of a large array (a sum)."""
    source = torch.ones(megabytes * 2**18)
    return source.nbytes / min(seconds_of(source.sum) for _ in range(rounds))


def exp_rate(count: int = 2**17, rounds: int = 7) -> float:
    """Exponentials per second."""
    x, out = torch.linspace(-5, 0, count), torch.empty(count)

    def many() -> None:
        for _ in range(32):
            torch.exp(x, out=out)

    return 32 * count / min(seconds_of(many) for _ in range(rounds))
