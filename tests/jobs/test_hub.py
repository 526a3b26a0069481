"""Models with the conventions of the Hugging Face hub: folders, a stand-in server, its cache, offline, model cards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.data.fingerprint import Fingerprint
from geoflow_fast.encoders.registry import open_encoder
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime import hub as hub_module
from tests.jobs import hub_server
from tests.jobs.processes import run_geoflow

ENCODER = Fingerprint.of({"encoder": "open_clip", "model": "ViT-B-32", "weights": "abc"})


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on loopback, and an empty cache."""
    with hub_server.running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True, raising=False)
        yield server


def small_head() -> gf.PosteriorHead:
    rows = sample_uniform(60, 6)
    pairs = gf.EmbeddingPairs.from_arrays(rows, rows)
    pairs.image.encoder = pairs.text.encoder = ENCODER
    return gf.PosteriorHead.fit(pairs, gf.HeadConfig(steps=2, hidden=8, points=2, bank=8), progress=False)


def small_flow() -> gf.GeoFlow:
    return gf.GeoFlow(gf.GeoFlowConfig(6, 6, hidden=16, depth=1)).eval()


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    states = one.state_dict(), other.state_dict()
    assert list(states[0]) == list(states[1])
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name
    assert one.origin == other.origin


@pytest.mark.parametrize("make", [small_flow, small_head])
def test_round_trip_through_a_folder_and_the_hub(make, hub, tmp_path):
    model = make()
    kind = type(model)
    model.save_pretrained(tmp_path / "folder")
    assert_same(model, kind.from_pretrained(tmp_path / "folder"))
    rows = {"training_rows": True}
    address = model.push_to_hub("user/name", commit_message="First", token="hf_x", **rows)
    assert address.startswith(f"{hub.url}/user/name/commit/")
    assert set(hub.commit("user/name", "main")[1]) == {"config.json", "model.safetensors", "README.md"}
    assert_same(model, kind.from_pretrained("hf://user/name"))
    # A second version on the same branch: a revision names the first.
    first = hub.commit("user/name", "main")[0]
    changed = make()
    with torch.no_grad():
        next(changed.parameters()).add_(1)
    changed.push_to_hub("user/name", token="hf_x", **rows)
    assert_same(model, kind.from_pretrained("hf://user/name", revision=first))
    assert_same(changed, kind.from_pretrained("hf://user/name"))
    # A branch of its own.
    model.push_to_hub("user/name", branch="trial", token="hf_x", **rows)
    assert_same(model, kind.from_pretrained("hf://user/name", revision="trial"))
    assert_same(changed, kind.from_pretrained("hf://user/name", revision="main"))


def test_the_cache_serves_without_a_network(hub, tmp_path):
    flow = small_flow()
    flow.push_to_hub("user/name", token="hf_x")
    with pytest.raises(OSError, match="user/name could not be read from the hub"):
        gf.GeoFlow.from_pretrained("hf://user/name", local_files_only=True)
    gf.GeoFlow.from_pretrained("hf://user/name")
    hub.requests.clear()
    assert_same(flow, gf.GeoFlow.from_pretrained("hf://user/name", local_files_only=True))
    assert hub.requests == []
    gf.GeoFlow.from_pretrained("hf://user/name", cache_dir=tmp_path / "other")
    assert any(request.startswith("GET /user/name/resolve/") for request in hub.requests)


@pytest.mark.usefixtures("hub")
def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(OSError, match="nobody/nothing could not be read from the hub"):
        gf.GeoFlow.from_pretrained("hf://nobody/nothing")
    small_flow().push_to_hub("user/name", token="hf_x")
    for address, options in (("hf://user/name", {"revision": "v9"}), ("hf://user/name@v9", {})):
        with pytest.raises(OSError, match="at revision v9"):
            gf.GeoFlow.from_pretrained(address, **options)
    with pytest.raises(ValueError, match="another revision than revision='v8'"):
        gf.GeoFlow.from_pretrained("hf://user/name@v9", revision="v8")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        gf.GeoFlow.from_pretrained(tmp_path / "no/such/folder")
    small_flow().save_pretrained(tmp_path / "here")
    with pytest.raises(ValueError, match="revision= is for models of the hub"):
        gf.GeoFlow.from_pretrained(tmp_path / "here", revision="main")
    with pytest.raises(ValueError, match="repo_id must be user/name"):
        small_flow().push_to_hub("just a name")


