"""Shared fixtures: backends that can run here, deterministic seeds."""

from __future__ import annotations

import gc
import signal
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.cli import main
from geoflow_fast.demo.flows import concept_pairs, learn
from geoflow_fast.ops import extension
from geoflow_fast.worlds import ConceptWorld
from tests.foreign_defaults import KINDS, foreign_defaults
from tests.samples import shaken
from tests.with_torchvision import import_torchvision


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--foreign`, see tests/foreign_defaults.py."""
    parser.addoption("--foreign", choices=KINDS, help="run the library under a foreign default device or dtype")


TESTS = Path(__file__).parent
LONG = (
    "test_distributed.py",
    "gpu_emulated/cuda_emulation/test_cuda_emulation.py",
    "reliability/test_faults.py",
    "ops/test_targets.py",
    "repository/test_docs.py",
    "gpu_emulated/cuda_emulation/test_launches.py",
    "methods/test_baselines.py",
    "training/test_concept_world.py",
    "decisions/test_watch.py",
    "retrieval/test_evidence.py",
    "demo/test_demo.py",
    "likelihood/test_density.py",
    "jobs/test_calibration_job.py",
    "runtime/test_processors.py",
    "repository/test_benchmarks.py",
    "reliability/test_leaving.py",
    "methods/test_ablation.py",
    "likelihood/test_reverse_ode.py",
    "cli/test_train_calibrates.py",
)
"""Files whose few tests take long, about ten seconds or more together."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A worker of pytest-xdist gets these files first and then those with most tests, so that no worker is left with a
    long file at the end."""
    places = {TESTS / name: place for place, name in enumerate(LONG)}
    missing = [str(path) for path in places if not path.is_file()]
    assert missing == [], "a file that takes long is gone"
    if hasattr(config, "workerinput"):
        sizes = Counter(item.path for item in items)
        items.sort(key=lambda item: (places.get(item.path, len(places)), -sizes[item.path], item.path))


def pytest_collection_finish() -> None:
    """Modules and thousands of collected tests stay until the end: no later collection of garbage looks at them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Runs each test, its fixtures included, under the foreign default that was asked for."""
    kind = item.config.getoption("foreign")
    exempt = [mark.args[0] for mark in item.iter_markers("own_default")]
    with nullcontext() if kind is None or kind in exempt else foreign_defaults(kind):
        return (yield)


if (_module := extension.loaded()) is not None:
    extension.connect(_module, alone=0)  # work that is small enough for one thread goes to all of them here


@pytest.fixture(autouse=True)
def _alike() -> Iterator[None]:
    """Every test starts from the same seed and with the same threads, whatever ran before it."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def flow() -> gf.GeoFlow:
    """A small network (images 10 wide, texts 7) with random weights, so that its velocities are not zero."""
    torch.manual_seed(1)
    return shaken(gf.GeoFlow(gf.GeoFlowConfig(10, 7, hidden=32, depth=2, layer_scale=0.5)))


@pytest.fixture(scope="session")
def concept_flow(tmp_path_factory: pytest.TempPathFactory) -> gf.GeoFlow:
    """A flow of the concept world, trained for a few minutes when a slow test first asks for it."""
    pairs = concept_pairs(ConceptWorld(), seed=0)
    flow = learn(tmp_path_factory.mktemp("flow"), gf.GeoFlowConfig.tiny(), pairs, gf.TrainConfig.tiny())
    assert flow is not None
    return flow


@pytest.fixture
def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """`geoflow` in this process: (exit code, stdout, stderr)."""
    terminated = signal.getsignal(signal.SIGTERM)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["geoflow", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, *capsys.readouterr()

    yield call
    signal.signal(signal.SIGTERM, terminated)


def available_backends(op: str) -> list[str]:
    """Backends of `op` that this machine can run on CPU tensors; used to run one test body over all of them."""
    return [name for name in ("reference", "cpu") if gf.backends()[op][name] == "available"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `backend` and sits in a module with `OP` runs once per available backend of that operation."""
    op = getattr(metafunc.module, "OP", None)
    if op is not None and "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", available_backends(op))


@pytest.fixture(scope="session")
def _torchvision_operators() -> None:
    """Lets open_clip be imported, whatever torchvision was built for."""
    import_torchvision()
