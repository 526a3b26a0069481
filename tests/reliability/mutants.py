"""Random mutants of the numeric core: small faults, each of which the quick tests of its module must notice.

`python -m tests.reliability.mutants` draws them by a fixed seed, runs each in a process of its own with the tests of
`CORE`, writes what became of it to build/reliability/mutants.jsonl, and continues there after an interruption. A mutant
is drawn by a hash of what it replaces, so that a change elsewhere in the source leaves the others as they are. A result
holds for the tests that it was found with: where these have changed since, the mutant is run again. `--part 1/2` and
`--part 2/2` share the work between two processes. `--again` runs once more what survived or hung; `--write` only puts
score and survivors into docs/reliability.md, as soon as no mutant waits for its result. `--seed` draws others: what
becomes of those when they first run tells how faults fare that no test was written for, and is kept as a figure.
"""

from __future__ import annotations

import argparse
import ast
import copy
import dataclasses
import functools
import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.reliability.changed_code import (
    BUILD,
    CAUGHT,
    CRASHES,
    HANGS,
    REFUSED,
    SURVIVED,
    BrokenOffError,
    Change,
    Collected,
    Job,
    Outcome,
    Runner,
)
from tests.reliability.equivalent import EQUIVALENT
from tests.reliability.figures import PAGE, RECORDS, ROOT, record, replaced

SEED = 30
DRAWN = {"Python": 118, "C++": 30, "Triton": 18}
"""How many mutants are drawn of each language."""
LEAST_SCORE = 0.85
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
RESULTS = "mutants"
"""How the names of files of results begin."""
SECONDS = {"Python": 10.0, "C++": 40.0, "Triton": 20.0}
"""About how long a mutant takes."""
PATH_FILE = BUILD / "presets_path.json"

