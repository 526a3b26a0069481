"""Nearest training pairs as partners of marginals, and distances to them, against scikit-learn and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

import geoflow_fast as gf
from geoflow_fast.data.rows import BLOCK_ROWS
from geoflow_fast.geometry import log_area
from geoflow_fast.likelihood.reference import nearest_pairs
from geoflow_fast.noise import sample_uniform
from tests.likelihood.helpers import oracles, random_flow, random_pairs, seeded

EXACT = {"settings": gf.DensitySettings(n_steps=4, divergence="exact")}


def training_pairs(rows: int, dims: tuple[int, int] = (6, 5), dtype: torch.dtype = torch.float32) -> gf.EmbeddingPairs:
    generator = seeded(7)
    return gf.EmbeddingPairs.from_arrays(*(sample_uniform(rows, d, generator=generator).to(dtype) for d in dims))


def by_sklearn(stored: np.ndarray, queries: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Distance to the k-th nearest row, and the number of the nearest."""
    peer = NearestNeighbors(n_neighbors=k, metric="cosine", algorithm="brute").fit(stored.astype(np.float64))
    distance, index = peer.kneighbors(queries.double().numpy())
    return distance[:, -1], index[:, 0]


@pytest.mark.parametrize("rows", [1, 7, 129, 1023])
@pytest.mark.parametrize("neighbours", [1, 10])
def test_distances_are_those_of_scikit_learn(rows, neighbours):
    training, (image, text) = training_pairs(max(rows, neighbours)), random_pairs(9)
    ep = gf.epistemic(random_flow(), image, text, n_steps=1, reference=training, neighbours=neighbours)
    every = training[range(len(training))]
    for found, stored, queries in zip((ep.image_distance, ep.text_distance), every, (image, text)):
        assert found.shape == (9,)
        assert found.dtype == torch.float64
        truth = by_sklearn(stored.numpy(), queries, neighbours)[0]
        np.testing.assert_allclose(found, truth, rtol=0, atol=1e-6)


def test_marginals_are_those_with_the_partner_of_the_nearest_training_row():
    flow, training, (image, text) = random_flow(), training_pairs(50), random_pairs(9)
    ep = gf.epistemic(flow, image, text, reference=training, **EXACT)
    own = gf.epistemic(flow, image, text, **EXACT)
    images, texts = (x.numpy() for x in training[range(50)])
    partner_texts = torch.from_numpy(texts[by_sklearn(images, image, 1)[1]]).double()
    partner_images = torch.from_numpy(images[by_sklearn(texts, text, 1)[1]]).double()
    torch.testing.assert_close(ep.image, gf.epistemic(flow, image, partner_texts, **EXACT).image)
    torch.testing.assert_close(ep.text, gf.epistemic(flow, partner_images, text, **EXACT).text)
    for name in ("joint", "text_given_image", "image_given_text"):
        torch.testing.assert_close(getattr(ep, name), getattr(own, name))
    torch.testing.assert_close(ep.joint, ep.image + ep.text + ep.pmi)
    torch.testing.assert_close(ep.score, -ep.image - ep.text)
    assert float((ep.image - own.image).abs().max()) > 1e-3  # this flow's marginals do depend on the partner
    assert own.image_distance is None
    assert own.text_distance is None


def test_further_partners_are_averaged_with_the_nearest():
    flow, training, (image, text) = random_flow(), training_pairs(50), random_pairs(4)
    prompt = sample_uniform(1, 5, generator=seeded(), dtype=torch.float64)
    both = gf.epistemic(flow, image, text, reference=training, text_partners=prompt, **EXACT)
    nearest = gf.epistemic(flow, image, text, reference=training, **EXACT)
    alone = gf.epistemic(flow, image, prompt.expand_as(text), **EXACT)
    torch.testing.assert_close(both.image, (nearest.image + alone.image) / 2)
    torch.testing.assert_close(both.text, nearest.text)