def test_without_the_package_a_folder_works_and_a_name_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    flow = small_flow()
    flow.save_pretrained(tmp_path / "folder")
    assert_same(flow, gf.GeoFlow.from_pretrained(tmp_path / "folder"))
    with pytest.raises(ValueError, match=r"huggingface_hub: pip install '.*\[hub\]'"):
        gf.GeoFlow.from_pretrained("hf://user/name")
    with pytest.raises(ValueError, match=r"push_to_hub needs huggingface_hub: pip install '.*\[hub\]'"):
        flow.push_to_hub("user/name")


def test_the_card_names_encoder_pairs_settings_and_limits(tmp_path):
    head = small_head()
    head.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: geoflow_fast\ntags:\n")
    for words in ("open_clip ViT-B-32", "| pairs | 54 |", "| points | 2 |", "## Limits", "## Held-out figures", "nll"):
        assert words in card, words
    (tmp_path / "README.md").write_text("# mine\n")
    head.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# mine\n"
    untrained = gf.GeoFlow(gf.GeoFlowConfig(6, 6, hidden=16, depth=1)).card()
    assert "not known: the embeddings came without a record of their encoder" in untrained


def test_a_run_is_pushed_without_its_state_and_held_out_pairs(hub, tmp_path):
    run = tmp_path / "run"
    small_flow().save_pretrained(run)
    small_head().save_pretrained(run / "head")
    private = ["calibration/held_out/x.npy", "rerank_t2i.json", "rerank_t2i.0123456789abcdef.bank.safetensors"]
    other = ["notes.txt", "rerank_notes.json", "rerank_t2i.mine.bank.safetensors", "rerank_mine.bank.safetensors"]
    for name in ("last.safetensors", "metrics.jsonl", "head/last.safetensors", ".lock", *other, *private):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=r"bank of the head of .*run holds .* 8 training pairs.*training_rows=True"):
        gf.push_to_hub(run, "user/run", token="hf_x")
    assert hub.repositories == {}
    gf.push_to_hub(run, "user/run", training_rows=True, token="hf_x")
    pushed = set(hub.commit("user/run", "main")[1])
    own = {"config.json", "model.safetensors", "README.md"}
    assert pushed == own | {f"head/{name}" for name in own}
    gf.push_to_hub(run, "user/run", held_out=True, training_rows=True, token="hf_x")
    assert set(hub.commit("user/run", "main")[1]) == pushed | set(private)
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors"):
        gf.push_to_hub(tmp_path, "user/run")


def test_a_head_with_a_bank_is_uploaded_on_request(hub, tmp_path):
    head = small_head()
    for push in (head.push_to_hub, lambda name: head.save_pretrained(tmp_path, push_to_hub=True, repo_id=name)):
        with pytest.raises(ValueError, match="bank of the PosteriorHead holds the embeddings of 8 training pairs"):
            push("user/name")
    assert hub.repositories == {}
    gf.PosteriorHead(gf.HeadConfig(hidden=4, bank=0), 6, 6).push_to_hub("user/name", token="hf_x")
    assert "user/name" in hub.repositories