CORE: dict[str, tuple[str, ...]] = {
    "geoflow_fast/geometry.py": ("test_geometry.py", "test_manifolds.py", "test_spherical.py"),
    "geoflow_fast/noise.py": ("test_noise.py",),
    "geoflow_fast/manifolds.py": ("test_manifolds.py", "flow/test_solvers.py", "flow/test_sampling.py"),
    "geoflow_fast/spherical.py": ("test_spherical.py", "baselines/test_baselines.py"),
    "geoflow_fast/flow/solvers.py": ("flow/test_solvers.py", "flow/test_sampling.py", "likelihood/test_reverse_ode.py"),
    "geoflow_fast/flow/sampling.py": ("flow/test_sampling.py", "retrieval/test_entropy.py"),
    "geoflow_fast/flow/forward_mode.py": (
        "flow/test_forward_mode.py",
        "likelihood/test_evaluators.py",
        "flow/test_sampling.py",
        "flow/test_precision.py",
    ),
    "geoflow_fast/flow/curriculum.py": ("flow/test_curriculum.py", "training/test_training.py"),
    "geoflow_fast/flow/anchor.py": ("flow/test_anchor.py", "training/test_presets.py"),
    "geoflow_fast/flow/modulation.py": ("flow/test_modulation.py", "flow/test_model.py", "flow/test_forward_mode.py"),
    "geoflow_fast/flow/network.py": ("flow/test_model.py", "flow/test_forward_mode.py"),
    "geoflow_fast/flow/model.py": (
        "flow/test_model.py",
        "flow/test_forward_mode.py",
        "flow/test_anchor.py",
        "runtime/test_graphs.py::test_hooks_are_a_reason",
    ),
    "geoflow_fast/flow/preprocess.py": ("flow/test_model.py", "training/test_training.py"),
    "geoflow_fast/likelihood/probes.py": ("likelihood/test_probes.py", "likelihood/test_density.py"),
    "geoflow_fast/likelihood/reverse_ode.py": (
        "likelihood/test_probes.py",
        "likelihood/test_reverse_ode.py",
        "likelihood/test_density.py",
        "likelihood/test_evaluators.py",
    ),
    "geoflow_fast/likelihood/evaluators.py": ("likelihood/test_evaluators.py", "flow/test_anchor.py"),
    "geoflow_fast/likelihood/density.py": ("likelihood/test_density.py", "likelihood/test_one_side.py"),
    "geoflow_fast/likelihood/neighbours.py": ("likelihood/test_neighbours.py",),
    "geoflow_fast/ops/gallery_statistics.py": (
        "ops/test_gallery_posterior.py",
        "ops/test_gallery_search.py",
        "retrieval/test_index.py",
    ),
    "geoflow_fast/ops/gallery_posterior.py": ("ops/test_gallery_posterior.py", "ops/test_gallery_bfloat16.py"),
    "geoflow_fast/ops/gallery_search.py": ("ops/test_gallery_search.py",),
    "geoflow_fast/ops/masked_interpolant.py": ("ops/test_masked_interpolant.py",),
    "geoflow_fast/ops/tangent_step.py": ("ops/test_tangent_step.py", "flow/test_sampling.py"),
    "geoflow_fast/ops/tangent_probes.py": ("likelihood/test_probes.py",),
    "geoflow_fast/ops/adaln.py": ("ops/test_network_ops.py", "ops/test_network_cpu.py"),
    "geoflow_fast/ops/swiglu.py": ("ops/test_network_ops.py", "ops/test_network_cpu.py"),
    "geoflow_fast/ops/flow_loss.py": ("ops/test_network_ops.py", "ops/test_network_cpu.py"),
    "geoflow_fast/ops/product.py": ("ops/test_product.py",),
    "geoflow_fast/ops/segments.py": ("ops/test_segments.py", "flow/test_forward_mode.py"),
    "geoflow_fast/ops/pruning.py": ("retrieval/test_index.py", "ops/test_gallery_search.py"),
    "geoflow_fast/ops/transport.py": ("ops/test_ot.py",),
    "geoflow_fast/ops/transport_solvers.py": ("ops/test_ot.py", "ops/test_ot_bfloat16.py"),
    "geoflow_fast/ops/ot_assign.py": ("ops/test_ot.py",),
    "geoflow_fast/ops/sinkhorn.py": ("ops/test_ot.py",),
    "geoflow_fast/retrieval/evidence.py": (
        "retrieval/test_calibration.py",
        "retrieval/test_evidence.py",
        "retrieval/test_tiers.py",
    ),
    "geoflow_fast/retrieval/calibration.py": (
        "retrieval/test_calibration.py",
        "retrieval/test_no_match.py",
        "retrieval/test_tiers.py",
    ),
    "geoflow_fast/retrieval/rerank.py": (
        "retrieval/test_rerank.py",
        "retrieval/test_tiers.py",
        "retrieval/test_evidence.py::TestHead",
        "retrieval/test_evidence.py::TestBudget",
        "jobs/test_ids.py::test_a_calibration_of_another_encoder_is_refused",
    ),
    "geoflow_fast/retrieval/entropy.py": ("retrieval/test_entropy.py", "retrieval/test_head_entropy.py"),
    "geoflow_fast/retrieval/item_bank.py": ("retrieval/test_no_match.py", "retrieval/test_evidence.py::TestHead"),
    "geoflow_fast/retrieval/marginals.py": (
        "retrieval/test_bandwidth.py",
        "retrieval/test_head_entropy.py",
        "retrieval/test_entropy.py",
    ),
    "geoflow_fast/retrieval/held_out.py": ("retrieval/test_evidence.py",),
    "geoflow_fast/retrieval/copies.py": ("retrieval/test_copies.py", "retrieval/test_rerank.py"),
    "geoflow_fast/retrieval/hubs.py": ("retrieval/test_evidence.py",),
    "geoflow_fast/retrieval/features.py": ("retrieval/test_features.py", "retrieval/test_no_match.py"),
    "geoflow_fast/retrieval/bandwidth.py": ("retrieval/test_bandwidth.py",),
    "geoflow_fast/retrieval/no_match.py": ("retrieval/test_no_match.py",),
    "geoflow_fast/retrieval/sources.py": (
        "retrieval/test_head_entropy.py",
        "retrieval/test_entropy.py",
        "retrieval/test_bandwidth.py",
    ),
    "geoflow_fast/retrieval/index.py": ("retrieval/test_index.py",),
    "geoflow_fast/head/loss.py": ("head/test_loss.py",),
    "geoflow_fast/head/model.py": ("head/test_model.py", "retrieval/test_head_entropy.py"),
    "geoflow_fast/head/fitting.py": ("head/test_fitting.py",),
    "geoflow_fast/decisions/bounds.py": ("decisions/test_rules.py",),
    "geoflow_fast/decisions/logistic.py": ("decisions/test_trust.py", "decisions/test_rules.py"),
    "geoflow_fast/decisions/model.py": ("decisions/test_trust.py", "decisions/test_rules.py"),
    "geoflow_fast/decisions/rules.py": ("decisions/test_rules.py",),
    "geoflow_fast/decisions/certify.py": ("decisions/test_rules.py",),
    "geoflow_fast/decisions/trust.py": ("decisions/test_trust.py", "decisions/test_rules.py"),
    "geoflow_fast/decisions/drift.py": ("decisions/test_watch.py",),
    "geoflow_fast/decisions/watch.py": ("decisions/test_watch_numbers.py", "decisions/test_watch.py"),
    "geoflow_fast/training/batches.py": ("training/test_training.py", "training/test_device.py"),
    "geoflow_fast/training/blending.py": ("training/test_blending.py",),
    "geoflow_fast/evaluation/metrics.py": ("evaluation/test_metrics.py", "evaluation/test_ties.py"),
    "geoflow_fast/evaluation/statistics.py": ("evaluation/test_statistics.py",),
    "csrc/cpu/interpolant_rows.h": ("ops/test_masked_interpolant.py",),
    "csrc/cpu/solver_rows.h": ("ops/test_tangent_step.py",),
    "csrc/cpu/sinc.h": ("ops/test_masked_interpolant.py", "ops/test_tangent_step.py"),
    "csrc/cpu/network_rows.h": ("ops/test_network_cpu.py", "ops/test_network_ops.py", "flow/test_forward_mode.py"),
    "csrc/cpu/gallery_tiles.h": ("ops/test_gallery_posterior.py", "ops/test_gallery_search.py"),
    "csrc/cpu/search_rows.h": ("ops/test_gallery_search.py",),
    "csrc/cpu/search_codes.cpp": ("ops/test_gallery_search.py",),
    "csrc/cpu/top_items.h": ("ops/test_gallery_search.py", "ops/test_gallery_posterior.py"),
    "csrc/cpu/hadamard.h": ("ops/test_ot.py",),
    "csrc/cpu/sinkhorn_passes.h": ("ops/test_ot.py",),
    "csrc/cpu/gemm_rows.h": ("ops/test_gallery_posterior.py", "ops/test_ot.py"),
    "kernels/gallery.py": ("interpreter/test_kernels.py -k gallery",),
    "kernels/geodesic.py": ("interpreter/test_kernels.py -k interpolant -k tangent -k noise -k unit_rows",),
    "kernels/network.py": (
        "interpreter/test_kernels.py -k adaln -k gate -k swiglu -k loss -k cross -k segments",
        "interpreter/test_segments.py",
    ),
    "kernels/probes.py": ("interpreter/test_segments.py -k probe -k traces",),
}
"""The numeric core, and the tests that must notice a fault in each of its files."""


