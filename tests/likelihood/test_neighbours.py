"""Nearest training pairs as partners of marginals, and distances to them, against scikit-learn and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

import geoflow_fast as gf
from geoflow_fast.data.rows import BLOCK_ROWS
from geoflow_fast.directions import Direction
from geoflow_fast.geometry import log_area
from geoflow_fast.likelihood.neighbours import NEIGHBOURS, nearest_partners
from geoflow_fast.noise import sample_uniform
from tests.likelihood.helpers import oracles, random_flow, random_pairs, seeded, training_pairs

EXACT = {"settings": gf.DensitySettings(n_steps=4, divergence="exact")}


def both(training: gf.EmbeddingPairs) -> dict[str, gf.EmbeddingPairs]:
    return {"image_partners": training, "text_partners": training}


def by_sklearn(stored: torch.Tensor, queries: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Distances of the nearest rows, and the number of the nearest."""
    peer = NearestNeighbors(n_neighbors=min(NEIGHBOURS, len(stored)), metric="cosine", algorithm="brute")
    distance, index = peer.fit(stored.double().numpy()).kneighbors(queries.double().numpy())
    return distance, index[:, 0]


@pytest.mark.parametrize("rows", [1, 7, 129, 1023])
def test_distances_are_those_of_scikit_learn(rows):
    training, (image, text) = training_pairs(rows), random_pairs(9)
    ep = gf.epistemic(random_flow(), image, text, n_steps=1, **both(training))
    for distances, stored, queries in zip(
        (ep.image_distances, ep.text_distances), training[range(rows)], (image, text)
    ):
        assert distances.shape == (9, min(rows, NEIGHBOURS))
        assert distances.dtype == torch.float64
        np.testing.assert_allclose(distances, by_sklearn(stored, queries)[0], rtol=0, atol=1e-6)


def test_marginals_are_those_with_the_partner_of_the_nearest_training_row():
    flow, training, (image, text) = random_flow(), training_pairs(50), random_pairs(9)
    ep = gf.epistemic(flow, image, text, **both(training), **EXACT)
    own = gf.epistemic(flow, image, text, **EXACT)
    images, texts = training[range(50)]
    partner_texts, partner_images = texts[by_sklearn(images, image)[1]], images[by_sklearn(texts, text)[1]]
    torch.testing.assert_close(ep.image, gf.epistemic(flow, image, partner_texts, **EXACT).image)
    torch.testing.assert_close(ep.text, gf.epistemic(flow, partner_images, text, **EXACT).text)
    for name in ("joint", "text_given_image", "image_given_text"):
        torch.testing.assert_close(getattr(ep, name), getattr(own, name))
    torch.testing.assert_close(ep.joint, ep.image + ep.text + ep.pmi)
    torch.testing.assert_close(ep.score, -ep.image - ep.text)
    assert float((ep.image - own.image).abs().max()) > 1e-3  # this flow's marginals do depend on the partner


@pytest.mark.parametrize(
    ("name", "side", "other"), [("text_partners", "image", "text"), ("image_partners", "text", "image")]
)
def test_training_pairs_for_one_of_two_sides(name, side, other):
    flow, training, (image, text) = random_flow(), training_pairs(50), random_pairs(4)
    one = gf.epistemic(flow, image, text, **{name: training}, **EXACT)
    two, own = gf.epistemic(flow, image, text, **both(training), **EXACT), gf.epistemic(flow, image, text, **EXACT)
    torch.testing.assert_close(getattr(one, side), getattr(two, side))
    torch.testing.assert_close(getattr(one, other), getattr(own, other))
    assert torch.equal(getattr(one, f"{side}_distances"), getattr(two, f"{side}_distances"))
    assert getattr(one, f"{other}_distances") is None
    assert own.image_distances is own.text_distances is None


def test_probes_are_those_of_the_pair_itself():
    """A pair that is its own nearest neighbour has the same marginals, noise included, as without training pairs."""
    flow, (image, text) = random_flow(torch.float32), random_pairs(7, torch.float32)
    training = gf.EmbeddingPairs.from_arrays(image, text)
    ep = gf.epistemic(flow, image, text, n_probes=2, generator=seeded(), **both(training))
    own = gf.epistemic(flow, image, text, n_probes=2, generator=seeded())
    for name in ("image", "text", "pmi", "score", "stderr"):
        torch.testing.assert_close(getattr(ep, name), getattr(own, name), rtol=1e-4, atol=1e-4)