def test_marginals_of_an_oracle_do_not_depend_on_the_partner():
    image, text, (field, _) = oracles(16, rows=5)
    ep = gf.epistemic(field, image, text, n_steps=20, solver="rk4", reference=training_pairs(30, (16, 16)))
    uniform = torch.full((5,), -log_area(16), dtype=torch.float64)
    torch.testing.assert_close(ep.image, uniform, atol=1e-3, rtol=0)
    torch.testing.assert_close(ep.text, uniform, atol=1e-3, rtol=0)
    torch.testing.assert_close(ep.pmi, field.log_density(image, text, "i2t") - uniform, atol=2e-3, rtol=0)


def test_an_image_with_several_texts_is_one_row():
    generator = seeded(3)
    images, texts = (sample_uniform(n, d, generator=generator) for n, d in ((4, 6), (12, 5)))
    owner = np.repeat([3, 1, 0, 2], 3)
    training = gf.EmbeddingPairs.from_arrays(images, texts, owner)
    of_images, of_texts = nearest_pairs(training, 2, (images, texts))
    cosine = images @ images.T
    torch.testing.assert_close(of_images.distance, 1 - cosine.topk(2).values[:, 1].double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(of_images.partner, texts[[6, 3, 9, 0]])  # the first text of each image
    torch.testing.assert_close(of_texts.partner, images[owner])
    subset = training.subset([4, 8])  # rows that the subset leaves out are not searched
    of_images, _ = nearest_pairs(subset, 1, (images, texts[:4]))
    expected = [4 if float(row[1]) > float(row[0]) else 8 for row in cosine]
    torch.testing.assert_close(of_images.partner, texts[expected])


def test_duplicates_have_no_distance():
    image, text = (x.float() for x in random_pairs(3))
    training = gf.EmbeddingPairs.from_arrays(image.repeat(5, 1), text.repeat(5, 1))
    ep = gf.epistemic(random_flow(torch.float32), image, text, n_steps=1, reference=training, neighbours=5)
    for distance in (ep.image_distance, ep.text_distance):
        assert float(distance.min()) >= 0
        assert float(distance.max()) < 1e-6
    further = gf.epistemic(random_flow(torch.float32), image, text, n_steps=1, reference=training, neighbours=6)
    assert float(further.image_distance.min()) > 1e-3


def test_rows_are_searched_block_by_block():
    generator = seeded(2)
    images, texts = (sample_uniform(BLOCK_ROWS + 3, d, generator=generator) for d in (6, 5))
    training = gf.EmbeddingPairs.from_arrays(images.half(), texts.half())
    some = torch.tensor([0, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 2])
    stored_images, stored_texts = training[some]
    of_images, of_texts = nearest_pairs(training, 3, (stored_images, stored_texts))
    torch.testing.assert_close(of_images.partner, stored_texts)
    torch.testing.assert_close(of_texts.partner, stored_images)
    truth = by_sklearn(training[range(len(training))][0].numpy(), stored_images, 3)[0]
    np.testing.assert_allclose(of_images.distance, truth, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1])
def test_one_row_and_none(rows):
    image, text = random_pairs(3)
    ep = gf.epistemic(random_flow(), image[:rows], text[:rows], n_steps=2, reference=training_pairs(20))
    for name in ("joint", "image", "text", "pmi", "score", "image_distance", "text_distance"):
        assert getattr(ep, name).shape == (rows,)
    strided = gf.epistemic(
        random_flow(), image.T.contiguous().T, text[:, :].flip(0).flip(0), n_steps=2, reference=training_pairs(20)
    )
    if rows:
        torch.testing.assert_close(strided.image_distance[:1], ep.image_distance)


def test_bad_references_are_named():
    flow, (image, text) = random_flow(), random_pairs(3)
    for error, message, options in (
        (TypeError, "reference must be EmbeddingPairs, got tuple", {"reference": (image, text)}),
        (ValueError, "image has width 6, but the reference has 8", {"reference": training_pairs(20, (8, 5))}),
        (ValueError, "text has width 5, but the reference has 6", {"reference": training_pairs(20, (6, 6))}),
        (ValueError, "the reference has 9 image rows, fewer than", {"reference": training_pairs(9)}),
        (ValueError, "neighbours must be at least 1", {"reference": training_pairs(20), "neighbours": 0}),
        (TypeError, "neighbours must be an integer", {"reference": training_pairs(20), "neighbours": 2.0}),
    ):
        with pytest.raises(error, match=message):
            gf.epistemic(flow, image, text, **options)
