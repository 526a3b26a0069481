"""Ids of all kinds survive a whole pipeline: files of embeddings, pairs and their parts, calls, results, decisions."""

from __future__ import annotations

import string
import tempfile
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import geoflow_fast as gf
from geoflow_fast.data.ids import Ids
from geoflow_fast.jobs.decisions import labels_from_pairs, labels_from_qrels, open_lists, write_probabilities
from geoflow_fast.jobs.queries import Naming
from geoflow_fast.jobs.rerank import rerank_file
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime.parquet import read_columns, write_columns

COUNT, DIM = 24, 6
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=0, max_size=12)
KINDS = {
    "text": st.one_of(TEXT, st.text(string.ascii_letters, min_size=1, max_size=4)),
    "signed": st.integers(-(2**63), 2**63 - 1),
    "unsigned": st.integers(0, 2**64 - 1),
    "uuid": st.uuids(),
}
IDS = st.sampled_from(sorted(KINDS)).flatmap(
    lambda kind: st.lists(KINDS[kind], min_size=2 * COUNT, max_size=2 * COUNT, unique=True)
)


def table(path: Path, rows: np.ndarray, ids: list[Any]) -> Path:
    """A Parquet file with a column of ids and one of embeddings."""
    write_columns(path, {"id": Ids.given(ids, len(ids), "ids").column(np.arange(len(ids))), "vector": rows}, len(ids))
    return path


def one_trust() -> gf.Trust:
    """Some trust in lists of three hits."""
    scores = np.sort(np.random.default_rng(0).random((200, 3)))[:, ::-1].copy()
    return gf.Trust(seed=0).fit(scores, (np.arange(200) % 3 > 0).astype(int))


TRUST: list[gf.Trust] = []


# Failures are not made smaller: an example is as easy to read with 48 ids as with others, and it would take minutes.
@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(IDS)
@pytest.mark.filterwarnings("ignore:BayesReranker is uncalibrated")
def test_ids_of_all_kinds_survive_a_whole_pipeline(ids):
    texts, images = ids[:COUNT], ids[COUNT:]
    generator = torch.Generator().manual_seed(0)
    image = sample_uniform(COUNT, DIM, generator=generator).numpy()
    text = gf.geometry.normalize(torch.from_numpy(image) + 0.3 * torch.randn(COUNT, DIM, generator=generator)).numpy()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Pairs, their parts, and the files of both.
        pairs = gf.EmbeddingPairs.from_arrays(image, text, ids=texts, image_ids=images)
        pairs.save(folder / "pairs", dtype=np.float32)
        for part, half in zip("ab", gf.EmbeddingPairs.open(folder / "pairs").split(0.5, seed=0)):
            half.save(folder / "parts" / part, dtype=np.float32)
        parts = [gf.EmbeddingPairs.open(folder / "parts" / part) for part in "ab"]
        known = dict(zip(texts, zip(images, text)))
        for part in parts:
            for k, (own, of_image) in enumerate(zip(part.ids.tolist(), part.image_ids.tolist())):
                assert of_image == known[own][0]
                np.testing.assert_allclose(part[[k]][1][0], known[own][1], atol=1e-5)
        assert sorted(map(str, [*parts[0].ids, *parts[1].ids])) == sorted(map(str, texts))
        # A search from tables into a file, and the same in memory.
        queries = table(folder / "queries.parquet", text, texts)
        gallery = table(folder / "gallery.parquet", image, images)
        reranker = gf.BayesReranker(None, gf.Gallery(gallery), shortlist=3)
        rerank_file(reranker, queries, folder / "ranked.parquet", block=7, progress=False, naming=Naming())
        stored = read_columns(folder / "ranked.parquet")
        asked = gf.Embeddings.open(queries)
        answers = reranker(asked)
        expected = [[images[k] for k in row] for row in answers.index.tolist()]
        assert stored["query"].tolist() == texts
        assert [row.tolist() for row in stored["index"]] == expected
        assert stored["answer"].tolist() == [images[k] for k in answers.answer.tolist()]
        # Frames of pandas and polars.
        frame, other = answers.to_pandas(), answers.to_polars()
        assert frame["query"].tolist() == texts
        assert [list(row) for row in frame["index"]] == expected
        as_text = isinstance(texts[0], uuid.UUID)
        assert other["query"].to_list() == ([str(x) for x in texts] if as_text else texts)
        assert other["index"].to_list() == ([[str(x) for x in row] for row in expected] if as_text else expected)
        # Decisions about the file, by pairs and by judgements.
        lists = open_lists(folder / "ranked.parquet")
        right, _ = labels_from_pairs(lists, gf.EmbeddingPairs.open(folder / "pairs"), "t2i")
        truth = [[k == index for index in row] for k, row in enumerate(answers.index.tolist())]
        assert right.tolist() == truth
        judged = {"query": Ids.given(texts, COUNT, "ids"), "item": Ids.given(images, COUNT, "ids")}
        write_columns(folder / "qrels.parquet", {k: v.column(np.arange(COUNT)) for k, v in judged.items()}, COUNT)
        assert (labels_from_qrels(lists, folder / "qrels.parquet") > 0).tolist() == truth
        TRUST[:] = TRUST or [one_trust()]
        write_probabilities(TRUST[0], lists, folder / "believed.parquet", 0.1)
        believed = read_columns(folder / "believed.parquet")
        assert believed["query"].tolist() == texts
        assert believed["hit"].tolist() == [row[0] for row in expected]


