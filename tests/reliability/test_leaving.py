"""What leaves the machine: an upload of a model holds no row of the user's data that was not asked for, no path of the
machine, and no text that does anything in a model card."""

from __future__ import annotations

import getpass
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast.data.fingerprint import Fingerprint, Origin
from geoflow_fast.head import fitting
from geoflow_fast.jobs import calibration, hub
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime.words import one_line
from tests.jobs import hub_server
from tests.jobs.processes import run_geoflow

DIM, IMAGES, OTHERS = 5, 190, 80
ENCODER = "/home/somebody/private/encoder"
BANK = ("bank_image", "bank_text")
CHEAP = {"steps": 1, "shortlist": 12}
KINDS = {"flow and head": [], "flow": ["--no-head"], "head": ["--head"]}


@dataclass(frozen=True)
class Desk:
    """A folder with pairs, and the model that was trained on them."""

    folder: Path
    trained_on: Tensor
    """[n, d], all rows that nothing holds out."""
    held_out: Tensor
    """[n, d], those that calibrations use."""

    @property
    def run(self) -> Path:
        return self.folder / "run"


def pairs_of(count: int, seed: int, folder: Path) -> Tensor:
    """Writes pairs with the record of an encoder in a private folder; all their rows."""
    make = torch.Generator().manual_seed(seed)
    image = sample_uniform(count, DIM, generator=make)
    text = gf.geometry.normalize(image + 0.2 * torch.randn(count, DIM, generator=make))
    gf.EmbeddingPairs.from_arrays(image, text).save(folder, dtype=np.float32)
    facts = {"encoder": "transformers", "model": ENCODER, "weights": "abc"}
    (folder / "embed.json").write_text(json.dumps({"facts": facts}))
    for side, rows in (("images", image), ("texts", text)):
        np.save(folder.with_name(f"{folder.name}_{side}.npy"), rows.numpy())
    return torch.cat((image, text))


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory) -> Iterator[Desk]:
    """A run of `geoflow train` that is calibrated in both directions."""
    folder = tmp_path_factory.mktemp("desk")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(calibration, "BANDWIDTH_QUERIES", (6, 6))
        patch.setattr(calibration, "GUIDANCES", (0.0,))
        patch.setattr(calibration, "LADDER_QUERIES", (60, 60))
        patch.setattr(fitting, "FEW", fitting.dataclasses.replace(fitting.FEW, steps=2))
        every = pairs_of(IMAGES, 0, folder / "pairs")
        others = pairs_of(OTHERS, 1, folder / "others")
        words = [*KINDS[request.param], *([] if request.param == "flow" else ["--points=1"])]
        sizes = {} if request.param == "head" else {"preset": "tiny"}
        run = {"pairs": "pairs", "out": "run", "steps": 2, "batch_size": 16, "device": "cpu"}
        assert run_geoflow(patch, "train", *words, **run, **sizes) == 0
        kept = calibration.StoredCalibration.read(folder / "run").pairs()
        held_out = torch.cat([part.float() for part in kept[np.arange(len(kept))]])
        is_held_out = (every @ held_out.T > 1 - 1e-6).any(1)
        assert is_held_out.sum() == len(held_out)
        yield Desk(folder, every[~is_held_out], torch.cat((held_out, others)))


@pytest.fixture(params=["train", "rerank"])
def desk(request, trained, tmp_path, monkeypatch) -> Desk:
    """The same after a command that ran last, in a folder of its own."""
    shutil.copytree(trained.folder, tmp_path / "desk")
    monkeypatch.chdir(tmp_path / "desk")
    if request.param == "rerank":
        common = {"images": "pairs_images.npy", "texts": "pairs_texts.npy", "model": "run", "device": "cpu", **CHEAP}
        assert run_geoflow(monkeypatch, "rerank", direction="t2i", out="t2i.parquet", **common) == 0
        other = {"direction": "i2t", "out": "i2t.parquet", "held_out": "others"}
        assert run_geoflow(monkeypatch, "rerank", "--overwrite", **other, **common) == 0
    return Desk(tmp_path / "desk", trained.trained_on, trained.held_out)


@pytest.fixture
def uploads(monkeypatch) -> Iterator[hub_server.Hub]:
    """A hub on loopback."""
    with hub_server.running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True, raising=False)
        yield server


