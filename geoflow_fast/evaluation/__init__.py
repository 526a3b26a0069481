"""How good uncertainties are: metrics, comparisons, figures and reports."""

from __future__ import annotations

from geoflow_fast.decisions.bounds import clopper_pearson_upper
from geoflow_fast.evaluation.metrics import (
    Reliability,
    RetrievalCalibration,
    SelectiveAccuracy,
    aurc,
    auroc,
    reliability,
    retrieval_calibration,
    selective_accuracy,
)
from geoflow_fast.evaluation.report import Report
from geoflow_fast.evaluation.statistics import (
    Interval,
    bootstrap_interval,
    pearson,
    ranks,
    spearman,
)

__all__ = [
    "Interval",
    "Reliability",
    "Report",
    "RetrievalCalibration",
    "SelectiveAccuracy",
    "aurc",
    "auroc",
    "bootstrap_interval",
    "clopper_pearson_upper",
    "pearson",
    "ranks",
    "reliability",
    "retrieval_calibration",
    "selective_accuracy",
    "spearman",
]
