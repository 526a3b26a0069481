"""Runs tests against the package with one piece of its source replaced, without touching the source tree.

`Runner` forks a process for each change. It has imported torch and pytest, but nothing of the package, so that a child
begins at once and imports the package with the changed file in place of its own. A change of csrc/cpu is compiled into
an extension of its own. `Collected` is faster for changes within Python functions: it has imported the package and
collected all tests once, and a child gives the function its changed code and runs tests at once.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from tests.reliability.races import ROOT, units

BUILD = ROOT / "build" / "mutants"
PYTEST = ("-x", "-q", "-p", "no:cacheprovider", "--no-header", "-m", "not slow and not gpu")
HANGS_AFTER = 150.0
"""Seconds after which a run of tests counts as hanging. Those of one module take a small part of that."""
CAUGHT, SURVIVED, HANGS, CRASHES, REFUSED = "caught", "survived", "hangs", "crashes", "does not compile"
BROKEN_OFF = 3
"""Status of a child that could not finish its tests."""
NATIVE = "geoflow_fast._C"
KERNELS = "kernels/"


@dataclass(frozen=True)
class Change:
    """One replacement in a file of the repository: the `before` that begins at the offset `at` becomes `after`."""

    file: str
    at: int
    before: str
    after: str

    @classmethod
    def of_text(cls, file: str, before: str, after: str) -> Change:
        """The change of a piece of text that occurs once in the file."""
        source = (ROOT / file).read_text()
        if source.count(before) != 1:
            raise ValueError(f"{before!r} occurs {source.count(before)} times in {file}")
        return cls(file, source.index(before), before, after)

    @property
    def source(self) -> str:
        """The changed source of the whole file."""
        source = (ROOT / self.file).read_text()
        assert source.startswith(self.before, self.at)
        return source[: self.at] + self.after + source[self.at + len(self.before) :]

    @property
    def line(self) -> int:
        """The line on which it begins."""
        return (ROOT / self.file).read_text().count("\n", 0, self.at) + 1

    @property
    def is_native(self) -> bool:
        """Whether it must be compiled."""
        return self.file.startswith("csrc/")

    @property
    def module(self) -> str:
        """The name by which the changed file is imported."""
        if self.is_native:
            return NATIVE
        return ("geoflow_fast." * self.file.startswith(KERNELS) + self.file.removesuffix(".py")).replace("/", ".")


@dataclass(frozen=True)
class Outcome:
    """What became of a change."""

    status: str
    test: str = ""
    """The first test that failed."""
    seconds: float = 0.0

    @property
    def noticed(self) -> bool:
        """Whether anything showed that the source had changed."""
        return self.status != SURVIVED


class ChangedModule:
    """Imports one module from another file than its own."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """The module's own file, or None for all other modules."""
        return importlib.util.spec_from_file_location(fullname, self.path) if fullname == self.name else None


