"""Nothing that was computed from a flow or a gallery is used after they have changed."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast import geometry
from geoflow_fast.ops import extension
from geoflow_fast.retrieval.freshness import ModelDigest, marks
from geoflow_fast.retrieval.hubs import Hubs
from geoflow_fast.retrieval.sources import HeadSource

SETTINGS = {"n_samples": 6, "n_steps": 3, "kappa": 20.0}
needs_int8 = pytest.mark.skipif(extension.missing_int8() is not None, reason=str(extension.missing_int8()))


def unit(rows: int, width: int, seed: int) -> torch.Tensor:
    return geometry.normalize(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)))


@pytest.fixture
def head() -> gf.PosteriorHead:
    """Images are 10 wide and texts 7; scores are corrected by the whole of the bank's."""
    torch.manual_seed(1)
    head = gf.PosteriorHead(gf.HeadConfig(hidden=8, bank=9, points=2), 10, 7).eval()
    head.bank_text.copy_(unit(9, 7, 2))
    head.hub_weight.fill_(1.0)
    with torch.no_grad():
        for tower in head.towers.values():
            tower.offsets.weight.normal_()
    return head


def loaded(head: gf.PosteriorHead) -> None:
    head.load_state_dict({name: -x for name, x in head.state_dict().items()})


def assigned(head: gf.PosteriorHead) -> None:
    head.load_state_dict({name: -x for name, x in head.state_dict().items()}, assign=True)


def stepped(head: gf.PosteriorHead) -> None:
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(-1)


def written_through_data(head: gf.PosteriorHead) -> None:
    for parameter in head.parameters():
        parameter.data.mul_(-1)


@pytest.mark.parametrize("change", [loaded, assigned, stepped, written_through_data])
def test_marginals_follow_the_weights_of_the_head(head, change):
    gallery = unit(50, 10, 0)
    scorer = gf.RetrievalEntropy(head, gallery)
    before = scorer.item_marginals()
    change(head)
    after = scorer.item_marginals()
    assert torch.equal(after, gf.RetrievalEntropy(copy.deepcopy(head), gallery).item_marginals())
    assert float((after - before).abs().max()) > 1e-3


def test_marginals_follow_gallery_and_reference(head):
    gallery, reference = unit(50, 10, 0), unit(9, 7, 3)
    scorer = gf.RetrievalEntropy(head, gallery, reference=reference)
    first = scorer.item_marginals()
    gallery.copy_(unit(50, 10, 3))
    second = scorer.item_marginals()
    assert torch.equal(second, gf.RetrievalEntropy(head, gallery.clone(), reference=reference).item_marginals())
    scorer.reference.copy_(unit(9, 7, 4))
    third = scorer.item_marginals()
    assert torch.equal(third, gf.RetrievalEntropy(head, gallery, reference=unit(9, 7, 4)).item_marginals())
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_marginals_are_computed_once(head, monkeypatch):
    scorer = gf.RetrievalEntropy(head, unit(50, 10, 0))
    first = scorer.item_marginals()
    monkeypatch.setattr(HeadSource, "item_marginals", lambda *_: pytest.fail("computed again"))
    assert scorer.item_marginals() is first


def test_hubs_are_those_of_the_gallery_that_is_asked_about(tmp_path):
    """Galleries on disk have equal marks."""
    galleries = [unit(50, 10, seed) for seed in (0, 1)]
    for number, rows in enumerate(galleries):
        np.save(tmp_path / f"{number}.npy", rows.numpy())
    hubs = Hubs(unit(9, 10, 2), None)
    kept = [gf.Gallery(tmp_path / f"{number}.npy") for number in (0, 1)]
    for gallery, rows in zip(kept, galleries):
        expected = Hubs(hubs.bank, None).cosine_numbers(gf.Gallery(rows), 5.0)
        torch.testing.assert_close(hubs.cosine_numbers(gallery, 5.0), expected)


