"""Fused operations: each checks its input once, picks a backend and owns its autograd."""

from geoflow_fast.ops.masked_interpolant import masked_interpolant

__all__ = ["masked_interpolant"]
