"""`geoflow embed` writes what the encoder returns, survives kills, and reports bad input."""

from __future__ import annotations

import csv
import filecmp
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import geoflow_fast as gf
from geoflow_fast.cli.app import main
from geoflow_fast.encoders.colours import ColourEncoder
from geoflow_fast.encoders.open_clip import DEFAULT_MODEL, OpenClipEncoder
from geoflow_fast.jobs import embed
from geoflow_fast.jobs.embed import embed_images
from geoflow_fast.runtime.parquet import read_columns
from tests.encoders import tiny_clip
from tests.encoders.test_sources import picture, put, put_tar, write_table
from tests.jobs.processes import run_geoflow, start_child

COLOURS = ("red", "green", "blue", "yellow", "white", "black", "orange")
# The bad images are the first, the last, two in one batch, and one at the beginning of a shard.
BAD = {0: b"", 37: b"no picture", 38: b"\xff\xd8\xff\xe0 cut", 96: b"GIF89a", 199: None}


def jpeg(number: int) -> Image.Image:
    rng = np.random.default_rng(number)
    return Image.fromarray(rng.integers(0, 256, (24 + number % 9, 40, 3), dtype=np.uint8).repeat(2, 0))


@pytest.fixture(scope="module")
def world(tmp_path_factory, _torchvision_operators) -> Path:
    """A tiny model in model/, and 200 JPEGs with captions in photos/, of which five are not pictures."""
    folder = tmp_path_factory.mktemp("world")
    tiny_clip.save_model(folder / "model")
    (folder / "photos").mkdir()
    for number in range(200):
        path = folder / "photos" / f"{number:03d}.jpg"
        jpeg(number).save(path, quality=90)
        data = BAD.get(number, b"fine")
        if data is None:
            path.write_bytes(path.read_bytes()[:-300])
        elif number in BAD:
            path.write_bytes(data)
        path.with_suffix(".txt").write_text(f"picture {number}\n", encoding="utf-8")
    return folder


@pytest.fixture
def colours(tmp_path) -> Path:
    """A small folder of plain pictures, for the encoder without weights."""
    for number, colour in enumerate(COLOURS):
        put(tmp_path / f"photos/{number}.png", picture(colour))
        put(tmp_path / f"photos/{number}.txt", f"something {colour}")
    return tmp_path


def geoflow_embed(monkeypatch, *words: object) -> int:
    return run_geoflow(monkeypatch, "embed", *words)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.0005)


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def assert_same_bytes(a: Path, b: Path) -> None:
    assert files_of(a) == files_of(b)
    assert filecmp.cmpfiles(a, b, files_of(a), shallow=False) == (files_of(a), [], [])


