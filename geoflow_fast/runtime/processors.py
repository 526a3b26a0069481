"""The processors that this process may use: how many, and how its threads wait for each other.

OpenMP's threads usually spin while they wait. If other processes want the processors too, that takes time away from the
very thread that is waited for, and work on two threads becomes slower than on one by a factor of ten.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""By these variables users say how OpenMP's threads wait. They are read once, when torch is loaded."""
ROOT = Path("/")


def threads_sleep() -> bool:
    """Whether OpenMP's threads sleep at once while they wait, as users may say by `WAIT_VARIABLES`."""
    policy, spins, blocktime = (os.environ.get(name, "").strip().lower() for name in WAIT_VARIABLES)
    return policy == "passive" or spins == "0" or blocktime == "0"


def affinity() -> int:
    """Processors on which this process may run at all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_memory() -> int:
    """Bytes of memory that the machine has."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import ctypes

    status = (ctypes.c_uint64 * 8)()  # MEMORYSTATUSEX of Windows: its size and the load, then the whole memory
    ctypes.c_uint32.from_buffer(status).value = ctypes.sizeof(status)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(status)  # type: ignore[attr-defined,unused-ignore]
    return int(status[1])


def quota(root: Path = ROOT) -> float | None:
    """Processors whose time control groups grant this process, such as 1.5; None without a limit. `root` is where the
    file systems proc and sys are looked for."""
    return min((limit for group in _groups(root) if (limit := _limit(group)) is not None), default=None)


def granted(root: Path = ROOT) -> int:
    """Threads that this process can keep busy: its processors, or fewer if control groups grant it less."""
    limit = quota(root)
    return affinity() if limit is None else max(1, min(affinity(), math.ceil(limit)))


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the control groups that this process belongs to, each followed by those above it."""
    mounts = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Version 2 has one tree; version 1 has one for each controller, or for each group of controllers.
        names = ("", "unified") if not controllers else ("cpu", controllers)
        for mount in (mounts / name for name in names if (mounts / name).is_dir()):
            group = mount / path.strip("/")
            yield from (folder for folder in (group, *group.parents) if folder == mount or mount in folder.parents)


def _limit(group: Path) -> float | None:
    """The processors that one control group grants; None without a limit."""
    words = _text(group / "cpu.max").split() or [
        _text(group / "cpu.cfs_quota_us").strip(),
        _text(group / "cpu.cfs_period_us").strip(),
    ]
    if not (words[0].isdecimal() and words[1].isdecimal()):  # "max", -1 or no such file
        return None
    return int(words[0]) / int(words[1])


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def waiting() -> str:
    """How OpenMP's threads wait for each other, in words."""
    said = [f"as {name}={os.environ[name]} says" for name in WAIT_VARIABLES if name in os.environ]
    return said[0] if said else "by spinning"


def share_processors(environment: MutableMapping[str, str], root: Path = ROOT) -> None:
    """Makes OpenMP's threads sleep while they wait and keeps their number within what control groups grant, unless the
    `environment` says otherwise. It has to be called before torch is loaded."""
    if not any(name in environment for name in WAIT_VARIABLES):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    if granted(root) < affinity():
        environment.setdefault("OMP_NUM_THREADS", str(granted(root)))


def described(root: Path = ROOT) -> str:
    """How many processors this process may use, in words, for `geoflow doctor`."""
    limit = quota(root)
    words = f"{affinity()} of {os.cpu_count()}"
    return words if limit is None else f"{words}; control groups grant the time of {limit:g}"