OF_NO_PRESET = ("csrc/cpu/hadamard.h",)
"""Compiled code that no preset runs: structured noise is drawn on request."""
LONG = (
    "ops/test_ot.py::test_memory_is_one_matrix",
    "ops/test_ot.py::test_agrees_with_pot_in_float64",
    "ops/test_ot.py::test_interrupt_stops_a_long_solve",
    "ops/test_ot.py::test_default_tolerance_assigns_as_the_converged_plan",
    "ops/test_ot.py::test_threads_do_not_change_a_bit",
    "retrieval/test_calibration.py::test_weights_are_recovered_within_their_standard_errors",
    "retrieval/test_evidence.py::TestHead::test_the_ladder_takes_the_head_where_it_helps",
    "retrieval/test_evidence.py::TestHubs::test_held_out_items_that_are_in_the_gallery_do_not_look_like_hubs",
    "retrieval/test_evidence.py::TestChoiceOfScale::test_noise_that_was_chosen_shows_no_gain",
    "retrieval/test_no_match.py::TestRelevance::test_judgements_serve_as_well_as_pairs",
    "retrieval/test_no_match.py::TestCopies::test_storing_every_item_five_times_changes_no_decision",
    "retrieval/test_tiers.py::TestFit::test_noise_is_kept_as_rarely_as_chance_allows",
    "retrieval/test_evidence.py::TestHubs::test_a_stored_calibration_brings_its_bank",
    "retrieval/test_evidence.py::TestHubs::test_a_bank_of_the_callers",
    "retrieval/test_rerank.py::TestCalibration::test_the_gallery_is_searched_with_the_querys_own_item",
    "retrieval/test_rerank.py::TestCalibration::test_the_answer_is_right_if_it_is_any_of_the_right_items",
    "retrieval/test_tiers.py::TestReranker",
    "retrieval/test_no_match.py::TestItemBank::test_the_level_of_exact_scores_is_zero",
    "ops/test_ot.py::test_tight_tolerances_agree_with_pot_in_float64",
    "likelihood/test_density.py::test_dopri5_agrees",
    "likelihood/test_density.py::test_another_partner_does_not_change_the_noise_of_the_others",
)
"""Tests that take seconds, which only a mutant that survives the others meets."""


def language(file: str) -> str:
    """That of a file of the core."""
    return "C++" if file.startswith("csrc/") else "Triton" if file.startswith("kernels/") else "Python"


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:10]