def test_a_missing_hit_has_no_id(tmp_path):
    """Shortlists that are not full name nothing where there is no item, not the row -1."""
    ids = Ids.given([7, -1, 9], 3, "ids")
    rows = np.array([[0, 1], [2, -1]])
    assert ids.of(rows).tolist() == [[7, -1], [9, None]]
    write_columns(tmp_path / "x.parquet", {"index": ids.column(rows)}, 2)
    assert pyarrow.parquet.read_table(tmp_path / "x.parquet")["index"].to_pylist() == [[7, -1], [9, None]]


def test_densities_and_entropies_name_their_rows(flow):
    image, text = (sample_uniform(5, d) for d in (10, 7))
    names = [uuid.UUID(int=k) for k in range(5)]
    images, texts = gf.Embeddings.from_arrays(image, list("vwxyz")), gf.Embeddings.from_arrays(text, names)
    draw = torch.Generator().manual_seed
    scored = gf.epistemic(flow, images, texts, n_steps=2, generator=draw(0))
    assert scored.to_pandas()["pair"].tolist() == names
    assert gf.epistemic(flow, image=images, n_steps=2).to_polars()["pair"].to_list() == list("vwxyz")
    torch.testing.assert_close(
        scored.joint, gf.epistemic(flow, image, text, n_steps=2, generator=draw(0)).joint, atol=1e-3, rtol=0
    )
    post = gf.RetrievalEntropy(flow, images, n_samples=4, n_steps=2, top_k=2)(texts)
    frame = post.to_pandas()
    assert frame["query"].tolist() == names
    assert set(frame["map_index"]) <= set("vwxyz")
    assert frame["top_index"].str[0].tolist() == frame["map_index"].tolist()
    assert post.to_pandas(ids=range(5, 10))["query"].tolist() == [5, 6, 7, 8, 9]


