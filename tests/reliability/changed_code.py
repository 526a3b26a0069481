"""Runs tests against the package with one piece of its source replaced, without touching the source tree.

`Runner` forks a process for each change. It has imported torch and pytest, but nothing of the package, so that a child
begins at once and imports the package with the changed file in place of its own. A change of csrc/cpu is compiled into
an extension of its own. `Collected` is faster for changes within Python functions: it has imported the package and
collected all tests once, and a child gives the function its changed code and runs tests at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
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
LEAST_WAIT, PATIENCE = 60.0, 5.0
"""A run of tests hangs that takes a minute more than this many times as long as with the source as it is."""
LONGEST_RUN = 900.0
"""Seconds after which tests hang of which it is not known how long they take."""
CAUGHT, SURVIVED, HANGS, CRASHES, REFUSED = "caught", "survived", "hangs", "crashes", "does not compile"
BROKEN_OFF = 3
"""Status of a child that could not finish its tests."""
LINES_SHOWN = 30
"""Of the output of a child that broke off."""
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
        return self.status in (CAUGHT, HANGS, CRASHES)

    @property
    def patience(self) -> float:
        """How many seconds a change is given for the tests that took so long without one."""
        return LEAST_WAIT + PATIENCE * self.seconds


class BrokenOffError(Exception):
    """A run of tests that tells nothing about a change: it came to no test, or its tests fail without the change."""


def judged(status: int | None, test: str, seconds: float, output: Path) -> Outcome:
    """What the exit status of a child (None if it hung) and the first test that failed in it say about a change.

    Raises a BrokenOffError with the last of its output if the child ended without having run its tests, as pytest does
    that finds none (5) or does not understand its arguments (4).
    """
    ended_by_code = status is not None and (status < 0 or (status == 1 and not test))
    if ended_by_code:
        return Outcome(CRASHES, "", seconds)
    known: dict[int | None, str] = {None: HANGS, 0: SURVIVED, 1: CAUGHT}
    if test:
        known[2] = CAUGHT  # a file could not be imported
    if status not in known:
        last = "\n".join(output.read_text().splitlines()[-LINES_SHOWN:]) if output.exists() else ""
        raise BrokenOffError(f"the tests ended with status {status}:\n{last}")
    return Outcome(known[status], test, seconds)


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
    """Runs tests with changed code, each time in a child of this process, whose files are in `folder`."""

    def __init__(self, folder: Path = BUILD / "run") -> None:
        BUILD.mkdir(parents=True, exist_ok=True)
        os.environ["OMP_NUM_THREADS"] = "1"
        for name in ("torch", "pytest", "hypothesis", "scipy.stats", "scipy.optimize", "scipy.integrate"):
            __import__(name)
        loaded = [name for name in sys.modules if name.startswith("geoflow_fast.ops")]
        assert not loaded, "the package must not be imported before a child changes it"
        self.folder, self.native = folder, NativeBuild(BUILD / "native")
        self._plain: dict[tuple[bool, tuple[str, ...]], Outcome] = {}

    def run(self, change: Change | None, tests: Sequence[str], patience: float = LONGEST_RUN) -> Outcome:
        """What the tests, files or their parts, say about the change; None runs them with the source as it is."""
        begin, folder = time.monotonic(), self.folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path: Path | None = None
        if change is not None and change.is_native:
            path = self.native.with_change(change, folder)
            if path is None:
                return Outcome(REFUSED, "", time.monotonic() - begin)
        elif change is not None:
            path = folder / Path(change.file).name
            path.write_text(change.source)
        begin_tests = time.monotonic()
        child = os.fork()
        if child == 0:
            _be_child(change, path, tests, folder)
        status = _wait(child, patience)
        failed = folder / "failed"
        test = failed.read_text() if failed.exists() else ""
        return judged(status, test, round(time.monotonic() - begin_tests, 2), folder / "output.txt")

    def compared(self, change: Change, tests: Sequence[str]) -> Outcome:
        """What the tests say about the change. Before their first change they must pass with the source as it is, of
        which compiled code is built in the same way."""
        key = change.is_native, tuple(tests)
        if key not in self._plain:
            self._plain[key] = self.run(Change(change.file, 0, "", ""), tests)
        plain = self._plain[key]
        if plain.status != SURVIVED:
            raise BrokenOffError(f"without any change: {plain.status} {plain.test}")
        return self.run(change, tests, plain.patience)


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
    code = BROKEN_OFF
    try:
        code = int(pytest.main([*PYTEST, *tests], plugins=[FirstFailure(folder / "failed")]))
    finally:
        os._exit(code)


def _wait(child: int, seconds: float) -> int | None:
    """The exit status of a child, minus the signal that ended it, or None if it hangs, in which case it is killed."""
    waited, now = 0.0, time.monotonic()
    while waited < seconds:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
        before, now = now, time.monotonic()
        waited += min(now - before, 1.0)  # while everything was stopped, the child did not hang
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

    `tell(job, outcome)` is called after each. The tests run once with the source as it is, in a child too, before the
    first job that has them. The files of the children are in `folder`.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        tell: Callable[[Job, Outcome | BrokenOffError], None],
        folder: Path = BUILD / "run",
    ) -> None:
        self.jobs, self.tell, self.folder = jobs, tell, folder
        self._plain: dict[str, Outcome] = {}

    def run(self) -> None:
        """Collects the tests of all jobs, then runs one job after the other."""
        import pytest

        os.environ["OMP_NUM_THREADS"] = "1"
        os.chdir(ROOT)
        self.folder.mkdir(parents=True, exist_ok=True)
        files = sorted({file for job in self.jobs for file in job.files})
        if int(pytest.main([*PYTEST, "-s", *files], plugins=[self, FirstFailure(self.folder / "failed")])) != 0:
            raise SystemExit("the tests could not be collected")

    def pytest_runtestloop(self, session: Any) -> bool:
        """Called by pytest when it would run the tests."""
        for job in self.jobs:
            try:
                outcome: Outcome | BrokenOffError = self._compared(session, job)
            except BrokenOffError as error:
                outcome = error
            self.tell(job, outcome)
        return True

    def _compared(self, session: Any, job: Job) -> Outcome:
        plain = [self._as_it_is(session, file) for file in job.files]
        if failing := [each for each in plain if each.status != SURVIVED]:
            raise BrokenOffError(f"without any change: {failing[0].status} {failing[0].test}")
        chosen = [item for item in session.items if item.nodeid.startswith(job.files)]
        chosen.sort(key=lambda item: bool(job.last) and item.nodeid.startswith(job.last))
        patience = Outcome(SURVIVED, "", sum(each.seconds for each in plain)).patience
        return self._in_child(session, chosen, job, patience)

    def _as_it_is(self, session: Any, file: str) -> Outcome:
        """What became of the tests of a file, or of a part of it, with the source as it is."""
        if file not in self._plain:
            items = [item for item in session.items if item.nodeid.startswith(file)]
            self._plain[file] = self._in_child(session, items, None, LONGEST_RUN)
        return self._plain[file]

    def _in_child(self, session: Any, items: list[Any], job: Job | None, patience: float) -> Outcome:
        begin, failed = time.monotonic(), self.folder / "failed"
        failed.unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            self._be_child(session, items, job)
        status = _wait(child, patience)
        test = failed.read_text() if failed.exists() else ""
        return judged(status, test, round(time.monotonic() - begin, 2), self.folder / "output.txt")

    def _be_child(self, session: Any, items: list[Any], job: Job | None) -> None:
        code = BROKEN_OFF
        try:
            os.setsid()
            out = os.open(self.folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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
    """Gives the functions of this qualified name that hold the changed line their changed code, and those within them
    that have been made already, as by a decorator."""

    def codes(code: CodeType) -> Iterator[CodeType]:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from codes(constant)

    def holds(code: CodeType) -> bool:
        lines = [line for _, _, line in code.co_lines() if line is not None]
        return code.co_firstlineno <= change.line <= max(lines, default=0) + 1

    importlib.import_module(change.module)
    path = str(ROOT / change.file)
    holding = [code for code in codes(compile(change.source, path, "exec")) if holds(code)]
    new = [code for code in holding if code.co_qualname == function]
    made = [
        each
        for each in gc.get_objects()
        if type(each) is FunctionType and each.__code__.co_filename == path and holds(each.__code__)
    ]
    old = [each for each in made if each.__code__.co_qualname == function]
    assert len(new) == 1, f"{function} of {change.file} is there {len(new)} times"
    assert old, f"{function} of {change.file} was not imported"
    for each in old:
        each.__code__ = new[0]
    for each in made:
        code = each.__code__
        if code.co_qualname.startswith(f"{function}.<locals>."):
            alike = [x for x in holding if (x.co_qualname, x.co_freevars) == (code.co_qualname, code.co_freevars)]
            if len(alike) == 1:  # of two lambdas on a line nobody knows which is which
                each.__code__ = alike[0]


class NativeBuild:
    """The extension without CUDA, whose objects are kept, so that a change costs the objects that it reaches."""

    FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
    COMMON = ("baseline", "avx2", "avx512")
    """Targets that have the same sources, of which a change is compiled for one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def with_change(self, change: Change, folder: Path) -> Path | None:
        """The extension with the change; None if it does not compile. Of the common targets only that which this
        processor runs is compiled. A change of nothing needs no compiler."""
        with self.folder.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another part of a run may be compiling the same objects
            self._complete()
        source, chosen = folder / "csrc", self._target()
        shutil.copytree(ROOT / "csrc", source)
        (folder / change.file).write_text(change.source)
        objects = {name: self.folder / f"{name}.o" for name, _, _ in self._units()}
        for name, path, flags in self._units():
            target = next((flag.partition("=")[2] for flag in flags if flag.startswith("-DGEOFLOW_TARGET=")), "")
            is_same = change.before == change.after or change.file not in self._reads(name)
            if is_same or (target in self.COMMON and target != chosen):
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
