"""Fits of linear models against scikit-learn, and at their edges."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import log_softmax
from sklearn.linear_model import Ridge

from geoflow_fast.linear import fit_choice, ridge


@pytest.mark.parametrize("strength", [1e-3, 0.3, 30.0])
@pytest.mark.parametrize("towards", [False, True])
def test_ridge_is_that_of_scikit_learn(strength, towards):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 5)) * (3, 1, 1, 0.1, 1), rng.normal(size=(40, 3))
    start = rng.normal(size=(5, 3)) if towards else np.zeros((5, 3))
    alpha = strength * float(np.trace(x.T @ x)) / 5
    known = start + Ridge(alpha, fit_intercept=False).fit(x, y - x @ start).coef_.T
    other, ours = ridge(x.T @ x, x.T @ y, [1.0, strength], start if towards else 0.0)
    np.testing.assert_allclose(ours, known, rtol=1e-9, atol=1e-12)
    assert not np.allclose(other, ours)


def test_a_ridge_of_rows_that_are_all_zero_is_where_it_shrinks_to():
    (weight,) = ridge(np.zeros((3, 3)), np.zeros((3, 2)), [0.1], np.ones((3, 2)))
    np.testing.assert_allclose(weight, 1.0)


@pytest.mark.parametrize("prior_sd", [0.5, 10.0, (0.1, 1.0, 30.0)])
def test_a_choice_has_the_largest_posterior(prior_sd):
    """The loss is written out once more and minimised by another method."""
    rng = np.random.default_rng(1)
    design, possible = rng.normal(size=(60, 7, 3)), rng.random((60, 7)) < 0.7
    possible[:, 0] = True
    chosen = np.argmax(np.where(possible, design @ (1.0, -2.0, 0.5) + rng.gumbel(size=(60, 7)), -np.inf), 1)
    target = np.eye(7)[chosen]

    def loss(weights):
        likelihood = log_softmax(np.where(possible, design @ weights, -np.inf), axis=1)[target > 0].sum()
        return float((np.square(weights / np.asarray(prior_sd)).sum() / 2) - likelihood)

    weights = fit_choice(design, target, prior_sd, possible)
    other = minimize(loss, np.zeros(3), method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12, "maxiter": 5000})
    np.testing.assert_allclose(weights, other.x, atol=1e-5)
    np.testing.assert_allclose(weights, fit_choice(design, target, prior_sd, possible, np.full(3, 9.0)), rtol=1e-6)


def test_data_that_a_choice_separates_have_an_optimum_and_none_need_no_weights():
    design = np.zeros((20, 2, 1))
    design[:, 0] = 1.0
    target = np.tile((1.0, 0.0), (20, 1))
    assert 3 < float(fit_choice(design, target, 10.0)[0]) < 20
    assert fit_choice(design[..., :0], target, 10.0).shape == (0,)
    with pytest.raises(ValueError, match="did not converge in 1 steps"):
        fit_choice(design, target, 10.0, max_steps=1)
