"""Is commit B slower than commit A? `python -m benchmarks.compare A B [--threshold 0.1] [--only Coupling]`.

Both commits are checked out into temporary worktrees and their extensions are built there. Two processes, one for each
commit, time this library's contenders of the quick cases in turns A, B, B, A, ...; only their ratios count. Each
process takes the benchmarks of its own commit. A row is a case and a contender; one that a commit lacks must be in
`REMOVED`.
The exit status is 1 if a call became slower by more than the threshold and by more than the variation between turns
explains, or if the geometric mean of all ratios is above `--mean`; it is 2 if nothing can be said because a row is
missing, or a build or a gate fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from benchmarks.cases import OURS, all_cases
from benchmarks.limits import seconds_of
from benchmarks.methods.results import markdown

ROOT = Path(__file__).parents[1]
NATIVE = ("csrc", "setup.py")
REMOVED: dict[str, str] = {
    "Coupling, B = 1024, d = 256: geoflow_fast, structured noise": "structured noise is deleted",
    "Coupling, B = 1024, d = 256: geoflow_fast, float16 storage": "CPUs keep the cost matrix in float32",
    "Interpolant, B = 2048, d = 512: geoflow_fast, `out=` given": "results are new tensors",
    "Coupling by squared chords, B = 512, d = 256: geoflow_fast, drawn": "plans of given costs are not drawn from",
    "Coupling by squared chords, B = 512, d = 256: geoflow_fast": "no longer computed from points",
}
"""Rows that one of the compared commits lacks, and why."""
TURN = 0.1
"""Least seconds of a turn: shorter calls are repeated."""
WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from benchmarks import compare
compare.serve(sys.argv[2:])
"""


@dataclass(frozen=True)
class Ratio:
    """Seconds of B over seconds of A in paired turns."""

    name: str
    seconds: float
    """Of A, the median."""
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, name: str, a: Sequence[float], b: Sequence[float]) -> Ratio:
        """Median of the turns' ratios with its 95 % interval, by resampling turns."""
        ratios = np.array(b) / np.array(a)
        drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
        low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
        return cls(name, statistics.median(a), float(np.median(ratios)), float(low), float(high))

    def slower(self, threshold: float) -> bool:
        """Whether even the lower end of the interval is beyond the threshold."""
        return self.low > 1 + threshold

    def faster(self, threshold: float) -> bool:
        """The same the other way round."""
        return self.high < 1 / (1 + threshold)

    def row(self, threshold: float) -> dict[str, str]:
        """A line of the table."""
        verdict = "slower" if self.slower(threshold) else "faster" if self.faster(threshold) else ""
        return {
            "call": self.name,
            "A, ms": f"{1e3 * self.seconds:.3g}",
            "B / A": f"{self.value:.3f}",
            "95 %": f"{self.low:.3f} to {self.high:.3f}",
            "": verdict,
        }


def turns(count: int) -> Iterator[tuple[str, str]]:
    """The order within each turn: A B, B A, A B, ... so that neither always comes first."""
    for number in range(count):
        yield ("A", "B") if number % 2 == 0 else ("B", "A")


