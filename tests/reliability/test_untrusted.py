"""Files from strangers: loading executes nothing, allocates no more than they hold, writes nowhere else."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional

import geoflow_fast as gf
from benchmarks.methods import baselines
from benchmarks.methods.baselines.base import method_of
from benchmarks.methods.recipe import load_recipe
from geoflow_fast.data.rows import load_npy
from geoflow_fast.encoders.sources import open_images
from geoflow_fast.evaluation.results import Comparison
from geoflow_fast.jobs.decisions import open_lists
from geoflow_fast.jobs.watch import WatchSettings, watch_file
from geoflow_fast.retrieval.calibration import KIND, VERSION
from geoflow_fast.retrieval.rerank import bank_file
from geoflow_fast.runtime import parquet
from geoflow_fast.runtime.files import JSON_BYTES, locked, read_json, read_toml, write_atomic
from geoflow_fast.runtime.tensors import CHECKSUM, load_tensors, save_tensors
from tests.decisions.helpers import search
from tests.reliability.hostile import in_time


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.trace), "w")


def unit(*shape: int) -> torch.Tensor:
    return functional.normalize(torch.randn(*shape), dim=-1)


def npy_with_pickle(path: Path, trace: Path) -> None:
    with open(path, "wb") as file:
        np.lib.format.write_array(file, np.array([[Bomb(trace)]], dtype=object), allow_pickle=True)


def bare_pickle(path: Path, trace: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb(trace)))


def torch_pickle(path: Path, trace: Path) -> None:
    torch.save({"model": Bomb(trace)}, path)


DISGUISES = (npy_with_pickle, bare_pickle, torch_pickle)


def made_for(path: Path) -> Any:
    return gf.Calibration.load(path, {})


DIGEST = "d" * 64
"""The digest of a bank, by which its file is called."""


def bank_of_a_calibration(path: Path) -> Any:
    """Loads a calibration that was made with the bank in the file `path`, which lies beside it."""
    reranker = gf.BayesReranker(None, unit(9, 3), shortlist=4)
    numbers = (1.0, 0.5, -1.0, (0.1, 0.1, 0.1), 1.0, 0.1, 60, 55, 1.0)
    file = path.with_name("calibration.json")
    gf.Calibration(*numbers, dict(reranker.made_for), bank=DIGEST).save(file)
    assert bank_file(file, DIGEST) == path
    try:
        return reranker.load_calibration(file)
    finally:
        file.unlink()


def looks_at_a_log(path: Path) -> Any:
    """Goes on with the file of looks `path`, for a rule and a log of another folder."""
    fitted, tested, log = (search(60, 5, items=20, seed=seed) for seed in range(3))
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        rule = gf.Trust().fit(fitted.scores, fitted.first).certify(tested.scores, tested.first, 0.6)
        assert rule.certified
        rule.save(folder / "rule.json")
        parquet.write_columns(folder / "log.parquet", {"scores": log.scores}, 60)
        return watch_file(folder / "rule.json", folder / "log.parquet", path, WatchSettings(every=60))


LOADERS: dict[str, Callable[[Path], Any]] = {
    "embeddings.npy": lambda path: load_npy(path, mapped=True),
    "index.npy": load_npy,
    "gallery.npy": gf.Gallery,
    "model.safetensors": lambda path: gf.GeoFlow.from_pretrained(path.parent),
    "last.safetensors": lambda path: load_tensors(path, kind="training state"),
    "scores.parquet": parquet.read_columns,
    "calibration.json": made_for,
    "config.json": lambda path: method_of(path.parent),
    "baseline/model.safetensors": lambda path: baselines.HubSoftmax.load(path.parent),
    "results.json": Comparison.load,
    "recipe.toml": load_recipe,
    "run.toml": read_toml,
    "picture.png": lambda path: gf.ColourEncoder().encode_images([path]),
    "pictures.parquet": open_images,
    "pictures.csv": open_images,
    "pictures.tar": open_images,
    "trust.json": gf.Trust.load,
    "rule.json": gf.Rule.load,
    "head/model.safetensors": lambda path: gf.PosteriorHead.from_pretrained(path.parent),
    f"calibration.{DIGEST[:16]}.bank.safetensors": bank_of_a_calibration,
    "lists.parquet": open_lists,
    "health.parquet": looks_at_a_log,
}


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("name", LOADERS)
def test_a_pickle_in_disguise_is_refused_and_not_executed(tmp_path, name, disguise):
    trace = tmp_path / "executed"
    folder = tmp_path / "files"
    (folder / name).parent.mkdir(parents=True)
    disguise(folder / name, trace)
    # The bomb is live: unpickled on purpose, in another process, it leaves its trace.
    before = (folder / name).read_bytes()
    with pytest.raises((ValueError, OSError)) as caught:
        LOADERS[name](folder / name)
    assert Path(name).name in str(caught.value) or "config" in str(caught.value)
    assert not trace.exists()
    assert (folder / name).read_bytes() == before
    assert [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()] == [name]


def test_the_bomb_is_live(tmp_path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "executed"))).close()
    assert (tmp_path / "executed").exists()


@pytest.fixture
def little_memory():
    """Refuses allocations beyond 2 GB on top of what is mapped now: an honest check passes, an allocation fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + 2**31, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def npy_bytes(
    shape: Any, descr: Any = "<f4", *, version: int = 1, claimed: int | None = None, by_columns: bool = False
) -> bytes:
    header = repr({"descr": descr, "fortran_order": by_columns, "shape": shape}).encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    length = len(header) if claimed is None else claimed
    size = length.to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + header + bytes(64)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    "contents",
    [
        npy_bytes((10**9, 1024)),
        npy_bytes((2**62, 2**62)),
        npy_bytes((-1, 4)),
        npy_bytes((True, 4)),
        npy_bytes("everything"),
        npy_bytes((4, 4), "|O"),
        npy_bytes((4, 4), [("a", "|O")]),
        npy_bytes((4, 4), "__import__('os').system('true')"),
        npy_bytes((1,), "<U2000000000"),
        npy_bytes((4 * 10**9,), "|S0"),
        npy_bytes((10**11,), "|S0"),
        npy_bytes((4,), "<U0"),
        npy_bytes((4,), "|V0"),
        npy_bytes((10**11,), "|V0", by_columns=True),
        npy_bytes((4 * 10**9, 0)),
        npy_bytes((0, 2**62)),
        npy_bytes((0, -1)),
        npy_bytes((2**62, 0, 2**62)),
        npy_bytes((10**9, 1024), by_columns=True),
        npy_bytes((2**63,), "|S1"),
        npy_bytes((17,)),
        npy_bytes((17,), version=2),
        npy_bytes((10**11,), "|S0", version=3),
        npy_bytes((4,), [("a", "<f4")]),
        npy_bytes((4,), [("a", "<f4", (2**40,))]),
        npy_bytes((1,), "(1000000000,1000)f4"),
        npy_bytes((1,), ("<f4", (4,))),
        npy_bytes((4.0,)),
        npy_bytes((4, 4), version=3, claimed=2**32 - 1),
        npy_bytes((4, 4), version=2, claimed=2**32 - 1),
        npy_bytes((4, 4), version=9),
        npy_bytes((4, 4), claimed=60_000),
        b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65535,
        b"\x93NUMPY\x01\x00\x00\x20" + b"(" * 8192,
        b"\x93NUMPY",
        b"PK\x03\x04" + bytes(60),
        b"",
    ],
    ids=lambda contents: repr(contents[:24]),
)
@pytest.mark.usefixtures("little_memory")
def test_lying_npy_headers_are_refused_before_allocation(tmp_path, contents, mapped):
    path = tmp_path / "x.npy"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=r"x\.npy"), in_time(5):
        load_npy(path, mapped=mapped)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    ("contents", "dtype", "shape"),
    [
        (npy_bytes((4, 4)), "<f4", (4, 4)),
        (npy_bytes((4, 4), by_columns=True), "<f4", (4, 4)),
        (npy_bytes((2, 4), ">f8", version=2), ">f8", (2, 4)),
        (npy_bytes((2, 4), "<f8", version=3), "<f8", (2, 4)),
        (npy_bytes((4,), "<U4"), "<U4", (4,)),
        (npy_bytes((64,), "|b1"), "|b1", (64,)),
        (npy_bytes((3,)), "<f4", (3,)),
        (npy_bytes((0,), "<i8"), "<i8", (0,)),
        (npy_bytes((0, 512)), "<f4", (0, 512)),
        (npy_bytes(()), "<f4", ()),
    ],
)
def test_honest_npy_headers_are_read(tmp_path, contents, dtype, shape, mapped):
    path = tmp_path / "x.npy"
    path.write_bytes(contents)
    array = load_npy(path, mapped=mapped)
    assert array.dtype == np.dtype(dtype)
    assert array.shape == shape
    assert array.tolist() == np.load(path).tolist()