@dataclass(frozen=True)
class Mutant:
    """A change of the core with a name that does not depend on line numbers."""

    change: Change
    where: str
    """The function it is in."""
    kind: str
    identity: tuple[object, ...]
    """What tells it from all others."""

    @functools.cached_property
    def name(self) -> str:
        """A digest of what it is."""
        return _digest(self.identity)

    def rank(self, seed: int) -> str:
        """Where it stands in the order of a draw."""
        return _digest((seed, *self.identity))

    @property
    def shown(self) -> str:
        """What it replaces by what, in one line."""
        before, after = (" ".join(text.split()) for text in (self.change.before, self.change.after))
        return f"{before} -> {after or '(nothing)'}"

    @property
    def cell(self) -> str:
        """Its name and what it replaces, as a cell of a table."""
        shown = self.shown.replace("|", "\\|")
        return f"`{self.name}`: `{shown}`"

    @property
    def long_tests(self) -> list[str]:
        """Those of its tests that take seconds, and that only a mutant which survives the others meets."""
        return [f"tests/{test}" for test in LONG if test.partition("::")[0] in CORE[self.change.file]]

    @property
    def job(self) -> Job:
        """What is run of a mutant of Python: the quick tests, then the long ones."""
        files = tuple(f"tests/{file}" for file in CORE[self.change.file])
        return Job(self.name, self.change, self.where, files, tuple(self.long_tests))

    @property
    def quick_tests(self) -> list[str]:
        """The arguments of pytest by which its other tests are run."""
        words = [f"--deselect={test}" for test in self.long_tests]
        for entry in CORE[self.change.file]:
            file, *options = entry.split(" -k ")
            words += [f"tests/{file}", *(["-k", " or ".join(options)] if options else [])]
        return words


# ---- Python -------------------------------------------------------------------------------------------------------


SWAPPED = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
PAIRED = "amax amin, max min, maximum minimum, argmax argmin, sin cos, floor ceil, sum mean, any all, tril triu"
NAMES = {
    **{name: other for pair in PAIRED.split(", ") for name, other in (pair.split(), reversed(pair.split()))},
    "exp": "expm1",
    "log": "log1p",
    "logaddexp": "maximum",
}
"""Functions, and what is called in their place."""
DROPPED = {"clamp", "clamp_min", "clamp_max", "abs", "sqrt", "square", "sign", "neg", "detach_"}
"""Methods that are left out, so that `x.clamp(...)` becomes `x`."""
SHAPES = {
    *(
        "unsqueeze",
        "squeeze",
        "flatten",
        "unflatten",
        "transpose",
        "select",
        "size",
        "split",
        "chunk",
        "view",
        "reshape",
    ),
    *("permute", "expand", "movedim", "unbind", "gather", "scatter_", "index_select", "take_along_dim", "softmax"),
    *("log_softmax", "logsumexp", "sum", "mean", "amax", "amin", "any", "all", "argmax", "argmin", "sort", "argsort"),
    *("narrow", "index_add_", "cumsum", "cat", "stack", "repeat", "repeat_interleave", "topk", "diff"),
}
"""Functions whose whole numbers say which dimension is meant: another one would be noticed by every test."""
NOT_NUMBERS = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.AnnAssign)


def python_changes(file: str) -> Iterator[tuple[Change, str, str]]:
    """All changes of the functions of a Python file, with function and kind."""
    source = (ROOT / file).read_text()
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    for name, function in functions(ast.parse(source)):
        segment = ast.get_source_segment(source, function) or ""
        is_kernel = file.startswith("kernels/")
        if re.search(r"__repr|extra_repr|check|save|load|Cuda|message|describe", name) or (
            is_kernel != any("jit" in ast.unparse(d) or "kernel" in ast.unparse(d) for d in function.decorator_list)
        ):
            continue
        if not is_kernel and re.search(r"cuda|triton|capturing|self\.fused", segment):
            continue  # what only a GPU runs has tests of its own: tests/cuda_emulation, tests/interpreter
        for node in numbers_of(function):
            for kind, new in mutated(node):
                begin = offsets[node.lineno - 1] + character(source, offsets, node.lineno, node.col_offset)
                end = offsets[node.end_lineno - 1] + character(source, offsets, node.end_lineno, node.end_col_offset)
                text = (
                    "pass"
                    if new is None
                    else f"({ast.unparse(new)})"
                    if isinstance(new, ast.BinOp)
                    else ast.unparse(new)
                )
                if isinstance(new, (ast.Compare, ast.BoolOp)):
                    text = f"({text})"
                yield Change(file, begin, source[begin:end], text), name, kind


