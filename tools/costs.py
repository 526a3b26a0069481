"""What the GPU path costs: kernels, bytes and operations of one evaluation of a network, and the seconds they take.

The tables of the documentation and `tools.gpu_report` share these numbers. The counts are formulas of what
`python -m tools.launches` counts on the code itself; a test compares both. The rates are vendors' peaks times the
shares that kernels of this kind usually reach. Nothing here was measured on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from geoflow_fast.flow.config import GeoFlowConfig
from geoflow_fast.runtime import checks

COMPUTE_SHARE, BANDWIDTH_SHARE = 0.60, 0.85
"""Shares of a vendor's peak rates that are reached in practice."""
REPLAYED_SECONDS, STARTED_SECONDS = 2e-6, 20e-6
"""What a kernel costs besides its work: as part of a CUDA graph, and when Python starts it."""
BLOCK_KERNELS = 46
"""Kernels for each block of a mapped gallery besides those of `scoring_work`: checks and merging."""
ELEMENT_BYTES = {"float32": 4, "tf32": 4, "bfloat16": 2}
SCORING_PRODUCTS = {"float32": 3, "tf32": 3, "bfloat16": 1}
"""A product of rows with a gallery takes so many: float32 rows are split into two bfloat16 parts each, three of whose
four products count; above kappa = 1e4 they are multiplied three times in TF32."""


@dataclass(frozen=True)
class Work:
    """What is asked of a GPU."""

    kernels: float
    bytes: float
    operations: float
    row_bytes: float = 0.0
    """So many of the bytes are moved by kernels that multiply nothing. Such kernels come before and after products, not
    beside them."""

    def __mul__(self, times: float) -> Work:
        return Work(times * self.kernels, times * self.bytes, times * self.operations, times * self.row_bytes)


@dataclass(frozen=True)
class ProductRates:
    """Peak operations per second of dense matrix products, and bytes per second of the memory."""

    bfloat16: float
    float32: float
    """The rate without tensor cores, which round the factors."""
    bandwidth: float

    def products(self, precision: str) -> float:
        """The peak rate in one precision; TF32 has half that of bfloat16."""
        checks.one_of(precision, "precision", tuple(ELEMENT_BYTES))
        return {"bfloat16": self.bfloat16, "tf32": self.bfloat16 / 2, "float32": self.float32}[precision]


PEAKS = {
    "a100": ProductRates(312e12, 19.5e12, 2.04e12),
    "h100": ProductRates(989e12, 67e12, 3.35e12),
    "h200": ProductRates(989e12, 67e12, 4.80e12),
    "b200": ProductRates(2250e12, 80e12, 8.00e12),
    "rtx4090": ProductRates(165e12, 82.6e12, 1.008e12),
}
"""Vendors' peaks of the GPUs for which there are estimates."""


def seconds(work: Work, rates: ProductRates, precision: str, *, replayed: bool = True) -> float:
    """Seconds of the work: those of products, computing or moving their bytes, whichever takes longer; those of the
    other kernels, which move theirs one after the other; and what each kernel costs besides."""
    bandwidth = BANDWIDTH_SHARE * rates.bandwidth
    computing = work.operations / (COMPUTE_SHARE * rates.products(precision))
    multiplying = max(computing, (work.bytes - work.row_bytes) / bandwidth)
    starting = work.kernels * (REPLAYED_SECONDS if replayed else STARTED_SECONDS)
    return multiplying + work.row_bytes / bandwidth + starting


def velocity_work(shape: GeoFlowConfig, rows: float, precision: str = "float32") -> Work:
    """One velocity of `rows` rows in a conditional direction, with guidance and the step that follows it."""
    d = shape.flow_dims[0]
    products = 2 * shape.depth * _block(shape) - 3 * shape.hidden * shape.inner + 2 * d * shape.hidden
    traffic, row_traffic = _traffic(shape, 2 * rows, precision)
    total = traffic + 4 * 10 * rows * d + _weight_bytes(shape, precision)
    return Work(7 * shape.depth + 11, total, 2.0 * products * rows, row_traffic + 4 * 7 * rows * d)


def likelihood_work(shape: GeoFlowConfig, pairs: float, precision: str = "float32") -> Work:
    """One evaluation of the three densities of `pairs` pairs with one probe each, which is 7 rows a pair and stream."""
    d = sum(shape.flow_dims) / 2
    last = 8 * (3 * shape.hidden * shape.inner + 2 * d * shape.hidden)  # 4 rows a pair and stream that is generated
    products = 14 * (shape.depth * _block(shape) - 3 * shape.hidden * shape.inner) + last
    traffic, row_traffic = _traffic(shape, 14 * pairs, precision)
    ends = 4 * 60 * pairs * d
    total = traffic + ends + _weight_bytes(shape, precision)
    return Work(7 * shape.depth + 34, total, 2.0 * products * pairs, row_traffic + ends)


def scoring_work(queries: float, samples: float, items: float, dim: int, precision: str = "float32") -> Work:
    """A pass over a gallery: the rows are split, if they are float32, then multiplied, and lists are merged. The
    operations are those of bfloat16 products, or of TF32 ones if `precision` says so."""
    operations = 2.0 * SCORING_PRODUCTS[precision] * queries * samples * items * dim
    size = ELEMENT_BYTES[precision] * dim
    # Items are read once, split into as many bytes, and read again.
    passes = 3 if precision == "float32" else 1
    return Work(4 if precision == "float32" else 2, passes * size * (items + queries * samples), operations)


def _block(shape: GeoFlowConfig) -> float:
    """Multiplications of one row in one stream of a block: cross-gate and feed-forward."""
    return 2 * shape.hidden**2 / shape.heads + 3 * shape.hidden * shape.inner


def _weight_bytes(shape: GeoFlowConfig, precision: str) -> float:
    numbers = 2 * shape.depth * _block(shape) + 2 * sum(shape.flow_dims) * shape.hidden
    return ELEMENT_BYTES[precision] * numbers


def _traffic(shape: GeoFlowConfig, rows: float, precision: str) -> tuple[float, float]:
    """Bytes of the activations of all blocks for so many rows, both streams counted, and of these the bytes of the
    kernels between products: what enters and leaves a product, in its type, is written or read by one of them, and they
    read and write the states, which are float32."""
    product = ELEMENT_BYTES[precision] * (5 * shape.hidden + 3 * shape.inner)
    between = product + 16 * shape.hidden
    return shape.depth * rows * (product + between), shape.depth * rows * between