def holds_any(raw: bytes, parts: Sequence[bytes]) -> bool:
    """Whether any of the parts, of eight bytes or more, is anywhere in `raw`. Places are sorted out by three bytes, as
    a search for one part after the other takes a minute."""
    starts, begins = {part[:8] for part in parts}, np.zeros(2**24, dtype=bool)
    begins[[int.from_bytes(start[:3], "little") for start in starts]] = True
    octets = np.frombuffer(raw, np.uint8).astype(np.uint32)
    places = np.flatnonzero(begins[octets[:-2] | octets[1:-1] << 8 | octets[2:] << 16])
    whole = tuple(parts)
    return any(raw[at : at + 8] in starts and raw.startswith(whole, at) for at in places)


def test_the_search_finds_a_part_at_any_place():
    noise = np.random.default_rng(0).bytes(10_000)
    parts = [noise[k : k + 10] for k in (0, 777, 9990)]
    assert all(holds_any(noise, [part, b"0123456789"]) for part in parts)
    assert not any(holds_any(noise.replace(part, part[:9]), [part]) for part in parts)
    assert not holds_any(b"", parts)


def found_in(files: Mapping[str, bytes], rows: Tensor) -> set[str]:
    """The files, and the tensors of files, that hold any of the unit `rows` [n, d], whatever their type and scale."""
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    coded = [row.view(torch.uint8).numpy().tobytes() for kind in types for row in rows.to(kind)]
    found = {name for name, raw in files.items() if holds_any(raw, coded)}
    for file in (name for name in files if name.endswith(".safetensors")):
        for name, tensor in load(files[file]).items():
            sides = (tensor, tensor.mT) if tensor.dim() > 1 else (tensor,)
            for side in sides:
                if side.is_floating_point() and side.dim() and side.shape[-1] == rows.shape[1]:
                    unit = torch.nn.functional.normalize(side.reshape(-1, side.shape[-1]).double(), dim=1)
                    if bool((unit @ rows.double().T > 1 - 1e-5).any()):
                        found.add(f"{file}: {name}")
    return found


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_upload_holds_no_row_that_was_not_asked_for(desk, uploads):
    bank = {f"{path}: {name}" for path in ("model.safetensors", "head/model.safetensors") for name in BANK}
    # The search is able to find what stays at home.
    at_home = found_in(files_of(desk.run), desk.held_out)
    assert any(name.startswith("rerank_t2i.") for name in at_home)
    assert any(name.startswith("rerank_i2t.") for name in at_home)
    has_bank = bool(found_in(files_of(desk.run), desk.trained_on) & bank)
    if has_bank:
        with pytest.raises(ValueError, match=r"bank of the head of .* holds the embeddings of 512 training pairs"):
            gf.push_to_hub(desk.run, "user/run", token="hf_x")
        assert uploads.repositories == {}
    gf.push_to_hub(desk.run, "user/run", training_rows=has_bank, token="hf_x")
    files = uploads.commit("user/run", "main")[1]
    assert set(files) <= set(hub.RUN_FILES)
    assert found_in(files, desk.held_out) == set()
    names = {name.partition(":")[0] for name in bank}
    assert found_in(files, desk.trained_on) <= (bank | names if has_bank else set())