@pytest.mark.own_default(
    "dtype", reason="threads of torchvision read the process's default while the library has its turn"
)
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_two_hundred_images_five_of_them_bad_and_a_kill(world, tmp_path, monkeypatch):
    """A run that was killed ends with the bytes of an undisturbed one, and encodes no finished shard again."""
    words = ["geoflow", "embed", "--images", world / "photos", "--model", f"local-dir:{world / 'model'}"]
    words += ["--shard-rows", 16, "--batch-size", 6, "--workers", 3, "--device", "cpu"]

    def command(out: Path) -> None:
        sys.argv = [*map(str, words), "--out", str(out)]
        main()

    whole, out, shards = tmp_path / "whole", tmp_path / "out", tmp_path / "out.shards"
    child = start_child(lambda: command(whole))
    child.join()
    assert child.exitcode == 0

    child = start_child(lambda: command(out))
    wait_for(lambda: (shards / "shard_4.done").is_file())
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not out.exists()
    kept = {path.name: path.stat().st_mtime_ns for path in (shards / "img_emb").glob("*.npy")}
    assert (shards / "shard_4.done").is_file()
    assert not (shards / "shard_12.done").is_file()
    finished = len(list(shards.glob("*.done")))

    child = start_child(lambda: command(out))
    child.join()
    assert child.exitcode == 0
    assert not shards.exists()
    assert_same_bytes(whole, out)
    for number in range(finished):
        name = f"img_emb_{number}.npy"
        assert (out / "img_emb" / name).stat().st_mtime_ns == kept[name]

    pairs = gf.EmbeddingPairs.open(out)
    assert len(pairs) == 195
    good = [number for number in range(200) if number not in BAD]
    encoder = OpenClipEncoder.load(f"local-dir:{world / 'model'}", device="cpu")
    image, text = pairs[np.arange(195)]
    files = [world / "photos" / f"{number:03d}.jpg" for number in good]
    torch.testing.assert_close(image, encoder.encode_images(files), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(text, encoder.encode_texts([f"picture {n}" for n in good]), rtol=1e-4, atol=1e-5)
    skipped = list(csv.DictReader((out / "skipped.csv").open()))
    assert [row["item"] for row in skipped] == [f"{number:03d}.jpg" for number in BAD]
    assert {row["part"] for row in skipped} == {"image"}

    assert geoflow_embed(monkeypatch, *words[2:], "--out", out, "--json") == 0  # finished already
    assert_same_bytes(whole, out)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_ctrl_c_says_how_to_continue(world, tmp_path, capfd):
    def slow(encoder: OpenClipEncoder, images: object) -> object:
        time.sleep(0.2)  # the signal comes before the last shard on any machine
        return plain(encoder, images)

    def command() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell has it ignored
        OpenClipEncoder.encode_images = slow
        sys.argv = ["geoflow", "embed", f"--images={world / 'photos'}", f"--model=local-dir:{world / 'model'}"]
        sys.argv += [f"--out={tmp_path / 'out'}", "--shard-rows=4", "--batch-size=1", "--device=cpu"]
        main()

    plain = OpenClipEncoder.encode_images
    child = start_child(command)
    wait_for(lambda: any((tmp_path / "out.shards").glob("*.done")))
    os.kill(child.pid, signal.SIGINT)
    child.join()
    assert child.exitcode == 130
    assert "run the same command to continue" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def captioned_sources(folder: Path) -> dict[str, Path]:
    """Writes images in one of the forms: image 0 has two captions, 1 and 4 have one, 2 has none, 3 is not a picture."""
    captions: dict[int, list[str]] = {0: ["zero", "null"], 1: ["one"], 2: [], 3: ["three"], 4: ["four"]}
    data = {number: picture(colour) for number, colour in enumerate(COLOURS[:5])} | {3: b"junk"}
    rows: list[tuple[str, str | None]] = []
    for number in captions:
        put(folder / f"dir/{number}.png", data[number])
        rows += [(f"dir/{number}.png", text) for text in captions[number] or [None]]
        if captions[number]:
            put(folder / f"dir/{number}.txt", "\n".join(captions[number]))
    members = []
    for number, texts in captions.items():
        members += [(f"{number}.png", data[number])]
        members += [(f"{number}.json", json.dumps({"captions": texts}).encode())] if texts else []
    (folder / "shards").mkdir()
    put_tar(folder / "shards/00000.tar", members[:4])
    put_tar(folder / "shards/00001.tar", members[4:])
    tables = {form: write_table(folder / f"table.{form}", rows) for form in ("csv", "tsv", "parquet")}
    return {"folder": folder / "dir", "tars": folder / "shards", **tables}


@pytest.mark.parametrize("form", ["folder", "csv", "tsv", "parquet", "tars"])
def test_several_captions_of_an_image(tmp_path, form):
    source = captioned_sources(tmp_path)[form]
    summary = embed_images(source, ColourEncoder(), tmp_path / "out", shard_rows=2, batch_size=2, progress=False)
    assert summary == embed.EmbedSummary(images=4, texts=4, skipped_images=1, skipped_captions=1, dim=64, shards=3)
    pairs = gf.EmbeddingPairs.open(tmp_path / "out")
    assert pairs.image_row.tolist() == pairs.group.tolist() == [0, 0, 1, 3]
    encoder = ColourEncoder()
    expected = encoder.encode_images([tmp_path / f"dir/{number}.png" for number in (0, 0, 1, 4)])
    image, text = pairs[np.arange(4)]
    torch.testing.assert_close(image, expected)
    torch.testing.assert_close(text, encoder.encode_texts(["zero", "null", "one", "four"]))
    metadata = [read_columns(tmp_path / f"out/metadata/metadata_{number}.parquet") for number in range(3)]
    assert [caption for part in metadata for caption in part["caption"]] == ["zero", "null", "one", "four"]
    paths = [read_columns(tmp_path / f"out/img_metadata/img_metadata_{number}.parquet") for number in range(3)]
    names = [Path(name).name for part in paths for name in part["image_path"]]
    assert names == ["0.png", "1.png", "2.png", "4.png"]


def test_images_without_captions(colours):
    for path in (colours / "photos").glob("*.txt"):
        path.unlink()
    embed_images(colours / "photos", ColourEncoder(), colours / "out", shard_rows=3, progress=False)
    assert [name for name in files_of(colours / "out") if "text" in name or "index" in name] == []
    assert len(gf.Gallery(colours / "out/img_emb")) == len(COLOURS)
    paths = read_columns(colours / "out/metadata/metadata_2.parquet")["image_path"]
    assert paths.tolist() == ["6.png"]


def test_images_with_one_caption_each_need_no_index(colours):
    embed_images(colours / "photos", ColourEncoder(), colours / "out", dtype="float16", progress=False)
    assert not (colours / "out/image_index.npy").exists()
    assert np.load(colours / "out/img_emb/img_emb_0.npy").dtype == np.float16
    image, text = gf.EmbeddingPairs.open(colours / "out")[np.arange(len(COLOURS))]
    assert (text @ image.T).argmax(1).tolist() == list(range(len(COLOURS)))


def test_a_shard_without_a_good_image(colours):
    for number in (2, 3):
        put(colours / f"photos/{number}.png", b"junk")
    embed_images(colours / "photos", ColourEncoder(), colours / "out", shard_rows=2, progress=False)
    assert np.load(colours / "out/img_emb/img_emb_1.npy").shape == (0, 64)
    pairs = gf.EmbeddingPairs.open(colours / "out")
    assert len(pairs) == 5
    assert pairs[np.arange(5)][0].shape == (5, 64)
    assert len(gf.Gallery(colours / "out/img_emb")) == 5


def test_a_folder_without_a_good_image(colours):
    for number in range(len(COLOURS)):
        put(colours / f"photos/{number}.png", b"junk")
    with pytest.raises(ValueError, match=r"none of 7 images could be embedded; 0.png: is not an image"):
        embed_images(colours / "photos", ColourEncoder(), colours / "out", progress=False)
    assert sorted(path.name for path in colours.iterdir()) == ["photos"]


class Moody(ColourEncoder):
    """An encoder of our own, which gives no direction for red pictures and for texts about blue."""

    def facts(self) -> dict[str, object]:
        return {"encoder": "moody"}

    def encode_images(self, images):
        rows = super().encode_images(images)
        rows[(rows @ super().encode_texts(["red"])[0]) > 0.6] = float("nan")
        return rows

    def encode_texts(self, texts):
        rows = super().encode_texts(texts)
        rows[["blue" in text for text in texts]] = float("nan")
        return rows


def test_rows_that_are_not_numbers_are_skipped(colours):
    summary = embed_images(colours / "photos", Moody(), colours / "out", batch_size=3, progress=False)
    assert (summary.images, summary.texts) == (6, 5)
    assert (summary.skipped_images, summary.skipped_captions) == (1, 1)
    assert gf.EmbeddingPairs.open(colours / "out").image_row.tolist() == [0, 2, 3, 4, 5]
    assert "0.png,image,the encoder gave no direction" in (colours / "out/skipped.csv").read_text()


def test_threads_do_not_change_the_result(colours):
    for workers in (1, 5):
        out = colours / f"out{workers}"
        embed_images(colours / "photos", ColourEncoder(), out, workers=workers, batch_size=2, progress=False)
    assert_same_bytes(colours / "out1", colours / "out5")


def test_another_job_is_refused_unless_asked_for(colours, monkeypatch, capsys):
    words = ["--images", colours / "photos", "--out", colours / "out", "--encoder", "colours"]
    assert geoflow_embed(monkeypatch, *words) == 0
    before = {path: path.read_bytes() for path in (colours / "out").rglob("*") if path.is_file()}
    assert geoflow_embed(monkeypatch, *words, "--dtype", "float16") == 2
    assert "is not the result of this job" in capsys.readouterr().err
    put(colours / "photos/8.png", picture("pink"))
    assert geoflow_embed(monkeypatch, *words) == 2
    assert before == {path: path.read_bytes() for path in (colours / "out").rglob("*") if path.is_file()}
    assert geoflow_embed(monkeypatch, *words, "--overwrite") == 0
    assert len(gf.Gallery(colours / "out/img_emb")) == 8
    assert sorted(path.name for path in colours.iterdir()) == ["out", "photos"]


def test_folders_of_others_are_never_replaced(colours, monkeypatch, capsys):
    words = ["--images", colours / "photos", "--encoder", "colours", "--overwrite"]
    assert geoflow_embed(monkeypatch, *words, "--out", colours / "photos") == 2
    assert "holds something that geoflow embed did not make" in capsys.readouterr().err
    put(colours / "out.shards/mine.txt", "dear")
    assert geoflow_embed(monkeypatch, *words, "--out", colours / "out") == 2
    assert (colours / "out.shards/mine.txt").read_text() == "dear"
    assert geoflow_embed(monkeypatch, *words, "--out", colours / "photos/0.png") == 2
    assert "is a file" in capsys.readouterr().err


MINE: dict[str, dict[str, str]] = {
    "the name of the former result": {".out.old/mine.txt": "precious"},
    "a former result with a file of mine": {
        ".out.old/embed.json": '{"facts": {"task": "embed"}}',
        ".out.old/mine.txt": "precious",
    },
    "shards": {"out.shards/mine.txt": "precious"},
    "shards with facts of another program": {"out.shards/job.json": '{"a": 1}', "out.shards/mine.txt": "precious"},
    "shards with facts that cannot be read": {"out.shards/job.json": "{", "out.shards/mine.txt": "precious"},
    "shards with facts of another job alone": {"out.shards/job.json": '{"task": "density"}'},
    "shards with a file of mine": {
        "out.shards/job.json": '{"task": "embed"}',
        "out.shards/img_emb/mine.npy": "precious",
    },
    "a result of another program": {"out/embed.json": '{"mine": "precious"}'},
    "a result with a file of mine": {
        "out/embed.json": '{"facts": {"task": "embed"}}',
        "out/text_ids.parquet": "precious",
    },
}
"""Files of somebody that stand where a job would write or remove something."""


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("case", MINE)
def test_nothing_is_removed_that_no_job_made(colours, case, overwrite):
    for name, content in MINE[case].items():
        (colours / name).parent.mkdir(parents=True, exist_ok=True)
        (colours / name).write_text(content)
    with pytest.raises(FileExistsError, match=r"did not make|not the result of this job"):
        embed_images(colours / "photos", ColourEncoder(), colours / "out", overwrite=overwrite, progress=False)
    assert {name: (colours / name).read_text() for name in MINE[case]} == MINE[case]


@pytest.mark.parametrize("name", [".out.old", "out.shards"])
def test_a_link_to_a_folder_is_not_emptied(colours, name):
    embed_images(colours / "photos", ColourEncoder(), colours / "other", progress=False)
    (colours / name).symlink_to(colours / "other")
    before = {path: path.read_bytes() for path in (colours / "other").rglob("*") if path.is_file()}
    with pytest.raises(FileExistsError, match="did not make"):
        embed_images(colours / "photos", ColourEncoder(), colours / "out", overwrite=True, progress=False)
    assert before == {path: path.read_bytes() for path in (colours / "other").rglob("*") if path.is_file()}


def test_the_former_result_of_a_job_that_was_killed_is_removed(colours):
    """A job killed after the renaming leaves the former result under another name; the next one removes it."""
    embed_images(colours / "photos", ColourEncoder(), colours / "out", progress=False)
    (colours / "out").rename(colours / ".out.old")
    embed_images(colours / "photos", ColourEncoder(), colours / "out", progress=False)
    assert sorted(path.name for path in colours.iterdir()) == ["out", "photos"]


class Stopping(ColourEncoder):
    """An encoder that fails after some batches."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def encode_images(self, images):
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("no more")
        return super().encode_images(images)


def test_what_is_left_of_another_job(colours):
    """Finished shards are kept when settings change. Without such shards, the size of a batch may change."""
    sizes = {"shard_rows": 4, "progress": False}
    for batches in (0, 2):
        with pytest.raises(ValueError, match=r"a batch of 2 does not fit .*smaller --batch-size"):
            embed_images(colours / "photos", Stopping(batches), colours / "out", batch_size=2, **sizes)
        assert (colours / "out.shards/shard_0.done").is_file() == (batches == 2)
        if batches == 0:
            with pytest.raises(ValueError, match="a batch of 1 does not fit"):
                embed_images(colours / "photos", Stopping(0), colours / "out", batch_size=1, **sizes)
    with pytest.raises(ValueError, match=r"blocks of another job, which differs in batch_size"):
        embed_images(colours / "photos", ColourEncoder(), colours / "out", batch_size=1, **sizes)
    embed_images(colours / "photos", ColourEncoder(), colours / "out", batch_size=2, **sizes)
    embed_images(colours / "photos", ColourEncoder(), colours / "whole", batch_size=2, **sizes)
    assert_same_bytes(colours / "out", colours / "whole")


def test_summary_as_json_and_as_text(colours, monkeypatch, capsys):
    put(colours / "photos/9.jpg", b"junk")
    words = ["--images", colours / "photos", "--out", colours / "out", "--encoder", "colours"]
    assert geoflow_embed(monkeypatch, *words, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["images"] == summary["texts"] == 7
    assert summary["skipped_images"] == 1
    assert geoflow_embed(monkeypatch, *words) == 0
    shown = capsys.readouterr().out
    assert "7 images and 7 texts" in shown
    assert "skipped.csv says why" in shown


@pytest.mark.usefixtures("_torchvision_operators")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--images", "nowhere"), "nowhere does not exist"),
        (("--batch-size", 0), "must be at least 1"),
        (("--workers", 0), "must be at least 1"),
        (("--shard-rows", 0), "must be at least 1"),
        (("--dtype", "int8"), "dtype must be one of float32, float16"),
        (("--model", "ViT-H-14"), "--model is for --encoder open_clip"),
        (("--encoder", "open_clip", "--checkpoint", "nowhere.pt"), "nowhere.pt does not exist"),
        (("--encoder", "open_clip", "--model", "nope"), "open_clip has no model 'nope'"),
    ],
)
def test_bad_input_gives_one_line_and_leaves_no_file(colours, monkeypatch, capsys, words, message):
    before = sorted(colours.rglob("*"))
    given = ["--images", colours / "photos", "--out", colours / "out", "--encoder", "colours", *words]
    assert geoflow_embed(monkeypatch, *given) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert sorted(colours.rglob("*")) == before


@pytest.mark.slow
def test_the_command_without_a_network(colours):
    """The command, in a process of its own, prints one line that names the flag to use instead."""
    import subprocess

    script = Path(__file__).parents[1] / "with_torchvision.py"
    command = [sys.executable, script, "embed", "--images", colours / "photos", "--out", colours / "out"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(colours / "hub"), "PYTHONPATH": "."}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[2])
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"the weights of {DEFAULT_MODEL} could not be downloaded" in done.stderr
    assert "--checkpoint" in done.stderr
