"""Random mutants of the numeric core: small faults, each of which the quick tests of its module must notice.

`python -m tests.reliability.mutants` draws them by a fixed seed, runs each in a process of its own with the tests of
`CORE`, writes what became of it to build/reliability/mutants.jsonl, and continues there after an interruption. A mutant
is drawn by a hash of what it replaces, so that a change elsewhere in the source leaves the others as they are.
`--again` runs the survivors once more; `--write` only puts score and survivors into docs/reliability.md.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.reliability.changed_code import BUILD, REFUSED, SURVIVED, Change, Collected, Job, Outcome, Runner
from tests.reliability.equivalent import EQUIVALENT
from tests.reliability.figures import PAGE, RECORDS, ROOT, record, replaced

SEED = 30
DRAWN = {"Python": 106, "C++": 28, "Triton": 18}
"""How many mutants are drawn of each language."""
LEAST_SCORE = 0.85
BEGIN, END = "<!-- mutants: begin -->", "<!-- mutants: end -->"
RESULTS = RECORDS / "mutants.jsonl"
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
    ),
    "geoflow_fast/flow/curriculum.py": ("flow/test_curriculum.py", "training/test_training.py"),
    "geoflow_fast/flow/anchor.py": ("flow/test_anchor.py", "training/test_presets.py"),
    "geoflow_fast/flow/modulation.py": ("flow/test_modulation.py", "flow/test_model.py", "flow/test_forward_mode.py"),
    "geoflow_fast/flow/network.py": ("flow/test_model.py", "flow/test_forward_mode.py"),
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
        "jobs/test_ids.py::test_a_calibration_of_another_encoder_is_refused",
    ),
    "geoflow_fast/retrieval/entropy.py": ("retrieval/test_entropy.py", "retrieval/test_head_entropy.py"),
    "geoflow_fast/retrieval/item_bank.py": ("retrieval/test_no_match.py",),
    "geoflow_fast/retrieval/marginals.py": ("retrieval/test_head_entropy.py", "retrieval/test_entropy.py"),
    "geoflow_fast/retrieval/held_out.py": ("retrieval/test_evidence.py",),
    "geoflow_fast/retrieval/copies.py": ("retrieval/test_copies.py", "retrieval/test_rerank.py"),
    "geoflow_fast/retrieval/hubs.py": ("retrieval/test_evidence.py",),
    "geoflow_fast/retrieval/features.py": ("retrieval/test_features.py", "retrieval/test_no_match.py"),
    "geoflow_fast/retrieval/bandwidth.py": ("retrieval/test_bandwidth.py",),
    "geoflow_fast/retrieval/no_match.py": ("retrieval/test_no_match.py",),
    "geoflow_fast/retrieval/sources.py": ("retrieval/test_head_entropy.py", "retrieval/test_entropy.py"),
    "geoflow_fast/head/loss.py": ("head/test_loss.py",),
    "geoflow_fast/head/model.py": ("head/test_model.py", "retrieval/test_head_entropy.py"),
    "geoflow_fast/decisions/bounds.py": ("decisions/test_rules.py",),
    "geoflow_fast/decisions/logistic.py": ("decisions/test_trust.py", "decisions/test_rules.py"),
    "geoflow_fast/decisions/model.py": ("decisions/test_trust.py", "decisions/test_rules.py"),
    "geoflow_fast/decisions/rules.py": ("decisions/test_rules.py",),
    "geoflow_fast/decisions/certify.py": ("decisions/test_rules.py",),
    "geoflow_fast/decisions/drift.py": ("decisions/test_watch.py",),
    "geoflow_fast/training/batches.py": ("training/test_training.py",),
    "geoflow_fast/training/blending.py": ("training/test_blending.py",),
    "geoflow_fast/evaluation/metrics.py": ("evaluation/test_metrics.py", "evaluation/test_ties.py"),
    "geoflow_fast/evaluation/statistics.py": ("evaluation/test_statistics.py",),
    "csrc/cpu/interpolant_rows.h": ("ops/test_masked_interpolant.py",),
    "csrc/cpu/solver_rows.h": ("ops/test_tangent_step.py",),
    "csrc/cpu/sinc.h": ("ops/test_masked_interpolant.py", "ops/test_tangent_step.py"),
    "csrc/cpu/network_rows.h": ("ops/test_network_cpu.py", "ops/test_network_ops.py", "flow/test_forward_mode.py"),
    "csrc/cpu/gallery_tiles.h": ("ops/test_gallery_posterior.py", "ops/test_gallery_search.py"),
    "csrc/cpu/search_rows.h": ("ops/test_gallery_search.py",),
    "csrc/cpu/top_items.h": ("ops/test_gallery_search.py", "ops/test_gallery_posterior.py"),
    "csrc/cpu/hadamard.h": ("ops/test_ot.py",),
    "csrc/cpu/sinkhorn_passes.h": ("ops/test_ot.py",),
    "csrc/cpu/gemm_rows.h": ("ops/test_gallery_posterior.py", "ops/test_ot.py"),
    "kernels/gallery.py": ("interpreter/test_kernels.py -k gallery",),
    "kernels/geodesic.py": ("interpreter/test_kernels.py -k interpolant -k tangent",),
    "kernels/network.py": ("interpreter/test_kernels.py -k adaln -k gate -k swiglu -k loss -k cross",),
    "kernels/probes.py": ("interpreter/test_kernels.py -k probe",),
}
"""The numeric core, and the tests that must notice a fault in each of its files."""


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


@dataclass(frozen=True)
class Mutant:
    """A change of the core with a name that does not depend on line numbers."""

    change: Change
    where: str
    """The function it is in."""
    kind: str
    name: str

    @property
    def shown(self) -> str:
        """What it replaces by what, in one line."""
        before, after = (" ".join(text.split()) for text in (self.change.before, self.change.after))
        return f"{before} -> {after or '(nothing)'}"

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
        digest = hashlib.sha256(repr((SEED, *key, number)).encode()).hexdigest()
        mutants.append(Mutant(change, where, kind, digest[:10]))
    return mutants


def drawn() -> list[Mutant]:
    """The mutants of the run: of each language those with the lowest hashes, one for a line, in every file at least
    one."""
    chosen = []
    for name, count in DRAWN.items():
        every = sorted((m for file in CORE if language(file) == name for m in candidates(file)), key=lambda m: m.name)
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
    if language(change.file) != "Python":
        return True
    last = change.line + change.before.count("\n")
    return not presets_path().get(change.file, set()).isdisjoint(range(change.line, last + 1))


# ---- the run ------------------------------------------------------------------------------------------------------


def results() -> dict[str, Outcome]:
    """What became of the mutants that were run, by name."""
    if not RESULTS.exists():
        return {}
    lines = (json.loads(line) for line in RESULTS.read_text().splitlines())
    return {line.pop("name"): Outcome(**line) for line in lines}


def keep(name: str, outcome: Outcome) -> None:
    """Writes down what became of a mutant."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps({"name": name, **dataclasses.asdict(outcome)}) + "\n")