COMMANDS = {
    "entropy": {"queries": "q.npy", "gallery": "g.npy", "out": "x.parquet"},
    "rerank": {"queries": "q.npy", "gallery": "g.npy", "out": "x.parquet"},
    "density": {"images": "q.npy", "texts": "q.npy", "out": "x.parquet"},
    "evaluate": {"images": "q.npy", "texts": "q.npy", "out": "x"},
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_take_paths_for_paths_and_addresses_for_repositories(command, hub, tmp_path, monkeypatch, capsys):
    """A folder that is missing is never looked up on the hub, where anybody may have a model of that name."""
    monkeypatch.chdir(tmp_path)
    rows = sample_uniform(8, 6)
    for name in ("q.npy", "g.npy"):
        np.save(name, rows.numpy())
    small_flow().push_to_hub("runs/first", token="hf_x")
    hub.requests.clear()
    assert run_geoflow(monkeypatch, command, model="runs/first", **COMMANDS[command]) == 2
    assert "runs/first" in capsys.readouterr().err
    assert hub.requests == []
    run_geoflow(monkeypatch, command, model="hf://runs/first", **COMMANDS[command])
    assert any("/runs/first/resolve/" in request for request in hub.requests)
    for address in ("hf://first", "hf://a/b/c", "hf://a/b@"):
        assert run_geoflow(monkeypatch, command, model=address, **COMMANDS[command]) == 2
        assert "hf://user/name" in capsys.readouterr().err


def test_a_folder_that_is_missing_is_not_looked_up_on_the_hub(hub, tmp_path, monkeypatch):
    """Anybody may have a model of that name there."""
    monkeypatch.chdir(tmp_path)
    flow = small_flow()
    flow.push_to_hub("runs/first", token="hf_x")
    hub.requests.clear()
    for kind in (gf.GeoFlow, gf.PosteriorHead):
        for name in ("runs/first", Path("runs/first")):
            with pytest.raises(FileNotFoundError, match=r"runs/first does not exist; .* hf://runs/first"):
                kind.from_pretrained(name)
    assert hub.requests == []
    assert_same(flow, gf.GeoFlow.from_pretrained("hf://runs/first"))


@pytest.mark.parametrize("kind", ["transformers", "sentence-transformers"])
def test_encoders_of_commands_are_folders_unless_they_have_an_address(kind, hub):
    with pytest.raises(FileNotFoundError, match=r"models/enc is not a folder; .* hf://user/name"):
        open_encoder(kind, model="models/enc")
    assert hub.requests == []


LOADERS = {"transformers": gf.TransformersEncoder, "sentence-transformers": gf.SentenceEncoder}


@pytest.mark.parametrize("kind", LOADERS)
def test_the_address_of_an_encoder_is_a_repository(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded: list[Any] = []
    monkeypatch.setattr(LOADERS[kind], "load", lambda name, revision, **_: loaded.append((name, revision)))
    open_encoder(kind, model="hf://models/enc")
    open_encoder(kind, model="hf://models/enc@v1")
    open_encoder(kind, model="hf://models/enc", revision="v2")
    open_encoder(kind)
    assert loaded[:3] == [("models/enc", None), ("models/enc", "v1"), ("models/enc", "v2")]
    assert loaded[3][1] is None
    for address in ("hf://enc", "hf://a/b/c", "hf://a/b@", "hf://../enc/x"):
        with pytest.raises(ValueError, match="hf://user/name"):
            open_encoder(kind, model=address)
    with pytest.raises(ValueError, match="another revision than --revision v2"):
        open_encoder(kind, model="hf://models/enc@v1", revision="v2")
    (tmp_path / "models/enc").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="the folder models/enc hides the repository hf://models/enc"):
        open_encoder(kind, model="hf://models/enc")
    assert len(loaded) == 4


def test_repository_names_are_told_from_paths():
    for name in ("user/name", "a.b/c-d_e"):
        assert hub_module.REPOSITORY.fullmatch(name)
    for name in ("name", "a/b/c", "/a/b", "a b/c", "../x", str(Path("runs/first/head"))):
        assert not hub_module.REPOSITORY.fullmatch(name) or name.startswith(".")
