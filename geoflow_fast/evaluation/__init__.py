"""How good uncertainties are: metrics, figures and a report."""

from __future__ import annotations

from geoflow_fast.evaluation.report import Report

__all__ = ["Report"]
