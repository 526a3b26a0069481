"""Logistic regression with a ridge, and which of several groups of features are worth having."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
FOLDS = 5
STEPS = 100
RESOLUTION = 1e-6
"""A feature whose standard deviation is not above this share of its mean, or of one, is rounding noise of float32."""


@dataclass(frozen=True)
class FeatureGain:
    """What a group of features brought to the answer to one question."""

    question: str
    """"right": is the first hit right? "no match": is the right item missing?"""
    name: str
    gain: float
    """By how much it lowered the cross-fitted negative log-likelihood of the groups kept before it, nats per query."""
    stderr: float
    """Standard error of the gain over queries."""
    kept: bool


def fit_logistic(features: Floats, positive: Bools) -> Floats:
    """Weights and, last, the constant [F + 1] of the logistic regression of `positive` [n] on features [n, F].

    The loss is the sum of -log likelihoods and half the squared norm of the weights of standardised features, without
    the constant. It is that of scikit-learn's `LogisticRegression` after a `StandardScaler`, but features that are
    constant up to rounding have no weight: on other lists they could differ by far more than the noise learned from.
    """
    from scipy import special

    mean, sd = features.mean(0), features.std(0)
    varies = sd > RESOLUTION * np.maximum(np.abs(mean), 1.0)
    sd = np.where(varies, sd, 1.0)
    design = np.column_stack((np.where(varies, (features - mean) / sd, 0.0), np.ones(len(features))))
    penalty, label = np.append(np.ones(len(mean)), 0.0), positive.astype(np.float64)
    weights = np.append(np.zeros(len(mean)), special.logit(smoothed_share(positive)))
    if positive.all() or not positive.any():
        return weights

    def loss(w: Floats) -> float:
        logit = design @ w
        return float((np.logaddexp(0, logit) - label * logit).sum() + (penalty * w**2).sum() / 2)

    value = loss(weights)
    for _ in range(STEPS):
        prob = special.expit(design @ weights)
        gradient = design.T @ (prob - label) + penalty * weights
        hessian = (design.T * (prob * (1 - prob))) @ design + np.diag(penalty)
        step = np.linalg.solve(hessian, gradient)
        decrease, size = float(gradient @ step), 1.0
        if decrease < 1e-12 * max(1.0, value):
            break
        while (after := loss(weights - size * step)) > value - 1e-4 * size * decrease and size > 1e-9:
            size /= 2
        weights, value = weights - size * step, after
    slopes = weights[:-1] / sd
    return np.append(slopes, weights[-1] - slopes @ mean)


def logits(features: Floats, weights: Floats) -> Floats:
    """The log-odds [n] of features [n, F] under weights [F + 1], the constant last."""
    return features @ weights[:-1] + weights[-1]


def log_losses(logit: Floats, positive: Bools) -> Floats:
    """-log probability [n] of what happened."""
    return np.logaddexp(0, np.where(positive, -logit, logit))


def mean_and_error(values: Floats, query: NDArray[np.int64]) -> tuple[float, float]:
    """The mean of `values` [n] and its standard error, where values of one `query` [n] depend on each other."""
    mean = float(values.mean())
    sums = np.bincount(query, values - mean)
    return mean, float(np.sqrt((sums**2).sum()) / len(values))


def smoothed_share(positive: Bools) -> float:
    """The share of `positive` [n], with half a case added on either side so that it is neither 0 nor 1."""
    return float((positive.sum() + 0.5) / (len(positive) + 1))