def signed(header: dict[str, Any], data: bytes = b"") -> bytes:
    """A safetensors file whose checksum is right, as a stranger can make it."""
    marks = {"geoflow_version": "", "kind": "", "info": "", **header.get("__metadata__", {})}
    types = {"F32": "torch.float32"}
    kinds = [[name, types[x["dtype"]], x["shape"]] for name, x in header.items() if name != "__metadata__"]
    covered = json.dumps([marks["geoflow_version"], marks["kind"], marks["info"], kinds]).encode() + data
    own = {**header.get("__metadata__", {}), CHECKSUM: hashlib.sha256(covered).hexdigest()}
    raw = json.dumps({**header, "__metadata__": own}).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + data


def test_a_file_that_a_stranger_signed_is_read(tmp_path):
    """Else the tests below would not reach what they are about."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(signed({"__metadata__": {**MARKED, "info": '{"a": 1}'}, **ONE}, struct.pack("<2f", 1, 2)))
    tensors, info = load_tensors(path, kind="model")
    assert info == {"a": 1}
    assert {name: x.tolist() for name, x in tensors.items()} == {"x": [1.0, 2.0]}


@pytest.mark.parametrize("part", ["__metadata__", '"info"', "model", "F32", "[2]", "values"])
def test_a_flipped_bit_anywhere_is_an_error(tmp_path, part):
    """In the values, a name, a type, a shape or the description of a file."""
    path = tmp_path / "model.safetensors"
    save_tensors(path, {"x": torch.tensor([1.0, 2.0]), "y": torch.ones(2)}, kind="model", info={"a": 1})
    content = bytearray(path.read_bytes())
    place = len(content) - 3 if part == "values" else content.index(part.encode()) + 1
    for bit in range(8):
        changed = bytearray(content)
        changed[place] ^= 1 << bit
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            load_tensors(path, kind="model")


MARKED = {"geoflow_version": "1", "kind": "model"}
ONE = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    "contents",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**12) + b"{}",
        struct.pack("<Q", 2**27) + b"{}" + b" " * 100,
        signed(
            {
                "__metadata__": {**MARKED, "info": "{}"},
                "x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 8]},
            },
            bytes(8),
        ),
        signed(
            {"__metadata__": {**MARKED, "info": "{}"}, "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**40]}},
            bytes(8),
        ),
        signed(
            {"__metadata__": {**MARKED, "info": "{}"}, "x": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
            bytes(8),
        ),
        signed({"__metadata__": MARKED, **ONE}, bytes(8)),
        signed({"__metadata__": {**MARKED, "info": "not json"}, **ONE}, bytes(8)),
        signed({"__metadata__": {**MARKED, "info": "[1, 2]"}, **ONE}, bytes(8)),
        signed({"__metadata__": {**MARKED, "info": "[" * 100_000}, **ONE}, bytes(8)),
        signed({"__metadata__": {**MARKED, "info": '{"config": 7}'}, **ONE}, bytes(8)),
        signed({"__metadata__": {**MARKED, "info": '{"config": {"image_dim": 3}}'}, **ONE}, bytes(8)),
        signed(ONE, bytes(8)),
        b"",
        b"\x00" * 7,
    ],
    ids=range(15),
)
@pytest.mark.usefixtures("little_memory")
def test_lying_safetensors_are_refused_before_allocation(tmp_path, contents):
    path = tmp_path / "model.safetensors"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        gf.GeoFlow.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": 2**40},
        {"depth": 10**9},
        {"image_dim": -1},
        {"dropout": "much"},
        {"layer_scale": None},
        {"geometry": "../../etc/passwd"},
        {"heads": 0},
        {"pca_dim": 1e3},
        {"centre": "yes"},
        {"extra": 1},
    ],
    ids=str,
)
@pytest.mark.usefixtures("little_memory")
def test_a_configuration_that_asks_for_the_impossible(tmp_path, flow, change):
    """Right checksum, wrong wishes: refused before a network is made for them."""
    info = {"config": {**flow.config.to_json(), **change}}
    save_tensors(tmp_path / "model.safetensors", flow.state_dict(), kind="model", info=info)
    with pytest.raises((ValueError, TypeError)) as caught:
        gf.GeoFlow.from_pretrained(tmp_path)
    assert next(iter(change)) in str(caught.value)


def test_parquet_that_unpacks_to_far_more_than_its_size(tmp_path):
    """Forty million equal numbers fit into kilobytes of run lengths."""
    path = tmp_path / "scores.parquet"
    rows = 40_000_000
    table = pa.table({"entropy": pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([1.0]))})
    pq.write_table(table, path)
    assert path.stat().st_size < 300_000
    with pytest.raises(ValueError, match=r"scores\.parquet.*unpack"):
        parquet.read_columns(path, ["entropy"])


def test_metadata_with_damaged_parquet_names_the_file(tmp_path):
    pairs = gf.EmbeddingPairs.from_arrays(unit(6, 4), unit(6, 4))
    pairs.save(tmp_path / "pairs")
    (tmp_path / "pairs" / "metadata").mkdir()
    whole = tmp_path / "whole.parquet"
    pq.write_table(pa.table({"image_path": ["../../../etc/passwd"] * 6}), whole)
    target = tmp_path / "pairs" / "metadata" / "metadata_0.parquet"
    # A path in the metadata only tells which rows are of one image: it is never opened.
    target.write_bytes(whole.read_bytes())
    assert len(np.unique(gf.EmbeddingPairs.open(tmp_path / "pairs").group)) == 1
    for damaged in (whole.read_bytes()[:-20], b"PAR1" + bytes(200) + b"PAR1", b""):
        target.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"metadata_0\.parquet"):
            gf.EmbeddingPairs.open(tmp_path / "pairs")


@pytest.mark.parametrize(
    "contents",
    [b"[" * 200_000, b"\xff\xfe", b"", b"{", b"9" * 10_000, b" " * (JSON_BYTES + 1), b"{}" + b" " * JSON_BYTES],
    ids=range(7),
)
def test_json_that_is_none(tmp_path, contents):
    path = tmp_path / "calibration.json"
    path.write_bytes(contents)
    with pytest.raises(ValueError, match=r"calibration\.json"):
        read_json(path)


@pytest.mark.parametrize(
    "change",
    [
        *({"stderr": 7}, {"stderr": [None]}, {"made_for": [1]}, {"alpha": "1"}, {"alpha": 1e999}, {"beta": None}),
        *({"others": {"x": 1.0}}, {"others": 3}, {"others": {"hub": "1"}}, {"platt": [1.0]}, {"platt": 2.0}),
        *({"rungs": [{"name": "x"}]}, {"rungs": 1}, {"cheap": {"weights": {}}}, {"cheap": 1}, {"bank": 3}),
        *({"hub_scale": "a"}, {"cheap": {"weights": {"outside": 0.0}, "platt": None, "gaps": [0.0, 1.0]}}),
        {"cheap": {"weights": {"outside": None}, "platt": None, "gaps": [0.0, 1.0], "no_match": None}},
        *({"rest": "1"}, {"relevance": [1.0]}, {"relevance": ["a", 1.0, 2.0]}, {"no_match": 1}),
        *(
            {"no_match": {"weights": {"x": 1.0}, "loss": 0.5}},
            {"no_match": {"weights": {"constant": "1"}, "loss": 0.5}},
        ),
    ],
    ids=str,
)
def test_a_calibration_of_the_wrong_types(tmp_path, change):
    path = tmp_path / "calibration.json"
    good = {"alpha": 1.0, "beta": 0.0, "outside": 0.0, "stderr": [0.1, 0.1, 0.1], "nll": 1.0, "nll_stderr": 0.1}
    good |= {"queries": 60, "reached": 55, "right_per_query": 1.0, "made_for": {}, "pairs": ""}
    good |= {"others": {}, "hub_scale": 0.0, "platt": None, "rungs": [], "cheap": None, "bank": ""}
    good |= {"rest": None, "relevance": None, "no_match": None, "items": ""}
    path.write_text(json.dumps({"kind": KIND, "version": VERSION, **good}))
    assert gf.Calibration.load(path, {}).alpha == 1.0
    path.write_text(json.dumps({"kind": KIND, "version": VERSION, **good, **change}))
    with pytest.raises(ValueError, match=r"calibration\.json"):
        gf.Calibration.load(path, {})


@pytest.mark.parametrize(
    "method", ["probvlm", "grove", "bayesvlm", "euclidean_flow", "adapter", "hub_softmax", "list_boosting"]
)
@pytest.mark.usefixtures("little_memory")
def test_a_baseline_that_asks_for_the_impossible(tmp_path, method):
    """Right checksum, settings of a network that the file does not hold: refused before it is made."""
    widths = {"image_dim": 1 << 20, "text_dim": 1 << 20}
    more = {
        "hub_softmax": {},
        "list_boosting": {},
        "bayesvlm": {"image_pre": 1 << 15, "text_pre": 1 << 15},
        "grove": {"size": "paper", "latent": 10},
    }
    info = {"method": method, "settings": {**widths, **more.get(method, {"size": "paper"})}}
    save_tensors(tmp_path / "model.safetensors", {"x": torch.zeros(3)}, kind="baseline", info=info)
    with pytest.raises(ValueError, match=r"model\.safetensors") as error:
        baselines.find(method).load(tmp_path)
    # A failed allocation would come as the cause.
    assert not isinstance(error.value.__cause__, (MemoryError, RuntimeError))


RECIPE = 'title = "t"\nseeds = [0]\n[[data]]\nname = "a"\ntrain = "train"\nheld_out = "val"\ntest = "test"\n'


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ('name = "a"', 'name = "../../outside"'),
        ('name = "a"', 'name = "/outside"'),
        ('name = "a"', 'name = ".."'),
        ('name = "a"', 'name = ""'),
        ('train = "train"', 'train = "/etc"'),
        ('held_out = "val"', 'held_out = "../val"'),
        ('test = "test"', 'test = "a/../../b"'),
        ("seeds = [0]", 'seeds = ["/../../outside"]'),
    ],
)
def test_a_recipe_leads_nowhere_else(tmp_path, good, bad):
    """Neither to folders besides the data, nor to results besides the output."""
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    assert load_recipe(path).title == "t"
    path.write_text(RECIPE.replace(good, bad))
    with pytest.raises(ValueError, match=r"recipe\.toml"):
        load_recipe(path)


def test_links_in_the_place_of_our_own_files_are_not_followed(tmp_path):
    """Where we write, a link put there by another leads nowhere: neither the temporary file nor the lock follows it."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder = tmp_path / "out"
    folder.mkdir()
    for number in range(20):
        (folder / f".scores.json.{number:012d}.tmp").symlink_to(precious)
    write_atomic(folder / "scores.json", lambda file: file.write(b"new"))
    assert precious.read_text() == "precious"
    assert (folder / "scores.json").read_bytes() == b"new"
    (folder / ".lock").symlink_to(precious)
    with pytest.raises(OSError, match="lock"), locked(folder):
        pass
    assert precious.read_text() == "precious"