def character(source: str, offsets: Sequence[int], line: int, column: int) -> int:
    """The number of characters before a column, which Python counts in bytes."""
    return len(source[offsets[line - 1] : offsets[line]].encode()[:column].decode())


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module and of its classes, with their names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def numbers_of(function: ast.FunctionDef) -> Iterator[ast.expr | ast.stmt]:
    """The parts of a function that compute something: no annotations, decorators, messages or words."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, NOT_NUMBERS):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.Call) and re.match(r"checks\.|warnings\.|check_|_check|warn", ast.unparse(node.func)):
            continue
        if isinstance(node, ast.FunctionDef):
            waiting += node.body
            continue
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(".shape"):
            continue
        if isinstance(node, ast.keyword) and node.arg in ("dim", "axis", "dtype", "device"):
            continue
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SHAPES:
            yield node
            waiting += [node.func.value, *(each for each in node.args if not is_whole(each)), *node.keywords]
            continue
        if isinstance(node, (ast.expr, ast.stmt)):
            yield node
        if isinstance(node, ast.If) and all(isinstance(each, (ast.Raise, ast.Assert)) for each in node.body):
            waiting += node.orelse
            continue
        waiting += ast.iter_child_nodes(node)


def mutated(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """What takes the place of a node; None takes out a statement."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.BinOp) and type(new.op) in SWAPPED and not isinstance(new.left, (ast.Constant, ast.List)):
        new.op = SWAPPED[type(new.op)]()
        yield "operator", new
    elif isinstance(new, ast.Compare) and len(new.ops) == 1 and type(new.ops[0]) in SWAPPED:
        new.ops[0] = SWAPPED[type(new.ops[0])]()
        yield "comparison", new
    elif isinstance(new, ast.BoolOp):
        new.op = SWAPPED[type(new.op)]()
        yield "logic", new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, (ast.USub, ast.Not, ast.Invert)):
        if not isinstance(new.operand, ast.Constant):
            yield "sign", new.operand
    elif isinstance(new, ast.Constant) and type(new.value) is bool:
        new.value = not new.value
        yield "truth", new
    elif isinstance(new, ast.Constant) and type(new.value) in (int, float):
        new.value = new.value + 1 if type(new.value) is int else new.value * 2 or 1.0
        yield "number", new
    elif isinstance(new, ast.Call) and isinstance(new.func, ast.Attribute):
        if new.func.attr in DROPPED and not is_module(new.func.value):
            yield "left out", new.func.value
        elif new.func.attr in NAMES:
            new.func.attr = NAMES[new.func.attr]
            yield "function", new
    elif isinstance(new, ast.IfExp):
        yield "branch", ast.IfExp(new.test, new.orelse, new.body)
    elif isinstance(new, ast.AugAssign) or (isinstance(new, ast.Assign) and isinstance(new.targets[0], ast.Subscript)):
        yield "left out", None


def is_whole(node: ast.expr) -> bool:
    """Whether a node is a whole number, or several."""
    value = node.operand if isinstance(node, ast.UnaryOp) else node
    if isinstance(value, ast.Tuple):
        return all(map(is_whole, value.elts))
    return isinstance(value, ast.Constant) and type(value.value) is int


def is_module(node: ast.expr) -> bool:
    """Whether a name stands for a module, of which a function cannot be left out."""
    return ast.unparse(node) in {
        "torch",
        "np",
        "math",
        "tl",
        "torch.nn.functional",
        "functional",
        "torch.linalg",
        "self",
    }


# ---- C++ ----------------------------------------------------------------------------------------------------------


OPERATORS = "+ -, - +, * /, / *, < <=, <= <, > >=, >= >, == !=, != ==, && ||, || &&, += -=, -= +="
PIECES = {
    **{f" {before} ": f" {after} " for before, after in (each.split() for each in OPERATORS.split(", "))},
    "std::max": "std::min",
    "std::min": "std::max",
    " ? ": " == 0 ? ",
    "return 0": "return 1",
    "(0)": "(1)",
}
NOT_CODE = re.compile(
    r"^\s*(//|#|template|using|static_assert|constexpr|const std::int64_t k[A-Z]|inline|struct|class)"
)


def native_changes(file: str) -> Iterator[tuple[Change, str, str]]:
    """All changes of a C++ file by the pieces above, with the function they are in."""
    at, where = 0, ""
    for line in (ROOT / file).read_text().splitlines(keepends=True):
        code = line.split("//")[0]
        if header := re.match(
            r"(?:inline |static |void |bool |double |float |template|std::|[A-Z]\w+ )[^=;]*?(\w+)\(", line
        ):
            where = header[1]
        elif not NOT_CODE.match(line) and "pragma" not in line and line[:1].isspace():
            for piece, other in PIECES.items():
                for match in re.finditer(re.escape(piece), code):
                    yield Change(file, at + match.start(), piece, other), where, "piece"
        at += len(line)


# ---- drawing ------------------------------------------------------------------------------------------------------


@functools.cache
def candidates(file: str) -> list[Mutant]:
    """All mutants of a file."""
    changes = (native_changes if language(file) == "C++" else python_changes)(file)
    source, seen, mutants = (ROOT / file).read_text(), {}, []
    for change, where, kind in changes:
        line = source.splitlines()[change.line - 1].strip()
        key = (file, where, kind, line, change.before, change.after)
        seen[key] = number = seen.get(key, -1) + 1
        mutants.append(Mutant(change, where, kind, (*key, number)))
    return mutants