def run(again: bool = False) -> None:
    """Runs the mutants that have no result yet or, `again`, survived; those of Python first, all in one session."""
    from geoflow_fast.runtime.progress import progress_bar

    mutants, known = drawn(), results()
    waiting = [m for m in mutants if m.name not in known or (again and known[m.name].status == SURVIVED)]
    waiting = [m for m in waiting if m.name not in EQUIVALENT]
    by_name = {mutant.name: mutant for mutant in waiting}
    with progress_bar(len(mutants), len(mutants) - len(waiting), "mutants", shown=None) as advance:

        def tell(name: str, outcome: Outcome) -> None:
            keep(name, outcome)
            mutant = by_name[name]
            where = f"{mutant.change.file}:{mutant.change.line}"
            print(f"{name} {outcome.status:9} {outcome.seconds:6.1f} s  {where}  {mutant.shown}", flush=True)
            advance(1)

        others = [mutant for mutant in waiting if language(mutant.change.file) != "Python"]
        runner = Runner() if others else None
        for mutant in others:
            assert runner is not None
            outcome = runner.run(mutant.change, mutant.quick_tests)
            if not outcome.noticed and mutant.long_tests:
                outcome = runner.run(mutant.change, mutant.long_tests)
            tell(mutant.name, outcome)
        jobs = [mutant.job for mutant in waiting if mutant not in others]
        if jobs:
            Collected(jobs, lambda job, outcome: tell(job.name, outcome)).run()