class FirstFailure:
    """A pytest plugin that writes down the first test that fails."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest for every phase of a test."""
        if report.failed:
            self.path.write_text(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        """Called by pytest for every file that it collects."""
        if report.failed:
            self.path.write_text(f"import of {report.nodeid}")


class Runner:
    """Runs tests with changed code, each time in a child of this process."""

    def __init__(self) -> None:
        BUILD.mkdir(parents=True, exist_ok=True)
        os.environ["OMP_NUM_THREADS"] = "1"
        for name in ("torch", "pytest", "hypothesis", "scipy.stats", "scipy.optimize", "scipy.integrate"):
            __import__(name)
        loaded = [name for name in sys.modules if name.startswith("geoflow_fast.ops")]
        assert not loaded, "the package must not be imported before a child changes it"
        self.native = NativeBuild(BUILD / "native")

    def run(self, change: Change | None, tests: Sequence[str]) -> Outcome:
        """What the tests, files or their parts, say about the change; None runs them with the source as it is."""
        begin, folder = time.monotonic(), BUILD / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        path: Path | None = None
        if change is not None and change.is_native:
            path = self.native.with_change(change, folder)
            if path is None:
                return Outcome(REFUSED, "", time.monotonic() - begin)
        elif change is not None:
            path = folder / Path(change.file).name
            path.write_text(change.source)
        child = os.fork()
        if child == 0:
            _be_child(change, path, tests, folder)
        status = _wait(child, HANGS_AFTER)
        failed = folder / "failed"
        test = failed.read_text() if failed.exists() else ""
        words = {None: HANGS, 0: SURVIVED, 1: CAUGHT, 2: CAUGHT, 3: CAUGHT}.get(status, CRASHES)
        return Outcome(words, test, round(time.monotonic() - begin, 2))


def _be_child(change: Change | None, path: Path | None, tests: Sequence[str], folder: Path) -> None:
    """Imports the package with the change, runs the tests and ends the process."""
    os.setsid()
    if any(test.startswith("tests/interpreter") for test in tests):
        os.environ["TRITON_INTERPRET"] = "1"
    out = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.dont_write_bytecode = True
    if change is not None and path is not None:
        sys.meta_path.insert(0, ChangedModule(change.module, path))  # type: ignore[arg-type]
    import hypothesis
    import pytest

    hypothesis.settings.register_profile("changed", database=None, derandomize=True, deadline=None)
    hypothesis.settings.load_profile("changed")
    os.chdir(ROOT)
    code = 3
    try:
        code = int(pytest.main([*PYTEST, *tests], plugins=[FirstFailure(folder / "failed")]))
    finally:
        os._exit(code)


def _wait(child: int, seconds: float) -> int | None:
    """The exit status of a child, minus the signal that ended it, or None if it hangs, in which case it is killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@dataclass(frozen=True)
class Job:
    """A change within a function of Python, by its qualified name; the files of tests to run, and those tests of them
    that come last."""

    name: str
    change: Change
    function: str
    files: tuple[str, ...]
    last: tuple[str, ...] = ()


class Collected:
    """A pytest plugin that runs the tests of every job in a child of its own, after all tests have been collected.

    `tell(job, outcome)` is called after each. A test that fails must pass with the source as it is, in a child too.
    """

    def __init__(self, jobs: Sequence[Job], tell: Callable[[Job, Outcome], None]) -> None:
        self.jobs, self.tell = jobs, tell
        self.sound: set[str] = set()

    def run(self) -> None:
        """Collects the tests of all jobs, then runs one job after the other."""
        import pytest

        os.environ["OMP_NUM_THREADS"] = "1"
        os.chdir(ROOT)
        (BUILD / "run").mkdir(parents=True, exist_ok=True)
        files = sorted({file for job in self.jobs for file in job.files})
        if int(pytest.main([*PYTEST, *files], plugins=[self, FirstFailure(BUILD / "run" / "failed")])) != 0:
            raise SystemExit("the tests could not be collected")

    def pytest_runtestloop(self, session: Any) -> bool:
        """Called by pytest when it would run the tests."""
        for job in self.jobs:
            chosen = [item for item in session.items if item.nodeid.startswith(job.files)]
            chosen.sort(key=lambda item: bool(job.last) and item.nodeid.startswith(job.last))
            outcome = self._in_child(session, chosen, job)
            if outcome.test and outcome.test not in self.sound:
                failed = [item for item in session.items if item.nodeid == outcome.test]
                if self._in_child(session, failed, None).noticed:
                    raise SystemExit(f"{outcome.test} does not pass as it is")
                self.sound.add(outcome.test)
            self.tell(job, outcome)
        return True

    def _in_child(self, session: Any, items: list[Any], job: Job | None) -> Outcome:
        begin, failed = time.monotonic(), BUILD / "run" / "failed"
        failed.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            self._be_child(session, items, job)
        status = _wait(child, HANGS_AFTER)
        words = {None: HANGS, 0: SURVIVED, 1: CAUGHT}.get(status, CRASHES)
        test = failed.read_text() if failed.exists() else ""
        return Outcome(words, test, round(time.monotonic() - begin, 2))

    def _be_child(self, session: Any, items: list[Any], job: Job | None) -> None:
        code = BROKEN_OFF
        try:
            os.setsid()
            out = os.open(BUILD / "run" / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(out, stream)
            from _pytest.main import pytest_runtestloop as run_tests

            if job is not None:
                give_changed_code(job.change, job.function)
            assert items, "there are no tests"
            session.items[:] = items
            with contextlib.suppress(session.Failed, session.Interrupted):
                run_tests(session)
            code = 1 if session.testsfailed else 0
        finally:
            if code == BROKEN_OFF:
                traceback.print_exc()  # the process ends here, before Python would print it
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def give_changed_code(change: Change, function: str) -> None:
    """Gives the functions of this qualified name that hold the changed line their changed code."""

    def codes(code: CodeType) -> Iterator[CodeType]:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from codes(constant)

    def holds(code: CodeType) -> bool:
        lines = [line for _, _, line in code.co_lines() if line is not None]
        return code.co_qualname == function and code.co_firstlineno <= change.line <= max(lines, default=0) + 1

    path = str(ROOT / change.file)
    new = [code for code in codes(compile(change.source, path, "exec")) if holds(code)]
    old = [
        each
        for each in gc.get_objects()
        if isinstance(each, FunctionType) and each.__code__.co_filename == path and holds(each.__code__)
    ]
    assert len(new) == 1, f"{function} of {change.file} is there {len(new)} times"
    assert old, f"{function} of {change.file} was not imported"
    for each in old:
        each.__code__ = new[0]


class NativeBuild:
    """The extension without CUDA, whose objects are kept, so that a change costs the objects that it reaches."""

    FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
    COMMON = ("baseline", "avx2", "avx512")
    """Targets that have the same sources, of which a change is compiled for one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def with_change(self, change: Change, folder: Path) -> Path | None:
        """The extension with the change; None if it does not compile. Of the common targets only that which this
        processor runs is compiled."""
        self._complete()
        source, chosen = folder / "csrc", self._target()
        shutil.copytree(ROOT / "csrc", source)
        (folder / change.file).write_text(change.source)
        objects = {name: self.folder / f"{name}.o" for name, _, _ in self._units()}
        for name, path, flags in self._units():
            target = next((flag.partition("=")[2] for flag in flags if flag.startswith("-DGEOFLOW_TARGET=")), "")
            if change.file not in self._reads(name) or (target in self.COMMON and target != chosen):
                continue
            objects[name] = folder / f"{name}.o"
            if not self._compile(source, source / path.relative_to(ROOT / "csrc"), flags, objects[name]):
                return None
        return self._link(objects.values(), folder)

    def _units(self) -> list[tuple[str, Path, list[str]]]:
        words = '-DGEOFLOW_WITHOUT_CUDA="it was built for a test"'
        import pybind11

        python = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}", words]
        return [*units(), ("bindings", ROOT / "csrc" / "bindings.cpp", python)]

    def _target(self) -> str:
        """The newest of the common targets that this processor has."""
        known = set(Path("/proc/cpuinfo").read_text().split())
        if {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= known:
            return "avx512"
        return "avx2" if {"avx2", "fma", "f16c"} <= known else "baseline"

    def _reads(self, name: str) -> set[str]:
        """The files of the repository that a unit is made of."""
        table: dict[str, list[str]] = json.loads((self.folder / "reads.json").read_text())
        return set(table[name])

    def _complete(self) -> None:
        """Compiles the objects of the source as it is, unless they are there."""
        state = {
            path.relative_to(ROOT).as_posix(): path.read_text()
            for path in sorted((ROOT / "csrc").rglob("*"))
            if path.suffix in {".h", ".cpp", ".json"}
        }
        stamp = self.folder / "state.json"
        if stamp.exists() and json.loads(stamp.read_text()) == state:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        reads = {}
        for name, path, flags in self._units():
            command = ["g++", *self.FLAGS, f"-I{ROOT / 'csrc'}", *flags, "-MM", str(path)]
            listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.replace("\\\n", " ")
            files = {Path(word).resolve() for word in listed.split(":", 1)[1].split()}
            reads[name] = sorted(f.relative_to(ROOT).as_posix() for f in files if f.is_relative_to(ROOT / "csrc"))
            if not self._compile(ROOT / "csrc", path, flags, self.folder / f"{name}.o"):
                raise RuntimeError(f"{path} does not compile")
        (self.folder / "reads.json").write_text(json.dumps(reads))
        stamp.write_text(json.dumps(state))

    def _compile(self, include: Path, source: Path, flags: Sequence[str], made: Path) -> bool:
        command = ["g++", *self.FLAGS, "-Wno-psabi", f"-I{include}", *flags, "-c", str(source), "-o", str(made)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def _link(self, objects: Any, folder: Path) -> Path | None:
        made = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        command = ["g++", "-shared", "-fopenmp", *map(str, objects), "-o", str(made)]
        return made if subprocess.run(command, capture_output=True).returncode == 0 else None
