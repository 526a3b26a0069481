"""How good uncertainties are, and acting on them: metrics, thresholds, figures and a report."""

from __future__ import annotations

from geoflow_fast.evaluation.metrics import (
    AbstentionThreshold,
    Interval,
    Reliability,
    RetrievalCalibration,
    SelectiveAccuracy,
    abstention_threshold,
    aurc,
    auroc,
    bootstrap_interval,
    clopper_pearson_upper,
    pearson,
    ranks,
    reliability,
    retrieval_calibration,
    selective_accuracy,
    spearman,
)
from geoflow_fast.evaluation.report import Report

__all__ = [
    "AbstentionThreshold",
    "Interval",
    "Reliability",
    "Report",
    "RetrievalCalibration",
    "SelectiveAccuracy",
    "abstention_threshold",
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
