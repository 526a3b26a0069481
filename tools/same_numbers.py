"""Do two commits compute the same numbers? `python -m tools.same_numbers A B [--isa avx2]`.

Both commits are checked out into temporary worktrees and their extensions are built there. This file then runs once for
each of them, on this machine, with one thread and one named instruction set, and calls what users call: 50 training
steps of a flow and of a head, samples, entropies, the re-ranker with and without models, densities, all couplings and
transport plans, `Trust` with a certificate, and one Parquet file from every command that writes one. Results are
compared bit for bit. The exit status is 1 if one differs that `MOVED` does not name with a reason and a bound, and 2 if
nothing can be said. Nothing is stored, since machines differ.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
Arrays = dict[str, np.ndarray[Any, Any]]

MOVED: dict[str, tuple[float, str]] = {
    f"commands: watch.{column}": (np.inf, "deleted with thresholds that are carried over")
    for column in ("covered", "effective", "new_answered", "new_threshold")
}
OF_TRAINING = (
    *("models: tiny ", "models: anchored ", "models: bandwidth"),
    *("models: re-ranker t2i with flow", "models: re-ranker i2t with flow"),
    *("commands: entropy.", "commands: rerank.", "commands: density."),
)
MOVED["transport: sinkhorn"] = (2e-7, "costs are centred at their middle, which was that of the rounded scores")
MOVED |= dict.fromkeys(OF_TRAINING, (np.inf, "training draws the noise of a row from its number, on every device"))
"""Results, or beginnings of their names, that may differ: by how much at the most, and why."""


# ---- one side: runs with the package of one commit -----------------------------------------------------------------


def run(folder: Path) -> Arrays:
    """All results of the package that can be imported here, by name."""
    import torch

    torch.set_num_threads(1)
    found: Arrays = {}
    for part in (transport, search, models, decisions, commands):
        for name, value in part(folder):
            array = value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
            found[f"{part.__name__}: {name}"] = array
    return found


def seeded(seed: int) -> Any:
    import torch

    return torch.Generator().manual_seed(seed)


def unit_rows(rows: int, width: int, seed: int) -> Any:
    import torch

    return torch.nn.functional.normalize(torch.randn(rows, width, generator=seeded(seed)), dim=-1)


def transport(_: Path) -> Iterator[tuple[str, Any]]:
    """Every plan and coupling."""
    import geoflow_fast as gf

    sides = [unit_rows(300, width, seed) for seed, width in enumerate((24, 40, 24, 40))]
    for assignment in ("argmax", "sample", "exact"):
        yield (
            f"ot_assign {assignment}",
            gf.ops.ot_assign(*sides, eps=0.05, assignment=assignment, generator=seeded(1)),
        )
    for direction, names in (
        ("joint", ("paper", "sample", "exact", "independent")),
        ("t2i", ("paper", "independent", "c2ot")),
    ):
        for name in names:
            yield (
                f"couple {direction} {name}",
                gf.ops.couple(*sides, coupling=name, direction=direction, generator=seeded(2)),
            )
    cost = (unit_rows(200, 16, 5) @ unit_rows(150, 16, 6).T).arccos()
    for eps in (0.5, 0.05, 0.01):
        plan = gf.ops.sinkhorn(cost, eps=eps)
        yield f"sinkhorn {eps} potentials", np.concatenate((np.asarray(plan.f), np.asarray(plan.g)))


def search(_: Path) -> Iterator[tuple[str, Any]]:
    """Posteriors and searches of a gallery."""
    import torch

    import geoflow_fast as gf

    torch.manual_seed(0)
    for width in (7, 64, 512):
        gallery, queries = unit_rows(1023, width, 1), unit_rows(65, width, 2)
        cosine, index = gf.ops.gallery_search(queries, gallery, 20)
        yield f"search {width} cosines", cosine
        yield f"search {width} items", index
        samples = torch.nn.functional.normalize(
            queries[:13, None] + 0.1 * unit_rows(13 * 9, width, 3).view(13, 9, -1), dim=-1
        )
        post = gf.ops.gallery_posterior(samples, gallery, 50.0, top_k=10)
        for name in ("entropy", "top_index", "top_prob"):
            yield f"posterior {width} {name}", getattr(post, name)
    image, text, _ = gf.worlds.ConceptWorld().sample(500)
    mapped = gf.Gallery(image)
    for name, value in zip(("cosines", "items"), mapped.search(text[:50], 10)):
        yield f"Gallery.search {name}", value


def models(folder: Path) -> Iterator[tuple[str, Any]]:
    """Training, sampling, entropies, re-ranking and densities."""
    import torch

    import geoflow_fast as gf

    torch.manual_seed(0)
    image, text, _ = gf.worlds.ConceptWorld().sample(4000)
    pairs, held_out = gf.EmbeddingPairs.from_arrays(image[300:], text[300:]).split(0.1, seed=0)
    for kind, changes in (("tiny", {}), ("anchored", {"coupling": "independent"})):
        config = gf.GeoFlowConfig.tiny(24, 24) if kind == "tiny" else gf.GeoFlowConfig.auto(24, 24, 3330)
        torch.manual_seed(1)
        flow = gf.GeoFlow(config)
        conf = gf.TrainConfig(steps=50, batch_size=128, lr=2e-3, val_every=25, precision="float32", **changes)
        out = folder / f"flow_{kind}"
        gf.train(flow, pairs, conf, val=held_out, out=out)
        flow = gf.GeoFlow.from_pretrained(out)
        yield f"{kind} weights", torch.cat([x.flatten() for x in flow.state_dict().values() if x.is_floating_point()])
        for given in ({"text": text[:9]}, {"image": image[:9]}, {}):
            drawn = gf.sample(flow, **given, n_samples=5, n_steps=6, generator=seeded(3))
            name = next(iter(given), "nothing")
            for side, rows in zip(("image", "text"), drawn):
                yield f"{kind} samples given {name}, {side}", rows
        for direction in ("joint", "i2t", "t2i"):
            density = gf.log_density(flow, image[:33], text[:33], direction=direction, generator=seeded(4))
            yield f"{kind} log_density {direction}", density
        terms = gf.epistemic(flow, image[:17], text[:17], generator=seeded(5))
        for name in ("joint", "image", "text", "pmi", "score"):
            yield f"{kind} epistemic {name}", getattr(terms, name)
        scorer = gf.RetrievalEntropy(flow, image[:300], n_samples=20, n_steps=8)
        yield from posterior(f"{kind} entropy", scorer(text[:21]))
        yield from posterior(f"{kind} fast entropy", gf.RetrievalEntropy.fast(flow, image[:300])(text[:21]))
    torch.manual_seed(2)
    head = gf.PosteriorHead.fit(pairs, gf.HeadConfig(steps=50, batch_size=256), k=4, seed=0, out=folder / "head")
    yield "head weights", torch.cat([x.flatten() for x in head.state_dict().values() if x.is_floating_point()])
    for direction, gallery, queries in (("t2i", image[:300], text[:50]), ("i2t", text[:300], image[:50])):
        yield from posterior(
            f"head entropy {direction}", gf.RetrievalEntropy(head, gallery, direction=direction)(queries)
        )
        for name, parts in {
            "nothing": (None, None),
            "flow": (flow, None),
            "head": (None, head),
            "flow and head": (flow, head),
        }.items():
            reranker = gf.BayesReranker(parts[0], gallery, direction, head=parts[1])
            reranker.calibrate(held_out, max_queries=120)
            answers = reranker(queries)
            for field in ("index", "prob", "p_answer", "p_outside", "p_no_match", "relevance", "entropy"):
                value = getattr(answers, field)
                if value is not None:
                    yield f"re-ranker {direction} with {name}: {field}", value
    bandwidth = gf.fit_bandwidth(flow, held_out, "t2i", max_queries=64)
    yield "bandwidth", [bandwidth.kappa, bandwidth.guidance]


def posterior(name: str, post: Any) -> Iterator[tuple[str, Any]]:
    for field in ("entropy", "map_index", "map_prob", "risk_lower_bound"):
        yield f"{name}: {field}", getattr(post, field)


def judged(rows: int, seed: int) -> tuple[Any, Any]:
    """Lists of ten scores and grades of their hits; the larger the first score, the more probably it is right."""
    rng = np.random.default_rng(seed)
    scores = -np.sort(-rng.normal(0.25, 0.05, (rows, 10)), axis=1)
    grades = np.zeros((rows, 10), dtype=np.int64)
    right = rng.random(rows) < 1 / (1 + np.exp(-40 * (scores[:, 0] - 0.3)))
    grades[right, 0] = 1
    other = ~right & (rng.random(rows) < 0.6)
    grades[np.flatnonzero(other), rng.integers(1, 10, other.sum())] = 1
    return scores, grades


def decisions(_: Path) -> Iterator[tuple[str, Any]]:
    """Trust, its certificates and the rule's decisions."""
    import geoflow_fast as gf

    for kind in ("first hit", "all hits"):
        (scores, grades), (more, their), (live, _) = judged(250, 1), judged(900, 2), judged(400, 3)
        if kind == "first hit":
            grades, their = grades[:, 0], their[:, 0]
        trust = gf.Trust(seed=0).fit(scores, grades)
        yield f"{kind}: probabilities", trust.predict_proba(live)
        yield f"{kind}: relevance", trust.relevance(live)
        yield f"{kind}: no match", trust.p_no_match(live, 0.2)
        for error, share in ((0.3, 0.0), (0.4, 0.1)):
            rule = trust.certify(more, their, max_error=error, no_match_share=share)
            yield f"{kind}: threshold {error} {share}", rule.threshold
            yield f"{kind}: answered {error} {share}", rule(live)
    health = gf.watch(rule, np.concatenate((live, live - 0.05)), window=200, every=100)
    looks = [(look.expected, look.expected_error, look.no_match_share, look.p_value) for look in health.looks]
    yield "watch: looks", looks
    yield "watch: probabilities", health.p_right
    yield "watch: queries to label", health.to_label