def test_marginals_of_an_oracle_do_not_depend_on_the_partner():
    image, text, (field, _) = oracles(16, rows=5)
    ep = gf.epistemic(field, image, text, n_steps=20, solver="rk4", **both(training_pairs(30, (16, 16))))
    uniform = torch.full((5,), -log_area(16), dtype=torch.float64)
    torch.testing.assert_close(ep.image, uniform, atol=1e-3, rtol=0)
    torch.testing.assert_close(ep.text, uniform, atol=1e-3, rtol=0)
    torch.testing.assert_close(ep.pmi, field.log_density(image, text, "i2t") - uniform, atol=2e-3, rtol=0)


def test_an_image_with_several_texts_is_one_row():
    generator = seeded(3)
    images, texts = (sample_uniform(n, d, generator=generator) for n, d in ((4, 6), (12, 5)))
    owner = np.repeat([3, 1, 0, 2], 3)
    training = gf.EmbeddingPairs.from_arrays(images, texts, owner)
    (partner,), distances = nearest_partners(training, images, Direction.I2T)
    cosine = images @ images.T
    torch.testing.assert_close(distances, 1 - cosine.sort(descending=True).values.double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(partner, texts[[6, 3, 9, 0]])  # the first text of each image
    torch.testing.assert_close(nearest_partners(training, texts, Direction.T2I)[0][0], images[owner])
    subset = training.subset([4, 8])  # of images 1 and 0; rows that the subset leaves out are not searched
    expected = [4 if float(row[1]) > float(row[0]) else 8 for row in cosine]
    torch.testing.assert_close(nearest_partners(subset, images, Direction.I2T)[0][0], texts[expected])


def test_duplicates_have_no_distance():
    image, text = random_pairs(3, torch.float32)
    training = gf.EmbeddingPairs.from_arrays(image.repeat(5, 1), text.repeat(5, 1))
    ep = gf.epistemic(random_flow(torch.float32), image, text, n_steps=1, **both(training))
    for distances in (ep.image_distances, ep.text_distances):
        assert float(distances.min()) >= 0
        assert float(distances[:, 4].max()) < 1e-6
        assert float(distances[:, 5].min()) > 1e-3


def test_rows_are_searched_block_by_block():
    generator = seeded(2)
    images, texts = (sample_uniform(BLOCK_ROWS + 3, d, generator=generator) for d in (6, 5))
    training = gf.EmbeddingPairs.from_arrays(images.half(), texts.half())
    some = torch.tensor([0, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 2])
    stored_images, stored_texts = training[some]
    (partner,), distances = nearest_partners(training, stored_images, Direction.I2T)
    torch.testing.assert_close(partner, stored_texts)
    truth = by_sklearn(training[range(len(training))][0], stored_images)[0]
    np.testing.assert_allclose(distances, truth, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_few_rows_none_and_strided_ones(rows):
    image, text = random_pairs(3)
    options = both(training_pairs(20)) | EXACT
    ep = gf.epistemic(random_flow(), image.T.contiguous().T[:rows], text.repeat(1, 2)[:rows, :5], **options)
    every = gf.epistemic(random_flow(), image, text, **options)
    for name in ("joint", "image", "text", "pmi", "score", "image_distances", "text_distances"):
        torch.testing.assert_close(getattr(ep, name), getattr(every, name)[:rows])


def test_bad_training_pairs_are_named():
    flow, (image, text) = random_flow(), random_pairs(3)
    for name in ("text_partners", "image_partners"):
        for message, training in (
            (f"{name} has no pairs", training_pairs(20).subset([])),
            (rf"{name} has pairs of widths \(8, 5\), .* rows of width 6", training_pairs(20, (8, 5))),
            (rf"{name} has pairs of widths \(6, 6\), .* rows of width 5", training_pairs(20, (6, 6))),
        ):
            with pytest.raises(ValueError, match=message):
                gf.epistemic(flow, image, text, **{name: training})
        with pytest.raises(TypeError, match=f"{name} must be a tensor, an array or EmbeddingPairs, got tuple"):
            gf.epistemic(flow, image, text, **{name: (image, text)})