def test_an_output_that_is_a_link_is_replaced_and_its_target_kept(tmp_path):
    precious, out = tmp_path / "precious", tmp_path / "out.json"
    precious.write_text("precious")
    out.symlink_to(precious)
    write_atomic(out, lambda file: file.write(b"new"))
    assert precious.read_text() == "precious"
    assert not out.is_symlink()


def test_embeddings_may_be_links(tmp_path):
    """Shards are often links to another disk: reading follows them."""
    np.save(tmp_path / "real.npy", unit(5, 4).numpy())
    (tmp_path / "gallery").mkdir()
    (tmp_path / "gallery" / "part_0.npy").symlink_to(tmp_path / "real.npy")
    assert len(gf.Gallery(tmp_path / "gallery")) == 5
    (tmp_path / "gallery" / "part_0.npy").unlink()
    (tmp_path / "gallery" / "part_0.npy").symlink_to(tmp_path / "gallery" / "part_0.npy")
    with pytest.raises(OSError, match="gallery"):
        gf.Gallery(tmp_path / "gallery")


@pytest.mark.parametrize("name", LOADERS)
def test_a_pipe_or_a_folder_under_a_files_name_is_refused_at_once(tmp_path, name):
    """Opening a pipe that nobody writes to would wait for ever."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises((ValueError, OSError)):
        LOADERS[name](tmp_path / name)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises((ValueError, OSError)):
        LOADERS[name](tmp_path / name)


def test_the_package_imports_no_pickle_of_its_own():
    """No module of the package names a function that unpickles."""
    package = Path(gf.__file__).parent
    words = (
        "pickle.load",
        "joblib",
        "dill",
        "marshal",
        "yaml.load",
        "allow_pickle=True",
        "eval(",
        "exec(",
    )
    guilty = [
        (path.name, word)
        for path in package.rglob("*.py")
        for word in words
        if word in path.read_text().replace(".eval(", "").replace("_eval(", "")
    ]
    assert not guilty
    assert all(_reads_tensors_alone(call) for path in package.rglob("*.py") for call in _torch_loads(path))


def _torch_loads(path: Path) -> list[ast.Call]:
    """Calls of torch.load, whatever follows; a function of that name taken out of torch would be found as well."""
    text = path.read_text()
    assert "from torch import load" not in text
    assert "from torch.serialization" not in text
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    assert text.count("torch.load") == len([call for call in calls if ast.unparse(call.func) == "torch.load"])
    return [call for call in calls if ast.unparse(call.func) == "torch.load"]


def _reads_tensors_alone(call: ast.Call) -> bool:
    """`weights_only=True` stands in the call itself, where no environment variable undoes it."""
    return any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in call.keywords)


def test_loading_in_a_fresh_process_leaves_pickle_alone(tmp_path, flow):
    """While a model is loaded and read, nothing is unpickled."""
    flow.save_pretrained(tmp_path)
    code = f"""
import pickle, _pickle
import geoflow_fast as gf
gf.GeoFlow.from_pretrained({str(tmp_path)!r})  # torch itself unpickles while it imports the rest of itself
def refuse(*a, **k): raise SystemExit("unpickled")
pickle.load = pickle.loads = _pickle.load = _pickle.loads = refuse
gf.GeoFlow.from_pretrained({str(tmp_path)!r})
print("loaded")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "loaded", run.stderr
