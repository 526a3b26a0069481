"""Fits of linear models: ridge regressions, and the conditional logit by which all kinds of evidence are weighed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def ridge(gram: Floats, product: Floats, strengths: Sequence[float], towards: Floats | float = 0.0) -> list[Floats]:
    """The matrices [d', d] of the ridge regressions of y [n, d] on x [n, d'] with these strengths, given the moments
    x^T x and x^T y: each minimises |x w - y|^2 + strength * m |w - towards|^2, where m is the mean eigenvalue of the
    first one."""
    values, vectors = np.linalg.eigh(gram)
    rest = vectors.T @ (product - gram @ np.broadcast_to(towards, product.shape))
    unit = max(float(values.mean()), 1e-12)
    return [towards + vectors @ (rest / (values.clip(0) + strength * unit)[:, None]) for strength in strengths]


def fit_choice(
    design: Floats,
    target: Floats,
    prior_sd: Floats | float,
    possible: Bools | None = None,
    start: Floats | None = None,
    *,
    max_steps: int = 100,
) -> Floats:
    """Weights [F] that maximise the likelihood of `target` [Q, C] under softmax(design [Q, C, F] @ weights) over the
    `possible` [Q, C] choices, and a normal prior on the weights with the standard deviations `prior_sd` [F]: Newton's
    method on a strictly convex loss. `start`: weights to begin with, such as those of nearly the same queries."""
    count = design.shape[-1]
    scale = 1 / np.broadcast_to(np.asarray(prior_sd, np.float64), (count,))
    precision, rows = np.square(scale), design.reshape(target.size, count)
    meant = rows.T @ (target if possible is None else target * possible).reshape(-1)

    def at(w: Floats) -> tuple[Floats, float]:
        """Probabilities [Q, C], and the loss of all queries and the prior."""
        logits = choice_logits(design, w, possible)
        largest = logits.max(1, keepdims=True)
        prob = np.exp(logits - largest)
        total = prob.sum(1, keepdims=True)
        return prob / total, float((np.log(total) + largest).sum() - meant @ w + precision @ np.square(w) / 2)

    weights = np.zeros(count) if start is None else start
    prob, loss = at(weights)
    for _ in range(max_steps):
        weighted = design * prob[..., None]
        mean = weighted.sum(1)
        gradient = mean.sum(0) - meant + precision * weights
        hessian = weighted.reshape(rows.shape).T @ rows - mean.T @ mean + np.diag(precision)
        step = np.linalg.solve(hessian / np.outer(scale, scale), gradient / scale) / scale
        decrease = float(gradient @ step)
        if decrease < 1e-10 * max(1.0, loss):  # about twice the excess loss, which this last step squares
            return np.asarray(weights - step)
        size = 1.0
        while (after := at(weights - size * step))[1] > loss - 1e-4 * size * decrease:
            size /= 2
        weights, (prob, loss) = weights - size * step, after
    raise ValueError(f"the weights did not converge in {max_steps} steps; are densities or cosines extreme?")


def choice_logits(design: Floats, weights: Floats, possible: Bools | None = None) -> Floats:
    """The logits [Q, C] of the choices, minus infinity where one is not possible."""
    logits = design @ weights
    return np.asarray(logits if possible is None else np.where(possible, logits, -np.inf))