def commands(folder: Path) -> Iterator[tuple[str, Any]]:
    """The tables that the commands write."""
    import torch

    import geoflow_fast as gf

    torch.manual_seed(3)
    image, text, _ = gf.worlds.ConceptWorld().sample(1500)
    files = {
        name: str(folder / f"{name}.npy") for name in ("images", "texts", "queries", "gallery", "scores", "labels")
    }
    scores, grades = judged(600, 4)
    for name, rows in {
        "images": image[300:],
        "texts": text[300:],
        "gallery": image[:300],
        "queries": text[:64],
        "scores": scores,
        "labels": grades[:, 0],
    }.items():
        np.save(files[name], np.asarray(rows))
    (folder / "texts.txt").write_text("a red ball\na blue ball\nsomething green\n")
    model, sides = str(folder / "run"), ["--queries", files["queries"], "--gallery", files["gallery"]]
    lists = ["--scores", files["scores"], "--labels", files["labels"]]
    embed = ["embed", "--texts", str(folder / "texts.txt"), "--encoder", "colours"]
    for name, words in {
        "train": ["train", "--images", files["images"], "--texts", files["texts"], "--preset", "tiny", "--steps", "30"],
        "entropy": ["entropy", "--model", model, *sides, "--top-k", "3"],
        "rerank": ["rerank", "--model", model, *sides],
        "density": ["density", "--model", model, "--images", files["gallery"], "--texts", files["queries"]],
        "trust": ["trust", "--trust", str(folder / "trust.json"), *lists],
        "threshold": ["threshold", "--rule", str(folder / "rule.json"), "--max-error", "0.4", *lists],
        "watch": ["watch", "--rule", str(folder / "rule.json"), "--queries", files["scores"]],
        "embed": embed,
    }.items():
        if name == "density":
            np.save(files["queries"], np.asarray(text[:300]))
        out = model if name == "train" else str(folder / f"{name}.parquet")
        done = subprocess.run(
            [sys.executable, "-m", "geoflow_fast", *words, "--out", out], capture_output=True, text=True, check=False
        )
        if done.returncode not in (0, 3):
            raise RuntimeError(f"geoflow {' '.join(words)}: {done.stderr}")
        if name != "train":
            yield from columns(name, Path(out))


