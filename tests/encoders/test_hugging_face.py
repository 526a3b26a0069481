"""Encoders of transformers and sentence-transformers against these libraries, texts alone and two sides of any kind."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.encoders.open_clip import DEFAULT_MODEL, OpenClipEncoder
from geoflow_fast.encoders.registry import SENTENCE_MODEL, TRANSFORMERS_MODEL, open_encoder
from geoflow_fast.jobs.embed_columns import embed_sides, embed_texts, read_texts
from tests.encoders import tiny_clip, tiny_transformers
from tests.encoders.test_encoders import pictures

pytestmark = pytest.mark.usefixtures("_torchvision_operators")

TEXTS = ["a red circle", "something else", "Ünïcode", "blue " * 40]


@pytest.fixture(scope="module")
def models(tmp_path_factory, _torchvision_operators) -> Path:
    """Folders of tiny models: clip, siglip and sentences."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("clip", "siglip"):
        tiny_transformers.save_clip(folder / kind, kind)
    tiny_transformers.save_sentences(folder / "sentences")
    return folder


def unit(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_embeddings_are_those_of_transformers(models, kind):
    import transformers

    encoder = gf.TransformersEncoder.load(str(models / kind), device="cpu")
    model = transformers.AutoModel.from_pretrained(models / kind).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(models / kind, use_fast=False)
    tokens = transformers.AutoTokenizer.from_pretrained(models / kind)
    length = {"padding": "max_length", "max_length": 12} if kind == "siglip" else {"padding": True, "max_length": 12}
    with torch.no_grad():
        image = model.get_image_features(**processor(images=pictures(), return_tensors="pt")).pooler_output
        given = tokens(TEXTS, truncation=True, return_tensors="pt", **length)
        mask = {} if kind == "siglip" else {"attention_mask": given["attention_mask"]}
        text = model.get_text_features(input_ids=given["input_ids"], **mask).pooler_output
    torch.testing.assert_close(encoder.encode_images(pictures()), unit(image), atol=1e-5, rtol=0)
    torch.testing.assert_close(encoder.encode_texts(TEXTS), unit(text), atol=1e-5, rtol=0)
    assert encoder.dim == image.shape[1] == text.shape[1]
    assert encoder.encode_texts([]).shape == encoder.encode_images([]).shape == (0, encoder.dim)
    assert encoder.facts()["weights"] == gf.TransformersEncoder.load(str(models / kind)).facts()["weights"]


def test_embeddings_are_those_of_sentence_transformers(models):
    from sentence_transformers import SentenceTransformer

    encoder = gf.SentenceEncoder.load(str(models / "sentences"), device="cpu")
    whole = SentenceTransformer(str(models / "sentences"), device="cpu")
    expected = whole.encode(TEXTS, convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False)
    torch.testing.assert_close(encoder.encode_texts(TEXTS), expected.float(), atol=1e-5, rtol=0)
    prompted = gf.SentenceEncoder.load(str(models / "sentences"), prompt="photo of ", device="cpu")
    asked = encoder.encode_texts(["photo of a red circle"])
    torch.testing.assert_close(prompted.encode_texts(["a red circle"]), asked, atol=1e-5, rtol=0)
    assert prompted.facts() != encoder.facts()
    with pytest.raises(ValueError, match="embeds texts alone"):
        encoder.encode_images(pictures())


@pytest.mark.parametrize("load", [gf.TransformersEncoder.load, gf.SentenceEncoder.load])
def test_weights_with_code_are_refused(models, tmp_path, load):
    """A folder whose only weights are a pickle is not read."""
    name = "clip" if load == gf.TransformersEncoder.load else "sentences"
    source = models / name
    for path in source.rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            target = tmp_path / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    torch.save({"x": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="could not be loaded"):
        load(str(tmp_path))


def test_a_model_that_is_not_there_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    for load in (gf.TransformersEncoder.load, gf.SentenceEncoder.load):
        with pytest.raises(ValueError, match=r"empty could not be loaded"):
            load(str(tmp_path / "empty"))


@pytest.mark.parametrize("kind", ["clip", "siglip", "sentences"])
def test_bad_input_is_a_clear_error(models, kind):
    load = gf.SentenceEncoder.load if kind == "sentences" else gf.TransformersEncoder.load
    encoder = load(str(models / kind), device="cpu")
    for texts in ("one text", [3], [None], [b"x"], 7, None, {"a"}):
        with pytest.raises((TypeError, ValueError)):
            encoder.encode_texts(texts)
    for images in ([None], ["no such.png"], [torch.zeros(2, 2)], [torch.zeros(3, 32, 32, dtype=torch.int64)], "x"):
        with pytest.raises((TypeError, ValueError, OSError)):
            encoder.encode_images(images)
    assert torch.isfinite(encoder.encode_texts(["", "\ud800", "a" * 10_000])).all()
    for wrong in ({"device": "nowhere"}, {"precision": "float8"}, {"revision": 7}):
        with pytest.raises((TypeError, ValueError, OSError)):
            load(str(models / kind), **wrong)
    with pytest.raises(TypeError):
        type(encoder)(torch.nn.Linear(2, 2), *([None, None] if kind != "sentences" else []))


def test_flags_of_another_kind_are_refused():
    for kind, flag, value in (
        ("colours", "model", "x"),
        ("transformers", "pretrained", "x"),
        ("open_clip", "revision", "x"),
        ("open_clip", "prompt", "x"),
    ):
        with pytest.raises(ValueError, match=f"--{flag} is for --encoder .*, not for {kind}"):
            open_encoder(kind, **{flag: value})


def test_the_default_model_is_small_and_its_size_is_in_the_help(run):
    import open_clip

    model = open_clip.create_model(DEFAULT_MODEL, load_weights=False, device="meta")
    size = sum(x.numel() * 4 for x in model.state_dict().values())
    assert f"{size / 1e6:.0f} MB" == "605 MB"
    _, out, _ = run("embed", "--help")
    words = "".join(out.split())  # lines are broken at hyphens, too
    assert f"{DEFAULT_MODEL}(adownloadof605MB)" in words
    assert f"{TRANSFORMERS_MODEL}(605MB)" in words
    assert f"{SENTENCE_MODEL.removeprefix('sentence-transformers/')}(91MB)" in words


class TestTextsAlone:
    def test_a_table_of_texts_becomes_a_table_of_embeddings(self, models, tmp_path, run, monkeypatch):
        monkeypatch.chdir(tmp_path)
        texts = [f"a {'red' if k % 2 else 'green'} circle {k}" for k in range(10)]
        table = pyarrow.table({"id": [f"q{k}" for k in range(10)], "text": texts})
        pyarrow.parquet.write_table(table, "queries.parquet")
        flags = ["--encoder", "sentence-transformers", "--model", str(models / "sentences"), "--batch-size", "4"]
        code, out, err = run("embed", "--texts", "queries.parquet", "--out", "embedded.parquet", *flags)
        assert code == 0, err
        assert "10 texts, 16 wide" in out
        embedded = gf.Embeddings.open("embedded.parquet")
        assert embedded.ids.tolist() == [f"q{k}" for k in range(10)]
        encoder = gf.SentenceEncoder.load(str(models / "sentences"), device="cpu")
        torch.testing.assert_close(embedded.tensor(), encoder.encode_texts(texts), atol=1e-5, rtol=0)
        assert embedded.encoder.name == "sentence-transformers sentences"
        before = Path("embedded.parquet").stat().st_mtime_ns  # the same command finds it finished
        assert run("embed", "--texts", "queries.parquet", "--out", "embedded.parquet", *flags)[0] == 0
        assert Path("embedded.parquet").stat().st_mtime_ns == before

    def test_two_columns_become_pairs_with_named_sides(self, models, tmp_path, run, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("qa.csv").write_text("id,question,answer\n" + "".join(f'{k},a red {k},"blue, {k}"\n' for k in range(7)))
        columns = ["--text-column", "question", "--other-column", "answer"]
        flags = ["--encoder", "sentence-transformers", "--model", str(models / "sentences"), *columns]
        assert run("embed", "--texts", "qa.csv", "--out", "qa.parquet", *flags)[0] == 0
        pairs = gf.EmbeddingPairs.open("qa.parquet")
        assert pairs.sides == ("question", "answer")
        assert pairs.ids.tolist() == list(range(7))
        assert pairs.encoders[0] == pairs.encoders[1] is not None
        head = gf.PosteriorHead.fit(pairs, gf.HeadConfig(steps=2, hidden=8, points=1, bank=2), progress=False)
        assert head.origin.sides == ("question", "answer")

    def test_lines_and_columns_are_read(self, tmp_path):
        (tmp_path / "lines.txt").write_text("one\ntwo\n")
        assert read_texts(tmp_path / "lines.txt", [None])[0].texts == ["one", "two"]
        (tmp_path / "x.tsv").write_text("caption\tid\nfirst\t7\n")
        read = read_texts(tmp_path / "x.tsv", [None])[0]
        assert (read.texts, read.ids.values.tolist()) == (["first"], [7])
        with pytest.raises(ValueError, match="no column 'nothing'; its columns are caption, id"):
            read_texts(tmp_path / "x.tsv", ["nothing"])
        with pytest.raises(FileNotFoundError, match="is missing"):
            read_texts(tmp_path / "none.parquet", [None])

    def test_an_empty_text_and_an_embedding_without_direction_are_named(self, tmp_path):
        colours = gf.ColourEncoder()
        with pytest.raises(ValueError, match="row 1 is empty"):
            embed_texts(["red", " "], colours, tmp_path / "x.parquet")
        items = {"a": ([1, 2], lambda rows: np.eye(2) * (np.array(rows)[:, None] < 2)), "b": (["x", "y"], colours)}
        with pytest.raises(ValueError, match=r"no direction for row 1 "):
            embed_sides(items, tmp_path / "x.parquet")
        with pytest.raises(ValueError, match="the sides have 1 and 2 items"):
            embed_sides({"a": (["x"], colours), "b": (["x", "y"], colours)}, tmp_path / "x.parquet")
        with pytest.raises(ValueError, match="there is nothing to embed"):
            embed_texts([], colours, tmp_path / "x.parquet")
        assert not (tmp_path / "x.parquet").exists()


def test_sound_and_text_are_two_sides(tmp_path):
    """Any two functions will do: the loudness of sounds in four bands, and colours of words."""
    rng = np.random.default_rng(0)
    sounds = [rng.standard_normal(64) for _ in range(9)]

    def hear(clips: list[np.ndarray]) -> np.ndarray:
        return np.stack([np.abs(np.fft.rfft(clip))[1:33].reshape(8, 4).sum(1) for clip in clips])

    texts = [f"red {k}" for k in range(9)]
    assert embed_sides({"audio": (sounds, hear), "text": (texts, gf.ColourEncoder())}, tmp_path / "p.parquet") == 9
    pairs = gf.EmbeddingPairs.open(tmp_path / "p.parquet")
    assert repr(pairs) == "EmbeddingPairs(9 pairs, audio width 8, text width 64)"
    torch.testing.assert_close(pairs[[3]][0], unit(torch.from_numpy(hear([sounds[3]]))).float(), atol=1e-6, rtol=0)


def test_loading_changes_no_setting_of_the_process(tmp_path, capfd):
    """Levels, handlers and the threads of others are as before, while a model loads and after it."""
    tiny_clip.save_model(tmp_path)
    root = logging.getLogger()
    before = (root.level, list(root.handlers), root.manager.disable, list(root.filters))
    seen: list[bool] = []

    def other_thread() -> None:
        while not done.is_set():
            seen.append(root.manager.disable == before[2] and root.level == before[0] and root.filter(record))

    record = logging.LogRecord("x", logging.WARNING, __file__, 1, "mine", (), None)
    done = threading.Event()
    thread = threading.Thread(target=other_thread)
    thread.start()
    OpenClipEncoder.load(f"local-dir:{tmp_path}", device="cpu").encode_texts(["red"])
    done.set()
    thread.join()
    assert seen
    assert all(seen)
    assert (root.level, list(root.handlers), root.manager.disable, list(root.filters)) == before
    assert "Loading" not in "".join(capfd.readouterr())