def test_a_model_of_another_encoder_is_refused_with_both_names(tmp_path):
    from geoflow_fast.data.fingerprint import Fingerprint

    ours, other = Fingerprint.of({"encoder": "a", "model": "one"}), Fingerprint.of({"encoder": "b", "model": "two"})
    rows = sample_uniform(60, 6)
    pairs = gf.EmbeddingPairs.from_arrays(rows, rows)
    pairs.image.encoder = pairs.text.encoder = ours
    head = gf.PosteriorHead.fit(pairs, gf.HeadConfig(steps=2, hidden=8, points=1, bank=8), progress=False)
    head.save_pretrained(tmp_path)
    head = gf.PosteriorHead.from_pretrained(tmp_path)
    assert head.origin.encoders == (ours, ours)
    assert head.origin.pairs["pairs"] == 54
    items = gf.Embeddings.from_arrays(rows)
    gf.RetrievalEntropy(head, items)(items)  # nothing is known of these
    items.rows.encoder = other
    message = r"the gallery has embeddings of b two \(\w+\), but the head was made for those of a one \(\w+\)"
    with pytest.raises(ValueError, match=message):
        gf.RetrievalEntropy(head, items)
    with pytest.raises(ValueError, match=message):
        gf.BayesReranker(None, items, head=head)
    scorer = gf.RetrievalEntropy(head, rows)
    with pytest.raises(ValueError, match="the set of queries has embeddings of b two"):
        scorer(items)
    flow = gf.GeoFlow(gf.GeoFlowConfig(6, 6, hidden=16, depth=1))
    gf.train(flow, pairs, gf.TrainConfig(steps=1, batch_size=8, val_batches=1), out=tmp_path / "flow")
    flow = gf.GeoFlow.from_pretrained(tmp_path / "flow")
    assert flow.origin.encoders == (ours, ours)
    strange = gf.EmbeddingPairs.from_arrays(rows, rows)
    strange.image.encoder = strange.text.encoder = other
    with pytest.raises(ValueError, match="pairs has embeddings of b two"):
        gf.train(flow, strange, gf.TrainConfig(steps=1, batch_size=8))
    with pytest.raises(ValueError, match="but the flow was made for those of a one"):
        gf.epistemic(flow, image=items, n_steps=1)


def test_a_calibration_of_another_encoder_is_refused(tmp_path):
    """Without a flow and a head nothing but the encoder tells one re-ranker from another."""
    from geoflow_fast.data.fingerprint import Fingerprint

    ours, other = Fingerprint.of({"encoder": "a", "model": "one"}), Fingerprint.of({"encoder": "b", "model": "two"})
    rows = sample_uniform(120, 6)

    def embedded(count: int, encoder: Fingerprint | None) -> gf.Embeddings:
        items = gf.Embeddings.from_arrays(rows[:count])
        items.rows.encoder = encoder
        return items

    pairs = gf.EmbeddingPairs.from_arrays(rows, rows)
    pairs.image.encoder = pairs.text.encoder = ours
    reranker = gf.BayesReranker(None, embedded(80, ours), shortlist=10)
    reranker.calibrate(pairs, progress=False)
    file = reranker.save_calibration(tmp_path)
    for known in (ours, None):
        again = gf.BayesReranker(None, embedded(90, known), shortlist=10)
        again.load_calibration(file)
        assert again(embedded(3, known)).calibrated
    with pytest.raises(ValueError, match=r"the set of queries has embeddings of b two .* the calibration was made for"):
        again(embedded(3, other))
    message = r"the gallery has embeddings of b two \(\w+\), but the calibration was made for those of a one"
    strange = gf.BayesReranker(None, embedded(90, other), shortlist=10)
    with pytest.raises(ValueError, match=message):
        strange.load_calibration(file)
    assert strange.calibration is None
    with pytest.raises(ValueError, match=message):
        again.with_gallery(embedded(90, other))(rows[:3])
    strange.calibration = again.calibration
    with pytest.raises(ValueError, match=message):
        strange(rows[:3])
    with pytest.raises(ValueError, match="the gallery has embeddings of b two"):
        strange.calibrate(pairs, progress=False)
    pairs.text.encoder = other  # a tower of its own for each side
    apart = gf.BayesReranker(None, embedded(80, ours), shortlist=10)
    apart.calibrate(pairs, progress=False)
    assert apart(embedded(3, other)).calibrated
    with pytest.raises(ValueError, match="the set of queries has embeddings of a one"):
        apart(embedded(3, ours))