@functools.cache
def drawn(seed: int = SEED) -> list[Mutant]:
    """The mutants of a draw: of each language those with the lowest hashes, one for a line, in every file at least
    one."""
    chosen = []
    for name, count in DRAWN.items():
        every = [mutant for file in CORE if language(file) == name for mutant in candidates(file)]
        every.sort(key=lambda mutant: mutant.rank(seed))
        lines: set[tuple[str, int]] = set()
        different = []
        for mutant in every:
            if (spot := (mutant.change.file, mutant.change.line)) not in lines:
                lines.add(spot)
                different.append(mutant)
        first = {mutant.change.file: mutant for mutant in reversed(different)}
        rest = [mutant for mutant in different if first[mutant.change.file] is not mutant]
        chosen += [*first.values(), *rest][:count]
    return sorted(chosen, key=lambda m: (list(CORE).index(m.change.file), m.change.at))


# ---- the path of the presets --------------------------------------------------------------------------------------


@functools.cache
def presets_path() -> dict[str, set[int]]:
    """The lines of the Python core that run when the presets are used as they come: training, sampling, densities,
    scoring, re-ranking and trust. Of compiled code and kernels all lines count."""
    state = {file: (ROOT / file).read_text() for file in CORE if language(file) == "Python"}
    kept = json.loads(PATH_FILE.read_text()) if PATH_FILE.exists() else {}
    if kept.get("state") != state:
        PATH_FILE.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "tests.reliability.presets", str(PATH_FILE)], check=True, cwd=ROOT)
        lines = json.loads(PATH_FILE.read_text())
        kept = {"state": state, "lines": lines}
        PATH_FILE.write_text(json.dumps(kept))
    return {file: set(lines) for file, lines in kept["lines"].items()}


def on_presets_path(mutant: Mutant) -> bool:
    """Whether it is in code that a preset runs."""
    change = mutant.change
    if change.file in OF_NO_PRESET:
        return False
    if language(change.file) != "Python":
        return True
    last = change.line + change.before.count("\n")
    return not presets_path().get(change.file, set()).isdisjoint(range(change.line, last + 1))


# ---- the run ------------------------------------------------------------------------------------------------------