def summary() -> tuple[dict[str, dict[str, int]], list[Mutant]]:
    """Counts by language, and the mutants that survived and are not equivalent."""
    known, counts, survivors = results(), {}, []
    for mutant in drawn():
        row = counts.setdefault(
            language(mutant.change.file), {"drawn": 0, "noticed": 0, "equivalent": 0, "survived": 0, "waiting": 0}
        )
        row["drawn"] += 1
        outcome = known.get(mutant.name)
        if mutant.name in EQUIVALENT or (outcome is not None and outcome.status == REFUSED):
            row["equivalent"] += 1
        elif outcome is None:
            row["waiting"] += 1
        else:
            row["noticed" if outcome.noticed else "survived"] += 1
            survivors += [] if outcome.noticed else [mutant]
    return counts, survivors


def score(counts: dict[str, dict[str, int]]) -> float:
    """The share of the mutants that are not equivalent and were noticed."""
    noticed, survived = (sum(row[name] for row in counts.values()) for name in ("noticed", "survived"))
    return noticed / max(1, noticed + survived)


def table() -> str:
    """Score and survivors as lines of Markdown."""
    counts, survivors = summary()
    lines = ["| Language | Mutants | Noticed | Equivalent | Survived | Score |", "|---|---|---|---|---|---|"]
    for name, row in counts.items():
        own = f"{score({name: row}):.0%}"
        lines.append(
            f"| {name} | {row['drawn']} | {row['noticed']} | {row['equivalent']} | {row['survived']} | {own} |"
        )
    total = {key: sum(row[key] for row in counts.values()) for key in ("drawn", "noticed", "equivalent", "survived")}
    lines.append(f"| all | {' | '.join(str(total[key]) for key in total)} | {score(counts):.0%} |")
    if survivors:
        lines += ["", "| Survivor | Where | On the presets' path |", "|---|---|---|"]
    for mutant in survivors:
        shown = mutant.shown.replace("|", "\\|")
        path = "yes" if on_presets_path(mutant) else "no"
        lines.append(f"| `{mutant.name}`: `{shown}` | `{mutant.change.file}`, `{mutant.where}` | {path} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--again", action="store_true", help="run those that survived once more")
    parser.add_argument("--list", action="store_true", help="only show which are drawn")
    parser.add_argument("--write", action="store_true", help="put score and survivors into docs/reliability.md")
    options = parser.parse_args()
    if options.list:
        for mutant in drawn():
            print(mutant.name, f"{mutant.change.file}:{mutant.change.line}", mutant.where, mutant.kind, mutant.shown)
        return
    if options.write:
        PAGE.write_text(replaced(PAGE.read_text(), BEGIN, END, table()))
        return
    run(options.again)
    counts, survivors = summary()
    path = [mutant.name for mutant in survivors if on_presets_path(mutant)]
    total = {key: sum(row[key] for row in counts.values()) for key in ("drawn", "noticed", "equivalent", "survived")}
    record("random_mutants", **total, score=round(score(counts), 3), surviving_on_the_path_of_presets=len(path))
    print(table())


if __name__ == "__main__":
    main()