def test_a_pickled_scorer_gives_the_same_marginals(head):
    scorer = gf.RetrievalEntropy(head, unit(50, 10, 0))
    expected = scorer.item_marginals()
    assert torch.equal(pickle.loads(pickle.dumps(scorer)).item_marginals(), expected)


def test_a_calibration_is_refused_after_the_flow_has_changed():
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig(8, 8, hidden=16, depth=1, layer_scale=0.5))
    image = unit(80, 8, 0)
    pairs = gf.EmbeddingPairs.from_arrays(image, geometry.normalize(image + 0.1 * unit(80, 8, 1)))
    reranker = gf.BayesReranker(flow, unit(100, 8, 2), shortlist=12, n_steps=2)
    reranker.calibrate(pairs)
    queries = unit(3, 8, 3)
    expected = reranker(queries).prob
    kept = copy.deepcopy(flow.state_dict())
    with torch.no_grad():
        flow.decoders[0][1].weight.add_(0.1)
    with pytest.raises(ValueError, match="the calibration was made for another flow, which has changed since"):
        reranker(queries)
    flow.load_state_dict(kept)
    assert torch.equal(reranker(queries).prob, expected)
    flow.load_state_dict({name: x + 0.1 for name, x in kept.items()})
    reranker.calibrate(pairs)
    assert reranker(queries).calibrated
    flow.load_state_dict(kept)
    reranker.calibration = None
    with pytest.warns(UserWarning, match="uncalibrated"):
        reranker(queries)


@pytest.mark.parametrize("through_data", [False, True])
def test_a_tensor_overwritten_with_rows_off_the_sphere_is_noticed(flow, through_data):
    gallery = unit(1000, 10, 0)
    scorer = gf.RetrievalEntropy(flow, gallery, **SETTINGS)
    scorer(unit(2, 7, 1))
    if through_data:
        gallery.data.mul_(2)  # torch does not count this as a write
    else:
        gallery[777] *= 2
    with pytest.raises(ValueError, match=r"gallery row \d+ has norm 2, not 1"):
        scorer(unit(2, 7, 1))
    with pytest.raises(ValueError, match=r"gallery row \d+ has norm 2, not 1"):
        scorer.gallery.take(torch.tensor([0]))


def test_an_array_overwritten_with_rows_off_the_sphere_is_noticed(flow):
    gallery = unit(1000, 10, 0).numpy()
    scorer = gf.RetrievalEntropy(flow, gallery, **SETTINGS)
    scorer(unit(2, 7, 1))
    gallery *= np.float32(2)
    with pytest.raises(ValueError, match="gallery row 0 has norm 2, not 1"):
        scorer(unit(2, 7, 1))


@pytest.mark.parametrize("kind", [torch.clone, lambda x: x.clone().numpy()])
def test_the_digest_of_a_gallery_is_that_of_its_rows_now(kind):
    rows = kind(unit(40, 10, 0))
    gallery = gf.Gallery(rows)
    before = gallery.digest()
    rows[:] = kind(unit(40, 10, 1))
    assert gallery.digest() == gf.Gallery(kind(unit(40, 10, 1))).digest() != before


@needs_int8
def test_codes_of_a_gallery_are_made_again_after_a_change():
    rows, queries = unit(5000, 16, 0), unit(3, 16, 1)
    gallery = gf.Gallery(rows, codes=True)
    gallery.search(queries, 4)
    rows[777] = queries[1]
    assert gallery.search(queries, 4)[1][1, 0] == 777


def test_a_digest_is_computed_only_after_a_change(flow, monkeypatch):
    digest = ModelDigest()
    first = digest.of(flow)
    monkeypatch.setattr("geoflow_fast.retrieval.freshness.flow_digest", lambda _: "computed again")
    assert digest.of(flow) == first
    flow.blocks[0].to(torch.float64)
    assert digest.of(flow) == "computed again"


def test_marks_of_empty_and_inference_tensors():
    with torch.inference_mode():
        x = torch.ones(3)
    before = marks([x, torch.empty(0, 2), torch.empty(2, device="meta")])
    with torch.inference_mode():
        x.mul_(2)
    assert marks([x]) != before