def columns(name: str, path: Path) -> Iterator[tuple[str, Any]]:
    """The columns of a Parquet file, lists flattened."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    for column in table.column_names:
        values = table[column].combine_chunks()
        while hasattr(values, "flatten") and "list" in str(values.type):
            values = values.flatten()
        if "string" not in str(values.type):
            yield f"{name}.{column}", values.to_numpy(zero_copy_only=False)


# ---- both sides ----------------------------------------------------------------------------------------------------


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout.strip()


def results_of(commit: str, folder: Path, isa: str, stack: ExitStack) -> Arrays:
    """Builds a commit in a worktree and runs all calls with its package."""
    tree, work = folder / "tree", folder / "work"
    work.mkdir(parents=True)
    git("worktree", "add", "--detach", "--quiet", str(tree), commit)
    stack.callback(git, "worktree", "remove", "--force", str(tree))
    environment = {**os.environ, "GEOFLOW_CUDA": "0", "GEOFLOW_ISA": isa, "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONPATH": str(tree), "PYTHONHASHSEED": "0", "PYTHONWARNINGS": "ignore"}
    (tree / "geoflow_fast" / "kernels").symlink_to(tree / "kernels")
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, cwd=tree, env=environment, check=True, capture_output=True)
    own = [sys.executable, str(Path(__file__).resolve()), "--run", str(work)]
    subprocess.run(own, cwd=work, env=environment, check=True)
    with np.load(work / "results.npz") as stored:
        return dict(stored)


def difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """0 for equal bits, otherwise the largest difference, infinite where shapes or kinds differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return np.inf
    if a.tobytes() == b.tobytes():
        return 0.0
    if a.dtype.kind not in "fiub":
        return np.inf
    apart = np.abs(a.astype(np.float64) - b.astype(np.float64))[
        ~(np.isnan(a) & np.isnan(b)) if a.dtype.kind == "f" else ...
    ]
    return float(apart.max(initial=0)) or 5e-324


