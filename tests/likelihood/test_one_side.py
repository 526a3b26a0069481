"""The epistemic score of images alone and of texts alone, against closed forms and against pairs."""

from __future__ import annotations

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.geometry import log_area
from geoflow_fast.worlds import BumpField
from tests.likelihood.helpers import oracles, random_flow, random_pairs, seeded, training_pairs

SIDES = [("image", "text"), ("text", "image")]
EXACT = {"settings": gf.DensitySettings(n_steps=4, divergence="exact")}


def pair_of(side: str, rows, partner) -> dict[str, torch.Tensor]:
    return {side: rows, "text" if side == "image" else "image": partner}


@pytest.mark.parametrize(("side", "other"), SIDES)
def test_marginals_of_oracles_are_known(side, other):
    image, text, (pairs, bumps) = oracles(16, rows=5)
    rows, partner = (image, text) if side == "image" else (text, image)
    solve = {"n_steps": 20, "solver": "rk4", f"{other}_partners": partner[:2]}
    uniform = torch.full((5,), -log_area(16), dtype=torch.float64)
    torch.testing.assert_close(getattr(gf.epistemic(pairs, **{side: rows}, **solve), side), uniform, atol=1e-3, rtol=0)
    assert isinstance(bumps, BumpField)
    ep = gf.epistemic(bumps, **{side: rows}, **solve)
    truth = bumps.log_density(image, text, "t2i" if side == "image" else "i2t")
    torch.testing.assert_close(getattr(ep, side), truth, atol=1e-3, rtol=0)
    torch.testing.assert_close(ep.score, -truth, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("side", "other"), SIDES)
def test_a_partner_that_is_given_is_the_other_side_of_a_pair(side, other):
    flow, (image, text) = random_flow(), random_pairs(7)
    rows, partner = (image, text) if side == "image" else (text, image)
    pair = gf.epistemic(flow, image, text, generator=seeded())
    alone = gf.epistemic(flow, **{side: rows}, **{f"{other}_partners": partner.unsqueeze(1)}, generator=seeded())
    torch.testing.assert_close(getattr(alone, side), getattr(pair, side))
    torch.testing.assert_close(alone.score, -getattr(pair, side))
    for name in ("joint", "text_given_image", "image_given_text", other, "pmi"):
        assert bool(getattr(alone, name).isnan().all()), name
    assert alone.stderr is alone.image_distances is alone.text_distances is None


@pytest.mark.parametrize(("side", "other"), SIDES)
def test_by_default_the_flow_draws_the_partner(side, other):
    flow, (image, text) = random_flow(), random_pairs(7)
    rows = image if side == "image" else text
    alone = gf.epistemic(flow, **{side: rows}, generator=seeded(), **EXACT)
    # Partners differ with the seed, rows have the same noise whatever stands beside them.
    again, another = (gf.epistemic(flow, **{side: rows[:3]}, generator=seeded(s), **EXACT) for s in (0, 5))
    torch.testing.assert_close(again.score, alone.score[:3])
    assert float((another.score - alone.score[:3]).abs().max()) > 1e-6
    seed = int(torch.randint(2**62, (), generator=seeded()))
    drawn = gf.sample(
        flow, **{side: rows}, n_samples=1, n_steps=10, guidance=0.0, solver="ab2", generator=seeded(seed)
    )[["image", "text"].index(other)]
    pair = gf.epistemic(flow, **pair_of(side, rows, drawn.squeeze(1)), **EXACT)
    torch.testing.assert_close(getattr(alone, side), getattr(pair, side))


@pytest.mark.parametrize(("side", "other"), SIDES)
def test_training_pairs_give_partner_and_distances(side, other):
    flow, training, (image, text) = random_flow(), training_pairs(30), random_pairs(5)
    rows = image if side == "image" else text
    alone = gf.epistemic(flow, **{side: rows}, **{f"{other}_partners": training}, generator=seeded())
    pair = gf.epistemic(flow, image, text, **{f"{other}_partners": training}, generator=seeded())
    torch.testing.assert_close(getattr(alone, side), getattr(pair, side))
    assert torch.equal(getattr(alone, f"{side}_distances"), getattr(pair, f"{side}_distances"))
    assert getattr(alone, f"{other}_distances") is None


def test_standard_errors_and_typical_values():
    flow, (image, _) = random_flow(), random_pairs(32)
    many = [
        gf.epistemic(
            flow,
            image=image,
            text_partners=image[:1, :5] / image[:1, :5].norm(),
            n_probes=4,
            generator=seeded(s),
        )
        for s in range(12)
    ]
    stated = torch.stack([ep.stderr.square() for ep in many]).mean().sqrt()
    seen = torch.stack([ep.score for ep in many]).std(0).square().mean().sqrt()
    assert float(stated / seen) == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("rows", [0, 1, 129])
def test_few_rows_none_and_other_types(rows):
    flow, (image, _) = random_flow(torch.float32), random_pairs(129, torch.float32)
    every = gf.epistemic(flow, image=image, generator=seeded()).score[:rows]
    for some in (image[:rows], image.repeat(1, 2)[:rows, :6], image[:rows].numpy(), image[:rows].double()):
        torch.testing.assert_close(gf.epistemic(flow, image=some, generator=seeded()).score, every, atol=1e-3, rtol=0)


def test_bad_input_is_named():
    flow, (image, text) = random_flow(), random_pairs(4)
    field = oracles(16, rows=4)[2][0]
    for error, message, call in (
        (ValueError, "both missing", lambda: gf.epistemic(flow)),
        (ValueError, "image alone needs text_partners: a PairField", lambda: gf.epistemic(field, image=image)),
        (ValueError, "text alone needs image_partners", lambda: gf.epistemic(field, text=text)),
        (ValueError, r"image must be \[B, d\]", lambda: gf.epistemic(flow, image=image[0])),
        (
            ValueError,
            "image row 1 has norm 2",
            lambda: gf.epistemic(flow, image=image * torch.tensor([[1], [2], [1], [1]])),
        ),
        (ValueError, "image must be", lambda: gf.epistemic(flow, image=text)),
        (ValueError, "text", lambda: gf.epistemic(flow, image=image, text_partners=image)),
        (
            ValueError,
            "text_partners has no pairs",
            lambda: gf.epistemic(flow, image=image, text_partners=training_pairs(3).subset([])),
        ),
        (ValueError, "widths", lambda: gf.epistemic(flow, image=image, text_partners=training_pairs(3, (5, 5)))),
        (ValueError, "text", lambda: gf.epistemic(flow, image=image, text_partners=training_pairs(3, (6, 9)))),
        (ValueError, "image_partners", lambda: gf.epistemic(flow, image=image, image_partners=image)),
        (TypeError, "image", lambda: gf.epistemic(flow, image=[1.0])),
    ):
        with pytest.raises(error, match=message):
            call()