def imported(path: str) -> list[str]:
    """The files of tests/ from which a file of Python may import something."""
    paths = []
    for node in ast.walk(parsed((ROOT / path).read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tests":
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            paths += [f"{name.replace('.', '/')}.py" for name in names if name]
    return [path for path in paths if (ROOT / path).is_file()]


parsed = functools.cache(ast.parse)


@functools.cache
def tests_digest(file: str) -> str:
    """A digest of the tests of a file of the core: which they are, and the text of them and of all that they import
    from tests/."""
    waiting = [f"tests/{entry.split(' -k ')[0].partition('::')[0]}" for entry in CORE[file]]
    folders = {parent for path in waiting for parent in Path(path).parents}
    waiting += [str(each / "conftest.py") for each in folders if (ROOT / each / "conftest.py").exists()]
    texts: dict[str, str] = {}
    while waiting:
        path = waiting.pop()
        if path not in texts:
            texts[path] = (ROOT / path).read_text()
            waiting += imported(path)
    return hashlib.sha256(repr((CORE[file], sorted(texts.items()))).encode()).hexdigest()[:16]


def kept_lines() -> list[dict[str, Any]]:
    """All that was written down of mutants, the oldest first."""
    files = sorted(RECORDS.glob(f"{RESULTS}*.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: float(line["when"]))


def results(seed: int = SEED) -> dict[str, Outcome]:
    """What became of the mutants with the tests as they are now, by name; of several results the last one counts."""
    digests = {mutant.name: tests_digest(mutant.change.file) for mutant in drawn(seed)}
    kept = [line for line in kept_lines() if line["tests"] == digests.get(line["name"])]
    return {line["name"]: Outcome(line["status"], line["test"], line["seconds"]) for line in kept}


def first_results(seed: int) -> dict[str, Outcome]:
    """What became of each mutant of a draw when it ran for the first time, before anyone wrote a test for it."""
    names = {mutant.name for mutant in drawn(seed)}
    kept = [line for line in reversed(kept_lines()) if line["name"] in names]
    return {line["name"]: Outcome(line["status"], line["test"], line["seconds"]) for line in kept}


@dataclass(frozen=True)
class Part:
    """The share that one of several processes has of a run: whole files of the core, so that it runs few tests."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """A part as the command line has it, such as 1/2."""
        if (match := re.fullmatch(r"(\d+)/(\d+)", text)) and 1 <= int(match[1]) <= int(match[2]):
            return cls(int(match[1]), int(match[2]))
        raise argparse.ArgumentTypeError(f"{text!r} is no part such as 1/2")

    @property
    def suffix(self) -> str:
        """What the names of its files end with."""
        return "" if self.of == 1 else f"-{self.number}-of-{self.of}"

    @property
    def folder(self) -> Path:
        """Where its children have their files."""
        return BUILD / f"run{self.suffix}"

    def of_mutants(self, mutants: Sequence[Mutant]) -> list[Mutant]:
        """Those of the part: each file goes where there is least to do yet, the longest first."""
        costs: dict[str, float] = {}
        for mutant in mutants:
            file = mutant.change.file
            costs[file] = costs.get(file, 0.0) + SECONDS[language(file)]
        loads = [0.0] * self.of
        own = set()
        for file in sorted(costs, key=lambda file: -costs[file]):
            least = loads.index(min(loads))
            loads[least] += costs[file]
            if least == self.number - 1:
                own.add(file)
        return [mutant for mutant in mutants if mutant.change.file in own]

    def keep(self, mutant: Mutant, outcome: Outcome) -> None:
        """Writes down what became of a mutant."""
        RECORDS.mkdir(parents=True, exist_ok=True)
        facts = {"name": mutant.name, "tests": tests_digest(mutant.change.file), "when": time.time()}
        with (RECORDS / f"{RESULTS}{self.suffix}.jsonl").open("a") as file:
            file.write(json.dumps(facts | dataclasses.asdict(outcome)) + "\n")


class Run:
    """Runs mutants and writes down what became of them; `broken` has those of which the tests told nothing."""

    def __init__(self, mutants: Sequence[Mutant], part: Part) -> None:
        self.mutants, self.part, self.done = mutants, part, 0
        self.broken: list[Mutant] = []
        for mutant in mutants:
            tests_digest(mutant.change.file)  # that of the tests that are about to be run, whatever is edited meanwhile

    def __call__(self) -> None:
        """Those of compiled code and kernels first, then those of Python, all in one session."""
        others = [mutant for mutant in self.mutants if language(mutant.change.file) != "Python"]
        if others:
            runner = Runner(self.part.folder)
            for mutant in others:
                self._tell(mutant, self._outcome(runner, mutant))
        by_name = {mutant.name: mutant for mutant in self.mutants if mutant not in others}
        if by_name:
            jobs = [mutant.job for mutant in by_name.values()]
            Collected(jobs, lambda job, outcome: self._tell(by_name[job.name], outcome), self.part.folder).run()

    @staticmethod
    def _outcome(runner: Runner, mutant: Mutant) -> Outcome | BrokenOffError:
        try:
            outcome = runner.compared(mutant.change, mutant.quick_tests)
            if outcome.status == SURVIVED and mutant.long_tests:
                outcome = runner.compared(mutant.change, mutant.long_tests)
        except BrokenOffError as error:
            return error
        return outcome

    def _tell(self, mutant: Mutant, outcome: Outcome | BrokenOffError) -> None:
        self.done += 1
        where = f"{mutant.change.file}:{mutant.change.line}  {mutant.shown}"
        print(f"{self.done}/{len(self.mutants)} {mutant.name} ", end="")
        if isinstance(outcome, BrokenOffError):
            self.broken.append(mutant)
            print(f"is not judged  {where}: {outcome}", flush=True)
            return
        self.part.keep(mutant, outcome)
        print(f"{outcome.status:9} {outcome.seconds:6.1f} s  {where}  {outcome.test}", flush=True)


def run(part: Part, *, seed: int = SEED, again: bool = False, equivalent: bool = False) -> None:
    """Runs the mutants of a part that have no result yet or, `again`, survived or hung, and on request those that count
    as equivalent; a SystemExit names those of which the tests told nothing."""
    known = results(seed)
    doubtful = {name for name, outcome in known.items() if again and outcome.status in (SURVIVED, HANGS)}
    waiting = [m for m in part.of_mutants(drawn(seed)) if m.name not in known or m.name in doubtful]
    waiting = [m for m in waiting if equivalent or m.name not in EQUIVALENT]
    task = Run(waiting, part)
    task()
    if task.broken:
        raise SystemExit(f"not judged: {', '.join(mutant.name for mutant in task.broken)}")


COUNTED = {CAUGHT: "caught", CRASHES: "crashes", HANGS: "hangs", SURVIVED: "survived", REFUSED: "refused"}
"""Under which name an outcome is counted."""


def summary(seed: int, known: Mapping[str, Outcome]) -> tuple[dict[str, dict[str, int]], list[Mutant]]:
    """Counts of a draw by language, and the mutants that survived and are not equivalent."""
    counts: dict[str, dict[str, int]] = {}
    survivors: list[Mutant] = []
    for mutant in drawn(seed):
        names = ("drawn", *COUNTED.values(), "equivalent", "waiting")
        row = counts.setdefault(language(mutant.change.file), dict.fromkeys(names, 0))
        row["drawn"] += 1
        outcome = known.get(mutant.name)
        if mutant.name in EQUIVALENT:
            row["equivalent"] += 1
        elif outcome is None:
            row["waiting"] += 1
        else:
            row[COUNTED[outcome.status]] += 1
            survivors += [mutant] if outcome.status == SURVIVED else []
    return counts, survivors


def totals(counts: dict[str, dict[str, int]]) -> dict[str, int]:
    """The counts of all languages."""
    return {key: sum(row[key] for row in counts.values()) for key in next(iter(counts.values()))}


def score(counts: dict[str, dict[str, int]]) -> float:
    """The share of the mutants that are not equivalent and were noticed."""
    total = totals(counts)
    noticed = sum(total[COUNTED[status]] for status in (CAUGHT, CRASHES, HANGS))
    return noticed / max(1, noticed + total["survived"])


def wrongly_equivalent() -> list[str]:
    """Mutants that count as equivalent, and that tests have noticed all the same."""
    return [name for name, outcome in results().items() if name in EQUIVALENT and outcome.noticed]


def table(seed: int = SEED) -> str:
    """Score, survivors and mutants that count as equivalent as lines of Markdown."""
    counts, survivors = summary(seed, results(seed))
    columns = ("drawn", "caught", "crashes", "hangs", "refused", "equivalent", "survived")
    lines = [
        "| Language | Mutants | Caught by a test | Crash | Hang | Do not compile | Equivalent | Survived | Score |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in [*counts.items(), ("all", totals(counts))]:
        lines.append(f"| {name} | {' | '.join(str(row[key]) for key in columns)} | {score({name: row}):.0%} |")
    if survivors:
        lines += ["", "| Survivor | Where | On the presets' path |", "|---|---|---|"]
    for mutant in survivors:
        path = "yes" if on_presets_path(mutant) else "no"
        lines.append(f"| {mutant.cell} | `{mutant.change.file}`, `{mutant.where}` | {path} |")
    lines += ["", "| Equivalent | Where | Why |", "|---|---|---|"]
    for mutant in drawn(seed):
        if mutant.name in EQUIVALENT:
            why = EQUIVALENT[mutant.name].why
            lines.append(f"| {mutant.cell} | `{mutant.change.file}`, `{mutant.where}` | {why} |")
    return "\n".join(lines)


def record_figures() -> None:
    """Puts the counts where `make reliability` finds them; a SystemExit says that mutants wait for their result."""
    counts, survivors = summary(SEED, results())
    total = totals(counts)
    if total["waiting"]:
        raise SystemExit(
            f"{total['waiting']} of {total['drawn']} mutants have no result with the tests as they are now, and the "
            "page stays as it is: run python -m tests.reliability.mutants first"
        )
    figures = {name: total[name] for name in ("drawn", "caught", "crashes", "hangs", "equivalent", "survived")}
    on_path = sum(map(on_presets_path, survivors))
    record("random_mutants", **figures, score=round(score(counts), 3), surviving_on_the_path_of_presets=on_path)


def record_first(seed: int) -> None:
    """Puts what became of another draw when it first ran where `make reliability` finds it, as soon as all of it has
    run."""
    counts, survivors = summary(seed, first_results(seed))
    total = totals(counts)
    if total["waiting"]:
        return
    names = ("drawn", "caught", "crashes", "hangs", "equivalent", "survived")
    on_path = sum(map(on_presets_path, survivors))
    record(
        f"random_mutants_of_seed_{seed}_when_first_run",
        **{name: total[name] for name in names},
        score=round(score(counts), 3),
        survived_on_the_path_of_presets=on_path,
    )


def write() -> None:
    """Puts score and survivors into the page."""
    record_figures()
    PAGE.write_text(replaced(PAGE.read_text(), BEGIN, END, table()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="run those that survived or hung once more")
    parser.add_argument("--equivalent", action="store_true", help="also run those that count as equivalent")
    parser.add_argument("--seed", type=int, default=SEED, help="draw others than those of the page")
    parser.add_argument("--part", type=Part.parse, default=Part(), help="run one of several parts, such as 1/2")
    parser.add_argument("--list", action="store_true", help="only show which are drawn")
    parser.add_argument("--write", action="store_true", help="put score and survivors into docs/reliability.md")
    options = parser.parse_args()
    if options.list:
        for mutant in drawn(options.seed):
            print(mutant.name, f"{mutant.change.file}:{mutant.change.line}", mutant.where, mutant.kind, mutant.shown)
    elif options.write:
        write()
    else:
        run(options.part, seed=options.seed, again=options.again, equivalent=options.equivalent)
        print(table(options.seed))
        if options.seed != SEED:
            record_first(options.seed)


if __name__ == "__main__":
    main()
