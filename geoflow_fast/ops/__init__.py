"""Fused operations: each checks its input once, picks a backend and owns its autograd."""

from geoflow_fast.ops.adaln import adaln
from geoflow_fast.ops.counter_noise import counter_noise
from geoflow_fast.ops.flow_loss import flow_loss
from geoflow_fast.ops.gallery_posterior import gallery_posterior, gallery_statistics
from geoflow_fast.ops.gallery_search import RowCodes, gallery_search
from geoflow_fast.ops.gallery_statistics import GalleryPosterior, GalleryStatistics
from geoflow_fast.ops.gate_residual import gate_residual
from geoflow_fast.ops.keep_mask import keep_mask
from geoflow_fast.ops.masked_interpolant import masked_interpolant
from geoflow_fast.ops.ot_assign import couple, ot_assign
from geoflow_fast.ops.sinkhorn import SinkhornResult, sinkhorn
from geoflow_fast.ops.swiglu import swiglu
from geoflow_fast.ops.tangent_step import tangent_step
from geoflow_fast.ops.unit_rows import unit_rows

__all__ = [
    "GalleryPosterior",
    "GalleryStatistics",
    "RowCodes",
    "SinkhornResult",
    "adaln",
    "counter_noise",
    "couple",
    "flow_loss",
    "gallery_posterior",
    "gallery_search",
    "gallery_statistics",
    "gate_residual",
    "keep_mask",
    "masked_interpolant",
    "ot_assign",
    "sinkhorn",
    "swiglu",
    "tangent_step",
    "unit_rows",
]
