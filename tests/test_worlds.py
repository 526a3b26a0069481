"""Closed-form densities integrate to one and agree with samples, with each other and with brute force."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor

from geoflow_fast.geometry import log_area, normalize
from geoflow_fast.spherical import log_bump, sample_bump
from geoflow_fast.worlds import PART, BumpField, ClipWorld, ConceptWorld, PairField, PairWorld
from tests.samples import seeded, unit

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="module")
def world() -> ConceptWorld:
    return ConceptWorld()


def test_text_marginal_is_the_integral_of_the_joint(world):
    """The integral is estimated by importance sampling around the point between text and concept, with standard errors
    below 0.005."""
    generator = torch.Generator().manual_seed(2)
    _, text, _ = world.sample(2, generator=generator)
    for row in text.double():
        parts = []
        for k in world.known:
            c = world.text_c[world.level[k]]
            back = row @ world.rotation
            middle = world.image_c * world.centres[k] + c * back
            middle = (middle / middle.norm()).expand(20_000, -1)
            x = sample_bump(middle, 1.2, generator)
            log_p = log_bump(x @ world.centres[k], world.image_c, 24) + log_bump(x @ back, c, 24)
            weight = log_p - log_bump((x * middle).sum(1), 1.2, 24)
            parts.append(weight.logsumexp(0) - math.log(len(x)))
        estimate = torch.stack(parts).logsumexp(0) - math.log(len(world.known))
        assert float(world.log_text(row[None])) == pytest.approx(float(estimate), abs=0.05)


def test_marginals_integrate_to_one():
    small = ConceptWorld(dim=4)
    points = unit(100_000, 4, dtype=torch.float64)
    for log_p in (small.log_image(points), small.log_text(points)):
        assert float((log_p + log_area(4)).exp().mean()) == pytest.approx(1, abs=0.03)


def test_densities_obey_the_chain_rule_and_posteriors_sum_to_one(world):
    image, text, concept = world.sample(32, generator=torch.Generator().manual_seed(3))
    assert set(concept.tolist()) <= set(world.known.tolist())
    joint = world.log_joint(image, text)
    torch.testing.assert_close(joint, world.log_text_given_image(image, text) + world.log_image(image))
    torch.testing.assert_close(joint, world.log_image_given_text(image, text) + world.log_text(text))
    for direction, queries, gallery in (("t2i", text, image), ("i2t", image, text)):
        posterior = world.gallery_posterior(queries, gallery, direction)
        torch.testing.assert_close(posterior.sum(1), torch.ones(32, dtype=torch.float64))
        assert float(posterior.diagonal().mean()) > 0.3  # the true partner is the likeliest item on average
    assert world.gallery_posterior(text[:0], image, "t2i").shape == (0, 32)
    with pytest.raises(ValueError, match="direction"):
        world.gallery_posterior(text, image, "joint")


def test_held_out_concepts_are_disjoint_and_there_is_a_modality_gap(world):
    held_out = set(world.far.tolist()) | set(world.near.tolist())
    assert len(world.far) == 4
    assert len(world.near) == 3
    assert held_out.isdisjoint(world.known.tolist())
    assert len(world.known) == 25
    image, text, _ = world.sample(20_000, generator=torch.Generator().manual_seed(4))
    assert float((image.mean(0) - text.mean(0)).norm()) > 0.2


@pytest.mark.parametrize("d", [3, 16])
def test_fields_are_tangent_and_do_not_move_the_given_stream(d):
    rotation = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))[0]
    image, text = unit(9, d, dtype=torch.float64), unit(9, d, seed=1, dtype=torch.float64)
    for field in (PairField(rotation, 0.9), BumpField(image[0], text[0], 0.9)):
        for direction in ("joint", "i2t", "t2i"):
            velocities = field.velocity(image, text, 0.5, direction)
            for x, v, given in zip((image, text), velocities, (direction == "i2t", direction == "t2i")):
                assert float((x * v).sum(1).abs().max()) < 1e-12
                assert not given or not v.any()


@pytest.fixture(scope="module")
def clip() -> ClipWorld:
    return ClipWorld()


@pytest.fixture(scope="module")
def few_scenes() -> ClipWorld:
    """As wide as CLIP, but of so few scenes and styles that all can be enumerated."""
    return ClipWorld(groups=2, styles=7, wrong=0.1)


def enumerated(world: ClipWorld, rows: Tensor, *, texts: bool) -> tuple[Tensor, Tensor]:
    """log p(row | scene) [B, S] and the log-probabilities [S] of the known scenes, from the definition: a sum over all
    levels and styles of densities around unit vectors, with a Bessel function of scipy."""
    stream = world._text if texts else world._image
    d, kappa = world.dim, stream.kappa
    log_c = (d / 2 - 1) * math.log(kappa) - d / 2 * math.log(2 * math.pi) - math.log(special.ive(d / 2 - 1, kappa))
    scenes = [s for s, concept in enumerate(world.concept.tolist()) if concept in world.known.tolist()]
    weight = world.log_weight[scenes].exp()
    rows = rows.double() / rows.double().norm(dim=1, keepdim=True)
    columns = []
    for scene in scenes:
        total = torch.full((len(rows),), -math.inf, dtype=torch.float64)
        shares = world.LEVELS if texts else (1.0,)
        for level, share in enumerate(shares):
            for style, log_style in zip(stream.styles, stream.log_style):
                mean = stream.offset + stream.nodes[stream.levels[scene, level]] + style
                assert float(mean.norm()) == pytest.approx(1, abs=1e-12)
                total = total.logaddexp(math.log(share) + log_style + log_c + kappa * (rows @ mean - 1))
        columns.append(total)
    given, log_scene = torch.stack(columns, 1), (weight / weight.sum()).log()
    if texts:  # a wrong caption is one of any scene
        wrong = (log_scene + given).logsumexp(1, keepdim=True)
        given = torch.logaddexp(given + math.log(1 - world.wrong), wrong + math.log(world.wrong))
    return given, log_scene


def test_densities_at_the_width_of_clip_are_sums_over_scenes_levels_and_styles(few_scenes):
    image, text, _ = few_scenes.sample(9, generator=seeded(1))
    image[0], text[1] = unit(2, 512, dtype=torch.float64).float()  # far from everything
    (by_image, log_scene), (by_text, _) = (
        enumerated(few_scenes, rows, texts=texts) for rows, texts in ((image, False), (text, True))
    )
    close = {"rtol": 1e-11, "atol": 1e-7}
    log_image, log_text = ((log_scene + given).logsumexp(1) for given in (by_image, by_text))
    torch.testing.assert_close(few_scenes.log_image(image), log_image, **close)
    torch.testing.assert_close(few_scenes.log_text(text), log_text, **close)
    for shift in (0, 4):  # pairs, and images with texts of others
        joint = (log_scene + by_image + by_text.roll(shift, 0)).logsumexp(1)
        other = text.roll(shift, 0)
        torch.testing.assert_close(few_scenes.log_joint(image, other), joint, **close)
        pmi = joint - log_image - log_text.roll(shift)
        torch.testing.assert_close(few_scenes.pmi(image, other), pmi, **close)
        torch.testing.assert_close(few_scenes.log_text_given_image(image, other), joint - log_image, **close)
        torch.testing.assert_close(few_scenes.log_image_given_text(image, other), joint - log_text.roll(shift), **close)


class Blurred(ClipWorld):
    """Densities so flat that a mean over uniform points is close to their integral."""

    MEAN_COSINE = 0.6


@pytest.mark.parametrize("dim", [4, 5])
def test_densities_of_a_narrow_clip_world_integrate_to_one(dim):
    small = Blurred(dim, groups=2, styles=5, wrong=0.1)
    points = unit(20_000, dim, dtype=torch.float64)
    image, text, _ = small.sample(1, generator=seeded(2))
    logs = {
        "image": small.log_image(points),
        "text": small.log_text(points),
        "text given image": small.log_text_given_image(image.double().expand_as(points), points),
        "image given text": small.log_image_given_text(points, text.double().expand_as(points)),
    }
    for name, log_p in logs.items():
        weight = (log_p + log_area(dim)).exp()
        error = float(weight.std()) / len(points) ** 0.5
        assert error < 0.02, name
        assert float(weight.mean()) == pytest.approx(1, abs=4 * error), name


@pytest.mark.parametrize("kind", ["small", "clip"])
def test_samples_follow_the_density(kind):
    """The mean of p'/p over samples of p is one for every density p'; here it is half p, half that of another world."""
    own, other = (ConceptWorld(8, seed) if kind == "small" else Blurred(4, seed, groups=2, styles=5) for seed in (0, 1))
    image, text, _ = own.sample(20_000, generator=seeded(3))
    for mine, its in (
        (own.log_image(image), other.log_image(image)),
        (own.log_text(text), other.log_text(text)),
        (own.log_joint(image, text), other.log_joint(image, text)),
    ):
        ratio = (torch.logaddexp(mine, its) - mine).exp() / 2
        assert float(ratio.mean()) == pytest.approx(1, abs=4 * float(ratio.std()) / len(ratio) ** 0.5)
        assert float((mine - its).mean()) > 0.02  # the other density is another


@pytest.mark.parametrize("wrong", [0.0, 0.1])
@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_posteriors_are_those_of_brute_force(direction, wrong):
    """Without wrong captions a product of matrices underflows for most pairs, which must not show."""
    world = ClipWorld(groups=2, styles=7, wrong=wrong)
    image, text, _ = world.sample(33, generator=seeded(4))
    queries, gallery = (text[:7], image) if direction == "t2i" else (image[:7], text)
    log_likelihood = torch.stack(
        [
            world.log_text_given_image(gallery, query.expand_as(gallery))
            if direction == "t2i"
            else world.log_image_given_text(query.expand_as(gallery), gallery)
            for query in queries
        ]
    )
    log_query = world.log_text(queries) if direction == "t2i" else world.log_image(queries)
    pmi = world.gallery_pmi(queries, gallery, direction)
    torch.testing.assert_close(pmi, log_likelihood - log_query[:, None], rtol=1e-9, atol=1e-6)
    posterior = world.gallery_posterior(queries, gallery, direction)
    torch.testing.assert_close(posterior, log_likelihood.softmax(1), rtol=1e-6, atol=1e-12)
    missing = world.missing_probability(queries, gallery, direction, 0.2)
    there = (log_likelihood.logsumexp(1) - math.log(33)).double()
    expected = 0.2 / (0.2 + 0.8 * (there - log_query).exp())
    torch.testing.assert_close(missing, expected, rtol=1e-6, atol=1e-12)


def test_posteriors_of_groups_of_captions_are_those_of_brute_force(few_scenes):
    drawn = few_scenes.sample_captioned(12, 3, generator=seeded(5))
    order = torch.randperm(36, generator=seeded(6))
    text, groups = drawn.text[order], drawn.text_image_index[order].int()
    by_image, log_scene = enumerated(few_scenes, drawn.image[:5], texts=False)
    by_text, _ = enumerated(few_scenes, text, texts=True)
    captions = torch.stack([by_text[groups == g].sum(0) for g in range(12)])
    log_joint = (log_scene + by_image[:, None] + captions).logsumexp(2)
    log_captions = (log_scene + captions).logsumexp(1)
    posterior = few_scenes.gallery_posterior(drawn.image[:5], text, "i2t", groups=groups)
    torch.testing.assert_close(posterior, (log_joint - log_captions).softmax(1), rtol=1e-6, atol=1e-12)
    one_each = few_scenes.gallery_posterior(drawn.image[:5], text, "i2t", groups=torch.arange(36))
    torch.testing.assert_close(one_each, few_scenes.gallery_posterior(drawn.image[:5], text, "i2t"))


def assert_calibrated(probability: Tensor, outcome: Tensor, bins: int = 4) -> None:
    """In equally large bins of the probability, outcomes are as many as it says, within four standard deviations."""
    order = probability.argsort()
    for part in order.chunk(bins):
        p, hits = probability[part], outcome[part].sum()
        assert abs(float(hits - p.sum())) < 4 * float((p * (1 - p)).sum().sqrt()) + 0.5


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
@pytest.mark.parametrize("kind", ["clip", "world"])
def test_true_posteriors_are_calibrated(kind, direction, request):
    """The likeliest item is the right one as often as its probability says, and items are missing as often."""
    world: PairWorld = request.getfixturevalue(kind)
    count = 600 if kind == "clip" else 200
    drawn = world.sample_search(count, count, direction, share=0.4, generator=seeded(7))
    pmi = world.gallery_pmi(drawn.queries, drawn.gallery, direction)
    there = drawn.item >= 0
    best = pmi.softmax(1).max(1)
    assert_calibrated(best.values[there], best.indices[there] == drawn.item[there])
    missing = world.missing_probability(drawn.queries, drawn.gallery, direction, 0.4)
    assert_calibrated(missing, ~there)
    assert float(missing[~there].mean()) > float(missing[there].mean()) + 0.1
    with pytest.raises(AssertionError):  # the test can fail
        assert_calibrated((3 * pmi).softmax(1).amax(1)[there], best.indices[there] == drawn.item[there])


def test_several_captions_say_more_than_one_and_are_calibrated(clip):
    drawn = clip.sample_captioned(400, 5, generator=seeded(8))
    right = torch.arange(400)
    grouped = clip.gallery_posterior(drawn.image, drawn.text, "i2t", groups=drawn.text_image_index)
    assert grouped.shape == (400, 400)
    best = grouped.max(1)
    assert_calibrated(best.values, best.indices == right)
    single = clip.gallery_posterior(drawn.image, drawn.text[::5], "i2t")
    assert float(grouped[right, right].log().mean()) > float(single[right, right].log().mean()) + 0.3


@pytest.mark.parametrize("direction", ["t2i", "i2t"])
def test_posteriors_do_not_depend_on_order_or_parts(few_scenes, direction):
    image, text, _ = few_scenes.sample(PART + 1, generator=seeded(9))
    queries, gallery = (text[:129], image) if direction == "t2i" else (image[:129], text)
    whole = few_scenes.gallery_posterior(queries, gallery, direction)
    order = torch.randperm(len(gallery), generator=seeded(10))
    torch.testing.assert_close(few_scenes.gallery_posterior(queries, gallery[order], direction), whole[:, order])
    parts = [few_scenes.gallery_posterior(part, gallery, direction) for part in queries.split(50)]
    torch.testing.assert_close(torch.cat(parts), whole)
    strided = torch.cat([queries, queries], 1)[:, : few_scenes.dim]
    torch.testing.assert_close(few_scenes.gallery_posterior(strided, gallery, direction), whole)


def test_rows_are_computed_alike_alone_and_among_others(few_scenes):
    image, text, _ = few_scenes.sample(PART + 7, generator=seeded(11))
    last = slice(PART + 6, None)
    torch.testing.assert_close(few_scenes.log_image(image)[last], few_scenes.log_image(image[last]))
    torch.testing.assert_close(few_scenes.log_joint(image, text)[last], few_scenes.log_joint(image[last], text[last]))


def test_empty_batches_of_a_clip_world(clip):
    image, text, concept = clip.sample(0)
    assert (image.shape, text.shape, concept.shape) == ((0, 512), (0, 512), (0,))
    for log_p in (clip.log_image(image), clip.log_text(text), clip.log_joint(image, text)):
        assert log_p.shape == (0,)
    some = clip.sample(3)[0]
    assert clip.gallery_posterior(text, some, "t2i").shape == (0, 3)
    assert clip.gallery_posterior(some, text, "i2t").shape == (3, 0)
    assert clip.gallery_posterior(some, text, "i2t", groups=concept).shape == (3, 0)
    with pytest.raises(ValueError, match="at least one item"):
        clip.missing_probability(some, text, "i2t", 0.5)
    nothing = clip.sample_search(0, 0, "t2i")
    assert (nothing.queries.shape, nothing.gallery.shape, nothing.item.shape) == ((0, 512), (0, 512), (0,))


def test_missing_probability_of_certain_shares(clip):
    image, text, _ = clip.sample(7, generator=seeded(12))
    assert bool((clip.missing_probability(text, image, "t2i", 0.0) == 0).all())
    assert bool((clip.missing_probability(text, image, "t2i", 1.0) == 1).all())


def test_a_clip_world_is_a_function_of_its_seed():
    worlds = [ClipWorld(32, seed, groups=2, styles=9) for seed in (3, 3, 4)]
    draws = [dataclasses.astuple(world.sample_captioned(7, 2, generator=seeded(0))) for world in worlds]
    for mine, again in zip(draws[0], draws[1]):
        assert torch.equal(mine, again)
    assert not torch.equal(draws[0][0], draws[2][0])


def test_captions_are_vague_and_wrong_as_often_as_said(clip):
    drawn = clip.sample_captioned(2000, 5, generator=seeded(13))
    assert torch.equal(drawn.text_image_index, torch.arange(2000).repeat_interleave(5))
    assert (drawn.image.dtype, drawn.text.dtype, drawn.text.shape) == (torch.float32, torch.float32, (10_000, 512))
    shares = torch.bincount(drawn.level, minlength=3) / 10_000
    torch.testing.assert_close(shares, torch.tensor(clip.LEVELS), rtol=0, atol=4 * 0.005)
    assert float(drawn.wrong.double().mean()) == pytest.approx(clip.wrong, abs=4 * (clip.wrong / 10_000) ** 0.5)
    # A caption is the nearer to its image the more specific it is, and a wrong one is as near as that of another.
    cosine = (drawn.text * drawn.image[drawn.text_image_index]).sum(1)
    levels = [float(cosine[(drawn.level == level) & ~drawn.wrong].mean()) for level in range(3)]
    assert levels[0] > levels[1] + 0.005 > levels[2] + 0.03
    unmatched = (drawn.text.roll(5, 0) * drawn.image[drawn.text_image_index]).sum(1)
    assert float(cosine[drawn.wrong].mean()) == pytest.approx(float(unmatched.mean()), abs=0.02)


def test_images_of_one_scene_and_style_are_near_duplicates(clip):
    drawn = clip.sample_captioned(1000, 1, generator=seeded(14))
    cosine = (drawn.image @ drawn.image.T).fill_diagonal_(-1)
    query, item = (cosine > 0.93).nonzero().T
    assert 4 < len(query) < 100
    assert float((drawn.scene[query] == drawn.scene[item]).double().mean()) > 0.5


def test_clip_concepts_are_drawn_and_held_out_as_in_the_small_world(clip):
    held_out = set(clip.far.tolist()) | set(clip.near.tolist())
    assert (len(clip.far), len(clip.near)) == (64, 24)
    assert held_out.isdisjoint(clip.known.tolist())
    assert len(held_out) + len(clip.known) == 512
    assert set(clip.sample(500, generator=seeded(15))[2].tolist()) <= set(clip.known.tolist())
    mean = {}
    for name, concepts in (("known", clip.known), ("near", clip.near), ("far", clip.far)):
        image, _, concept = clip.sample(300, generator=seeded(16), concepts=concepts)
        assert set(concept.tolist()) <= set(concepts.tolist())
        mean[name] = float(clip.log_image(image).mean())
    assert mean["known"] > mean["near"] + 10 > mean["far"] + 20


def test_errors_of_worlds_say_what_is_wrong(clip, world):
    image, text, _ = clip.sample(4, generator=seeded(17))
    for groups, words in (
        (torch.tensor([0, 1]), r"groups must be \[4\]"),
        (torch.tensor([0, 2, 2, 0]), "without gaps"),
        (torch.tensor([0, 1, 2, 4]), "between 0 and 3"),
    ):
        with pytest.raises(ValueError, match=words):
            clip.gallery_posterior(image, text, "i2t", groups=groups)
    small = world.sample(4)[0]
    with pytest.raises(ValueError, match="ClipWorld"):
        world.gallery_posterior(small, small, "i2t", groups=torch.arange(4))
    with pytest.raises(ValueError, match="queries must be at most 3"):
        clip.sample_search(4, 3, "t2i")
    with pytest.raises(ValueError, match="share"):
        clip.sample_search(3, 3, "t2i", share=1.5)
    with pytest.raises(ValueError, match="groups must be at least 2"):
        ClipWorld(groups=1)
    with pytest.raises(ValueError, match="wrong"):
        ClipWorld(wrong=1.0)


STATISTICS = {
    # name: the least and the largest value, of the world and of every real set
    "image cosine": (0.5, 0.7),
    "text cosine": (0.5, 0.65),
    "image rank": (85, 135),
    "text rank": (85, 135),
    "image decay": (0.7, 1.05),
    "text decay": (0.6, 1.05),
    "image nearest": (0.75, 0.9),
    "text nearest": (0.77, 0.85),
    "image twins": (0.88, 0.97),
    "text twins": (0.88, 0.97),
    "image rogue": (0.55, 0.7),
    "text rogue": (0.35, 0.65),
    "gap": (0.82, 0.95),
    "mean cosine": (0.25, 0.36),
    "matched": (0.27, 0.33),
    "matched deviation": (0.025, 0.055),
    "unmatched": (0.15, 0.2),
    "unmatched deviation": (0.03, 0.055),
    "t2i recall": (0.42, 0.65),
    "i2t recall": (0.44, 0.75),
    "t2i recall 10": (0.83, 0.95),
    "i2t recall 10": (0.83, 0.97),
    "t2i hubs": (1.5, 9),
    "i2t hubs": (1.5, 9),
}


def outside(numbers: dict[str, float]) -> dict[str, float]:
    return {name: numbers[name] for name, (low, high) in STATISTICS.items() if not low <= numbers[name] <= high}


def statistics(image: Tensor, text: Tensor) -> dict[str, float]:
    """The statistics of rows [n, d]; text k belongs to image k."""
    image, text = normalize(image.double()), normalize(text.double())
    numbers = {f"image {name}": value for name, value in of_one_modality(image).items()}
    numbers |= {f"text {name}": value for name, value in of_one_modality(text).items()}
    cosine = text @ image.T
    matched, unmatched = cosine.diagonal(), cosine[~torch.eye(len(cosine), dtype=torch.bool)]
    numbers |= {
        "gap": (image.mean(0) - text.mean(0)).norm(),
        "mean cosine": torch.cosine_similarity(image.mean(0), text.mean(0), dim=0),
        "matched": matched.mean(),
        "matched deviation": matched.std(),
        "unmatched": unmatched.mean(),
        "unmatched deviation": unmatched.std(),
    }
    for direction, table in (("t2i", cosine), ("i2t", cosine.T)):
        rank = (table > table.diagonal()[:, None]).sum(1)
        numbers |= {f"{direction} recall": (rank < 1).double().mean()}
        numbers |= {f"{direction} recall 10": (rank < 10).double().mean()}
        hits = table.topk(10).indices.flatten().bincount(minlength=len(table))
        numbers[f"{direction} hubs"] = stats.skew(hits.numpy())
    return {name: float(number) for name, number in numbers.items()}


def of_one_modality(rows: Tensor) -> dict[str, Tensor]:
    spectrum = torch.linalg.svdvals(rows - rows.mean(0)).square()
    spectrum = spectrum / spectrum.sum()
    order = torch.arange(4, 61)
    cosine = (rows @ rows.T).fill_diagonal_(-1)
    nearest = cosine.amax(1)
    return {
        "cosine": cosine[~torch.eye(len(rows), dtype=torch.bool)].mean(),
        "rank": torch.special.entr(spectrum).sum().exp(),
        "decay": -stats.linregress(order.log(), spectrum[order - 1].log()).slope,
        "nearest": nearest.mean(),
        "twins": nearest.quantile(0.99),
        "rogue": rows.mean(0).abs().max(),
    }


def real_sets() -> Iterator[tuple[Tensor, Tensor]]:
    """Images and texts: photographs with captions, twice, and ImageNet with one image of a class each."""
    for name in ("photos/coco500", "photos/unsplash500"):
        with np.load(DATA / f"{name}.npz", allow_pickle=False) as data:
            image, text, index = (torch.from_numpy(data[key]) for key in ("image_emb", "text_emb", "text_image_index"))
        yield image[index], text
    with np.load(DATA / "imagenet" / "vitb32.npz", allow_pickle=False) as data:
        image, label, prompts = (data[key] for key in ("image_emb", "label", "class_text_emb"))
    classes, first = np.unique(label, return_index=True)
    some = np.random.default_rng(0).permutation(len(classes))[:500]
    yield torch.from_numpy(image[first[some]]), torch.from_numpy(prompts[classes[some]])


def test_statistics_of_the_clip_world(clip):
    image, text, _ = clip.sample(500, generator=seeded(18))
    numbers = statistics(image, text)
    assert set(numbers) == set(STATISTICS)
    assert not outside(numbers)


@pytest.mark.skipif(not DATA.exists(), reason="the shared embeddings are not beside the repository")
def test_statistics_of_real_embeddings_are_in_the_same_ranges():
    for image, text in real_sets():
        assert not outside(statistics(image, text))