def verdict(a: Arrays, b: Arrays, report: Callable[[str], None]) -> int:
    """Tells of every result that differs, and returns the exit status."""
    wrong = 0
    for name in sorted(set(a) | set(b)):
        apart = difference(a[name], b[name]) if name in a and name in b else np.inf
        if apart == 0:
            continue
        bound, reason = next((MOVED[key] for key in MOVED if name.startswith(key)), (0.0, "not expected"))
        wrong += apart > bound
        size = float(np.abs(a[name]).max()) if name in a and a[name].dtype.kind == "f" and a[name].size else 1.0
        report(f"{'DIFFERS' if apart > bound else 'moved  '} {name}: by {apart:.3g} of {size:.3g} ({reason})")
    equal = sum(difference(a[name], b[name]) == 0 for name in set(a) & set(b))
    report(f"{equal} of {len(set(a) | set(b))} results are equal bit for bit; {wrong} differ without a reason")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.same_numbers", description=__doc__)
    parser.add_argument("commits", nargs="*", metavar="A B")
    parser.add_argument("--isa", default="avx2", help="instruction set of both sides")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.run:
        np.savez(given.run / "results.npz", **run(given.run))
        return 0
    if len(given.commits) != 2:
        parser.error("two commits are needed")
    try:
        with ExitStack() as stack:
            base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="geoflow-numbers-")))
            sides = [results_of(commit, base / side, given.isa, stack) for side, commit in zip("AB", given.commits)]
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"same_numbers: {error}", file=sys.stderr)
        return 2
    return verdict(*sides, print)


if __name__ == "__main__":
    raise SystemExit(main())