def once(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test for one kind of model, after one command."""
    model = pytest.mark.parametrize("trained", ["flow and head"], indirect=True)
    return model(pytest.mark.parametrize("desk", ["rerank"], indirect=True)(test))


@once
def test_an_upload_names_no_folder_of_the_machine(desk, uploads):
    gf.push_to_hub(desk.run, "user/run", training_rows=True, token="hf_x")
    private = [str(desk.folder), str(Path.home()), ENCODER, "somebody", str(Path(gf.__file__).parents[1])]
    private += [] if getpass.getuser() == "root" else [getpass.getuser()]
    for name, raw in uploads.commit("user/run", "main")[1].items():
        assert [words for words in private if words.encode() in raw] == [], name
    assert "transformers encoder" in uploads.commit("user/run", "main")[1]["README.md"].decode()


@once
def test_whoever_downloads_a_run_is_told_to_calibrate(desk, uploads, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    gf.push_to_hub(desk.run, "user/run", training_rows=True, token="hf_x")
    assert "calibrate on held-out pairs of your own" in uploads.commit("user/run", "main")[1]["README.md"].decode()
    files = {"images": "others_images.npy", "texts": "others_texts.npy"}
    common = {"model": "hf://user/run", "device": "cpu", **files, **CHEAP}
    assert run_geoflow(monkeypatch, "rerank", **common, out="a.parquet") == 0
    assert "Give --held-out pairs to calibrate on" in capsys.readouterr().err
    assert run_geoflow(monkeypatch, "rerank", **common, out="b.parquet", calibration="missing.json") == 2
    assert "missing.json is missing: calibrate on held-out pairs of your own" in capsys.readouterr().err
    assert run_geoflow(monkeypatch, "rerank", **common, out="c.parquet", held_out="others", calibration="c.json") == 0


@once
def test_held_out_pairs_are_uploaded_on_request(desk, uploads, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    gf.push_to_hub(desk.run, "user/run", held_out=True, training_rows=True, token="hf_x")
    files = set(uploads.commit("user/run", "main")[1])
    assert {name for name in files_of(desk.run) if name.startswith(("calibration/held_out/", "rerank_"))} <= files
    assert not {name for name in files if name.endswith(("last.safetensors", ".jsonl", ".lock"))}
    again = {
        "images": "others_images.npy",
        "texts": "others_texts.npy",
        "out": "again.parquet",
        "device": "cpu",
        **CHEAP,
    }
    assert run_geoflow(monkeypatch, "rerank", model="hf://user/run@main", **again) == 0


HOSTILE = [
    "<script>alert(1)</script>",
    "x\n# A heading\n",
    "[click](https://example.com)",
    "![](https://example.com/x.png)",
    "https://example.com",
    "www.example.com",
    "a | b | c",
    "`code` ``two``",
    "**bold** _it_",
    "\x1b[31mred\x1b[0m\r\x07",
    "\u202eright to left",
    "<!-- hidden",
    "---\ntitle: x\n---",
    "",
]


@pytest.mark.parametrize("words", HOSTILE)
def test_free_text_has_no_effect_in_a_model_card(words):
    flow = gf.GeoFlow(gf.GeoFlowConfig(6, 6, hidden=16, depth=1))
    head = gf.PosteriorHead(gf.HeadConfig(hidden=4), 6, 6)
    plain = Fingerprint("encoder", "abc")
    for model in (flow, head):
        model.origin = Origin((plain, plain), ("image", "text"), {"pairs": 3, "key": "value"}, {"other": "value"})
        usual = model.card().splitlines()
        named = Fingerprint(words or "x", words or "x")
        model.origin = Origin(
            (named, named), (f"{words} one", f"{words} two"), {"pairs": 3, words: words}, {f"other {words}": words}
        )
        lines = model.card().splitlines()
        assert len(lines) == len(usual)
        shown = "\n".join(lines[usual.index("") :])
        for line, ordinary in zip(lines, usual):
            assert line.isprintable()
            assert line.split(" ")[0] == ordinary.split(" ")[0]
            if line.startswith("|"):
                assert line.count("|") == ordinary.count("|")
        outside = "".join(shown.split("`")[::2]).replace("<!-- written by geoflow_fast;", "")
        for mark in ("<", "](", "://", "www.", "**", "alert"):
            assert mark not in outside.replace("gf.BayesReranker", ""), outside


@pytest.mark.parametrize("words", HOSTILE)
def test_messages_cannot_control_a_terminal(words):
    assert one_line(f"a {words} b").isprintable()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("openai/clip-vit-base-patch32", "openai/clip-vit-base-patch32"),
        ("ViT-B-32", "ViT-B-32"),
        ("hf-hub:timm/vit", "hf-hub:timm/vit"),
        ("local-dir:/home/me/enc", "enc"),
        ("/home/me/enc", "enc"),
        ("~/models/enc", "enc"),
        ("../enc/", "enc"),
        ("work/models/enc", "enc"),
        (r"C:\Users\me\enc", "enc"),
    ],
)
def test_encoders_are_known_without_their_folders(model, name):
    assert Fingerprint.of({"encoder": "e", "model": model}).name == f"e {name}"