class Worker:
    """A process that has the package of one commit and times what it is asked to."""

    def __init__(self, tree: Path, sizes: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
        # One that waits must not keep a core busy.
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", **(environment or {})}
        command = [sys.executable, "-c", WORKER, str(tree), *sizes]
        self.process = subprocess.Popen(
            command, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, *words: Any) -> Any:
        """Sends a request and waits for its answer. RuntimeError if the process is gone."""
        pipe, answers = _pipes(self.process)
        try:
            pipe.write(json.dumps(words) + "\n")
            pipe.flush()
        except BrokenPipeError:
            raise RuntimeError(f"a worker ended with status {self.process.wait()}; its words are above") from None
        line = answers.readline()
        if not line:
            raise RuntimeError(f"a worker ended with status {self.process.wait()}; its words are above")
        return json.loads(line)

    def close(self) -> None:
        pipe, _ = _pipes(self.process)
        pipe.close()
        self.process.wait()


def _pipes(process: subprocess.Popen[str]) -> tuple[TextIO, TextIO]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


class Server:
    """The worker's side: one case at a time."""

    def __init__(self, sizes: Sequence[str]) -> None:
        self.cases = all_cases(quick="full" not in sizes)
        self.data: Any = None

    def list(self) -> list[list[Any]]:
        """Names of cases and of the calls to compare."""
        return [[case.name, [c.name for c in case.contenders if c.kind == OURS]] for case in self.cases]

    def load(self, number: int) -> None:
        """Makes the input of a case."""
        self.data = None  # of the last case, before the next is made
        self.case = self.cases[number]
        self.data = self.case.make()
        self.truth = self.case.truth(self.data)

    def time(self, name: str, repeats: int) -> float:
        """Seconds of one of `repeats` calls."""
        call = self.case.contender(name)

        def turn() -> None:
            for _ in range(repeats):  # results are dropped as they come: kept, they would all need fresh memory
                call.run(self.data)

        return seconds_of(turn) / repeats

    def check(self, name: str) -> float:
        """Gate, then the seconds of a call."""
        call = self.case.contender(name)
        assert self.case.right(call, call.run(self.data), self.truth), f"{self.case.name}: {name} gives a wrong answer"
        return self.time(name, 1)


def serve(sizes: Sequence[str]) -> None:
    """Reads requests from standard input and writes answers to standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not come between
    server = Server(sizes)
    for line in sys.stdin:
        what, *rest = json.loads(line)
        answers.write(json.dumps(getattr(server, what)(*rest)) + "\n")
        answers.flush()


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """A checkout of the commit, taken away afterwards."""
    _git("worktree", "add", "--detach", "--quiet", str(folder), commit)
    try:
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def build(tree: Path) -> None:
    """Compiles the extension inside the worktree, and nowhere else."""
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the extension of {tree.name} does not build:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def prepare(a: str, b: str, trees: tuple[Path, Path]) -> None:
    """Builds both extensions, once if their sources are the same."""
    build(trees[0])
    if _git("diff", "--name-only", a, b, "--", *NATIVE):
        build(trees[1])
        return
    for library in (trees[0] / "geoflow_fast").glob("_C*"):
        shutil.copy(library, trees[1] / "geoflow_fast")


def rows_of(listed: Sequence[tuple[str, Sequence[str]]]) -> dict[str, tuple[int, str]]:
    """By row: the number of its case, and its call."""
    return {f"{case}: {call}": (number, call) for number, (case, calls) in enumerate(listed) for call in calls}


def common_rows(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """The rows of both commits. RuntimeError if another one is not listed as removed."""
    missing = sorted((set(a) ^ set(b)) - set(REMOVED))
    if missing:
        lines = "\n".join(f"  {row} (not in {'B' if row in a else 'A'})" for row in missing)
        raise RuntimeError(f"rows that one commit lacks must be listed in benchmarks/compare.py:\n{lines}")
    return [row for row in a if row in b]


def compare(workers: dict[str, Worker], rounds: int, only: Sequence[str]) -> Iterator[Ratio]:
    """Yields the ratio of every row, as it is measured."""
    rows = {side: rows_of(worker.ask("list")) for side, worker in workers.items()}
    loaded = None
    for row in common_rows(list(rows["A"]), list(rows["B"])):
        if only and not any(word in row for word in only):
            continue
        call = rows["A"][row][1]
        if rows["A"][row][0] != loaded:
            loaded = rows["A"][row][0]
            for side, worker in workers.items():
                worker.ask("load", rows[side][row][0])
        once = max(worker.ask("check", call) for worker in workers.values())
        repeats = max(1, round(TURN / once))
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for order in turns(rounds):
            for name in order:
                seconds[name].append(workers[name].ask("time", call, repeats))
        yield Ratio.of(row, seconds["A"], seconds["B"])


def arguments_of(words: Sequence[str]) -> argparse.Namespace:
    """Checked arguments; argparse ends with status 2 on bad ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("a", metavar="A", help="commit, branch or tag to compare with")
    parser.add_argument("b", metavar="B", nargs="?", default="HEAD", help="the newer one; HEAD if not given")
    parser.add_argument("--threshold", type=float, default=0.1, help="slower by more than this share fails")
    parser.add_argument("--mean", type=float, default=1.03, help="largest geometric mean of all ratios that passes")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each call")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="rows with one of these words alone")
    parser.add_argument("--json", action="store_true", help="ratios as JSON instead of a table")
    given = parser.parse_args(words)
    if not given.threshold > 0:
        parser.error(f"--threshold must be above 0, got {given.threshold}")
    if given.rounds < 3:
        parser.error(f"--rounds must be at least 3, got {given.rounds}: fewer have no spread")
    return given


def main(words: Sequence[str]) -> int:
    """Exit status: 0 nothing slower, 1 something slower, 2 it could not be told."""
    given = arguments_of(words)
    try:
        commits = [_git("rev-parse", "--verify", f"{name}^{{commit}}") for name in (given.a, given.b)]
        with ExitStack() as stack:
            base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="geoflow-compare-")))
            trees = tuple(stack.enter_context(worktree(c, base / side)) for side, c in zip("AB", commits))
            prepare(*commits, (trees[0], trees[1]))
            workers = {}
            for side, tree in zip("AB", trees):
                workers[side] = Worker(tree)
                stack.callback(workers[side].close)
            ratios = []
            for ratio in compare(workers, given.rounds, given.only):
                print(f"{ratio.value:.3f}  {ratio.name}", file=sys.stderr, flush=True)
                ratios.append(ratio)
        if not ratios:
            raise RuntimeError(f"no row has one of the words {', '.join(given.only)}")
    except RuntimeError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return verdict(ratios, given.threshold, given.mean, as_json=given.json)


def verdict(ratios: Sequence[Ratio], threshold: float, largest_mean: float = math.inf, *, as_json: bool = False) -> int:
    """Prints all ratios and returns the exit status."""
    slower = [ratio.name for ratio in ratios if ratio.slower(threshold)]
    mean = statistics.geometric_mean(ratio.value for ratio in ratios)
    if as_json:
        numbers = {"ratios": [ratio.__dict__ for ratio in ratios], "slower": slower, "geometric_mean": mean}
        print(json.dumps(numbers, indent=2))
    else:
        print(markdown([ratio.row(threshold) for ratio in ratios]))
        print(f"\n{len(slower)} of {len(ratios)} calls became slower by more than {100 * threshold:.0f} %")
        print(f"The geometric mean of all ratios is {mean:.3f}; at most {largest_mean:g} passes")
    return 1 if slower or mean > largest_mean else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # so that the worktrees are taken away then too
    raise SystemExit(main(sys.argv[1:]))
