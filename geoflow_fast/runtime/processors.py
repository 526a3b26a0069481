"""The processors that this process may use: how many, how busy they are, and how its threads wait for each other.

OpenMP's threads usually spin while they wait. If other processes want the processors too, that takes time away from the
very thread that is waited for, and work on two threads becomes slower than on one by a factor of ten.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path

WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""By these variables users say how OpenMP's threads wait. They are read once, when torch is loaded."""
INTERRUPTIONS = 25.0
"""On a busy machine a thread is interrupted at least so often per second that it computes; otherwise a few times."""
GLANCE_SECONDS = 0.2
ROOT = Path("/")


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


def throttled(root: Path = ROOT) -> int:
    """How often control groups have stopped this process because it had used up its time."""
    counts = [_number_after(_text(group / "cpu.stat"), "nr_throttled") for group in _groups(root)]
    return max(counts, default=0)


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


def _number_after(text: str, word: str) -> int:
    words = text.split()
    return int(words[words.index(word) + 1]) if word in words else 0


def wait_policy() -> str | None:
    """How the user has said that threads wait, such as "OMP_WAIT_POLICY=ACTIVE"; None if nothing was said."""
    return next((f"{name}={os.environ[name]}" for name in WAIT_VARIABLES if name in os.environ), None)


def waiting() -> str:
    """How OpenMP's threads wait for each other, in words."""
    policy = wait_policy()
    return "by spinning, or on a busy machine asleep" if policy is None else f"as {policy} says"


def share_processors(environment: MutableMapping[str, str], root: Path = ROOT) -> None:
    """Makes OpenMP's threads sleep while they wait and keeps their number within what control groups grant, unless the
    `environment` says otherwise. It has to be called before torch is loaded."""
    if not any(name in environment for name in WAIT_VARIABLES):
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    if granted(root) < affinity():
        environment.setdefault("OMP_NUM_THREADS", str(granted(root)))


class Contention:
    """Notices that other processes want the processors too: the system then interrupts this one again and again."""

    def __init__(self) -> None:
        self.seen_at, self.count, self.seconds = self._now()

    def noticed(self) -> bool:
        """Looks at what has happened since the last look, once per second at most: false until then."""
        if time.monotonic() - self.seen_at < 1:
            return False
        count, seconds = self.count, self.seconds
        self.seen_at, self.count, self.seconds = self._now()
        return self.count - count > INTERRUPTIONS * max(self.seconds - seconds, GLANCE_SECONDS)

    @staticmethod
    def _now() -> tuple[float, int, float]:
        """The time, and the interruptions and seconds of computation of this process so far."""
        import resource  # which Windows does not have, nor GNU's OpenMP there, for which alone this is asked

        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.monotonic(), used.ru_nivcsw, used.ru_utime + used.ru_stime


def load() -> float:
    """How many processes wanted to compute in the last minute, on average; 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def is_busy(root: Path = ROOT) -> bool:
    """Whether more wanted to compute in the last minute than this process's processors can serve."""
    return load() > granted(root)


def state(root: Path = ROOT) -> dict[str, str]:
    """What limits this process's use of the processors, in words, for `geoflow doctor`."""
    limit, count = quota(root), affinity()
    words = f"{count} of {os.cpu_count()}"
    if limit is not None:
        words += f"; control groups grant the time of {limit:g}, and stopped this group {throttled(root):,} times"
    busy = f"busy: expect about {load() / granted(root) + 1:.0f} times the usual time" if is_busy(root) else "free"
    facts = {"processors": words, "load": f"{load():.1f} in the last minute; {busy}"}
    stolen = _stolen(root)
    if stolen is not None:
        facts["taken by other machines"] = f"{stolen:.0%} of the processors' time (steal)"
    return facts


def _stolen(root: Path) -> float | None:
    """Share of the processors' time that the host of this virtual machine gives to others; None where unknown."""
    before = _text(root / "proc/stat").split()[1:9]
    if len(before) < 8:
        return None
    time.sleep(GLANCE_SECONDS)
    after = _text(root / "proc/stat").split()[1:9]
    passed = [int(b) - int(a) for a, b in zip(before, after)]
    return passed[7] / max(1, sum(passed))
