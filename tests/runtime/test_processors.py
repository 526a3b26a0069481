"""Limits of control groups, contention, and how OpenMP's threads wait for each other."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import geoflow_fast
from geoflow_fast.flow.config import many_cores
from geoflow_fast.ops import native
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
    native._machine.cache_clear()
    try:
        torch.set_num_threads(3)  # conftest.py puts it back
        assert native.usable_threads() == 2
        torch.set_num_threads(1)
        assert native.usable_threads() == 1
        assert not many_cores()
    finally:
        native._machine.cache_clear()


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


@pytest.mark.parametrize(("said", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_a_command_waits_asleep_unless_told_otherwise(said, policy):
    command = [sys.executable, "-m", "geoflow_fast", "doctor", "--json"]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=clean_environment(**said)).stdout
    assert json.loads(out)["machine"]["threads"].endswith(f"as OMP_WAIT_POLICY={policy} says")


def test_contention_is_noticed_by_interruptions(monkeypatch):
    now = {"time": 0.0, "interruptions": 0, "computed": 0.0}
    monkeypatch.setattr(processors.time, "monotonic", lambda: now["time"])
    usage = lambda _: SimpleNamespace(ru_nivcsw=now["interruptions"], ru_utime=now["computed"], ru_stime=0.0)  # noqa: E731
    monkeypatch.setattr(resource, "getrusage", usage)
    contention = processors.Contention()
    now.update(time=0.9, interruptions=1000, computed=0.5)
    assert not contention.noticed()  # not yet time to look
    now.update(time=1.0)
    assert contention.noticed()
    now.update(time=2.5, interruptions=1020, computed=2.5)
    assert not contention.noticed()  # 20 in two seconds of computation
    now.update(time=4.0, interruptions=1080, computed=4.5)
    assert contention.noticed()


SPINNING = """
import time, torch
from geoflow_fast.ops import native
from geoflow_fast.ops.swiglu import swiglu
torch.set_num_threads(2)
x = torch.randn(64, 64)

def computed() -> float:
    begin = time.process_time()
    for _ in range(50):
        swiglu(x, x)
        time.sleep(0.005)  # the second thread spins for a while, or sleeps at once
    return time.process_time() - begin

native.usable_threads = lambda: 2
computed()
spinning = computed()
native.sleep_while_waiting()
print(spinning, computed())
"""


@pytest.mark.skipif(processors.affinity() < 2, reason="one processor: OpenMP never spins")
def test_threads_sleep_once_the_machine_is_busy():
    """Processor time tells, which does not depend on what else the machine does."""
    run = [sys.executable, "-c", SPINNING]
    out = subprocess.run(run, check=True, capture_output=True, text=True, env=clean_environment()).stdout
    spinning, sleeping = map(float, out.split())
    assert sleeping < 0.5 * spinning


def test_the_state_of_the_machine(machine, monkeypatch):
    root = machine(
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/cpu.stat": "usage_usec 9\nnr_throttled 1234\n",
            "proc/stat": "cpu  1 2 3 4 5 6 7 8 9 0\n",
        }
    )
    monkeypatch.setattr(processors, "affinity", lambda: 2)
    monkeypatch.setattr(processors.os, "getloadavg", lambda: (9.0, 0.0, 0.0))
    facts = processors.state(root)
    assert "control groups grant the time of 1.5, and stopped this group 1,234 times" in facts["processors"]
    assert facts["load"] == "9.0 in the last minute; busy: expect about 6 times the usual time"
    assert facts["taken by other machines"].startswith("0%")
    monkeypatch.setattr(processors.os, "getloadavg", lambda: (0.3, 0.0, 0.0))
    assert processors.state(root)["load"] == "0.3 in the last minute; free"
    assert "taken by other machines" not in processors.state(root / "nowhere")
