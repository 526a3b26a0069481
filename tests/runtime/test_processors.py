"""Limits of control groups, and how OpenMP's threads wait for each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import geoflow_fast
from geoflow_fast.flow.config import many_cores
from geoflow_fast.ops import extension
from geoflow_fast.runtime import processors


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment of this process without what the user or a runner said about OpenMP."""
    unsaid = (*processors.WAIT_VARIABLES, "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    own = {name: value for name, value in os.environ.items() if name not in unsaid}
    return {**own, "PYTHONPATH": str(Path(geoflow_fast.__file__).parents[1]), **variables}


@pytest.fixture
def machine(tmp_path):
    """Writes files of the file systems proc and sys below the folder that is returned."""

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


V1 = "4:memory:/\n2:cpu,cpuacct:/docker/one\n0::/\n"
LIMITS = {
    "none": ({}, None),
    "version 2, unlimited": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
    "version 2": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
    "version 2, a group above": (
        {
            "proc/self/cgroup": "0::/slice/job\n",
            "sys/fs/cgroup/slice/cpu.max": "50000 100000\n",
            "sys/fs/cgroup/slice/job/cpu.max": "400000 100000\n",
        },
        0.5,
    ),
    "version 1": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu,cpuacct/docker/one/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/one/cpu.cfs_period_us": "100000\n",
        },
        3.0,
    ),
    "version 1, unlimited": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
    "version 1, as a container sees it": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "20000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        0.2,
    ),
}


@pytest.mark.parametrize(("files", "limit"), LIMITS.values(), ids=LIMITS)
def test_control_groups_limit_the_threads(machine, monkeypatch, files, limit):
    root = machine(files)
    monkeypatch.setattr(processors, "affinity", lambda: 8)
    assert processors.quota(root) == limit
    assert processors.granted(root) == {None: 8, 1.5: 2, 0.5: 1, 3.0: 3, 0.2: 1}[limit]


def test_kernels_and_presets_respect_the_limit(monkeypatch):
    monkeypatch.setattr(processors, "quota", lambda *_: 1.5)
    monkeypatch.setattr(processors, "affinity", lambda: 64)
    extension._most_threads.cache_clear()
    try:
        torch.set_num_threads(3)  # conftest.py puts it back
        assert extension.usable_threads() == 2
        torch.set_num_threads(1)
        assert extension.usable_threads() == 1
        assert not many_cores()
    finally:
        extension._most_threads.cache_clear()


def test_the_environment_of_a_command(machine, monkeypatch):
    monkeypatch.setattr(processors, "affinity", lambda: 8)
    limited = machine({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"})
    for said, expected in (
        ({}, {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "2"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7", "OMP_NUM_THREADS": "2"}),
        ({"KMP_BLOCKTIME": "9", "OMP_NUM_THREADS": "5"}, {"KMP_BLOCKTIME": "9", "OMP_NUM_THREADS": "5"}),
    ):
        environment = dict(said)
        processors.share_processors(environment, limited)
        assert environment == expected
    environment = {}
    processors.share_processors(environment, limited / "nowhere")
    assert environment == {"OMP_WAIT_POLICY": "PASSIVE"}


COMMAND = """
import os, sys

class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            sys.meta_path.remove(self)
            print(os.environ.get("OMP_WAIT_POLICY"), os.environ.get("GOMP_SPINCOUNT"), file=sys.stderr)

sys.meta_path.insert(0, Watch())
sys.argv = ["geoflow", "doctor", "--json"]
from geoflow_fast.cli import main
main()
"""


@pytest.mark.parametrize(
    ("said", "seen", "reported"),
    [
        ({}, "PASSIVE None", "OMP_WAIT_POLICY=PASSIVE"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE None", "OMP_WAIT_POLICY=ACTIVE"),
        ({"GOMP_SPINCOUNT": "7"}, "None 7", "GOMP_SPINCOUNT=7"),
    ],
)
def test_a_command_says_how_threads_wait_before_torch_is_loaded(said, seen, reported):
    run = subprocess.run(
        [sys.executable, "-c", COMMAND], check=True, capture_output=True, text=True, env=clean_environment(**said)
    )
    assert run.stderr.splitlines()[0] == seen
    assert json.loads(run.stdout)["machine"]["threads"].endswith(f"as {reported} says")


LIBRARY = """
import os
before = dict(os.environ)
import geoflow_fast as gf
import geoflow_fast.cli
gf.ops.swiglu  # loads torch and the extension
print({name: value for name, value in os.environ.items() if before.get(name) != value and "OMP" in name})
"""


def test_the_library_leaves_the_environment_as_it_is():
    run = [sys.executable, "-c", LIBRARY]
    out = subprocess.run(run, check=True, capture_output=True, text=True, env=clean_environment()).stdout
    assert out.strip() == "{}"


COMPUTING = """
import time, torch
from geoflow_fast.ops import extension
from geoflow_fast.ops.swiglu import swiglu
torch.set_num_threads(2)
extension.usable_threads = lambda: 2
x = torch.randn(1024, 1024)  # worth a second thread, asleep or not

def computed() -> float:
    begin = time.process_time()
    for _ in range(50):
        swiglu(x, x)
        time.sleep(0.005)  # the second thread spins for a while, or sleeps at once
    return time.process_time() - begin

computed()
print(computed())
"""


@pytest.mark.skipif(processors.affinity() < 2, reason="one processor: OpenMP never spins")
def test_threads_of_a_command_sleep_while_they_wait():
    """Processor time tells, which does not depend on what else the machine does."""
    command = clean_environment()
    processors.share_processors(command)
    command.pop("OMP_NUM_THREADS", None)
    run = [sys.executable, "-c", COMPUTING]
    used = [
        float(subprocess.run(run, check=True, capture_output=True, text=True, env=environment).stdout)
        for environment in (clean_environment(), command)
    ]
    assert used[1] < 0.5 * used[0]


def test_the_processors_in_words(machine, monkeypatch):
    root = machine({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"})
    monkeypatch.setattr(processors, "affinity", lambda: 2)
    monkeypatch.setattr(processors.os, "cpu_count", lambda: 4)
    assert processors.described(root) == "2 of 4; control groups grant the time of 1.5"
    assert processors.described(root / "nowhere") == "2 of 4"
