"""Distils a flow's scorer: a network learns the samples of the flow by regression, and is compared with it on held-out
queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from geoflow_fast.data.rows import Array, Index
from geoflow_fast.geometry import check_rows
from geoflow_fast.head.config import DistilConfig
from geoflow_fast.head.fitting import ridge_map
from geoflow_fast.head.sampler import DistilAgreement, DistilledSampler, Scoring, save_sampler
from geoflow_fast.retrieval.entropy import RetrievalEntropy
from geoflow_fast.retrieval.sources import FlowSource
from geoflow_fast.runtime import checks, hashing
from geoflow_fast.runtime.files import contents_of
from geoflow_fast.runtime.progress import Advance, progress_bar
from geoflow_fast.runtime.tensors import load_tensors, save_tensors
from geoflow_fast.training.batches import RowBatch, ShuffledBatches, validation_index
from geoflow_fast.training.loop import Run, complete
from geoflow_fast.training.objective import Objective

HELD_OUT_SHARE = 0.1
LEAST_HELD_OUT = 3
"""A rank correlation of fewer queries says nothing."""
MOST_BYTES = 8 << 30
"""Bytes of the flow's samples that are kept in memory, at most."""
SAMPLES_FILE = "teacher.safetensors"
SAMPLES_KIND = "samples of a flow"


@dataclass(frozen=True)
class Lessons:
    """Queries [Q, d] and the samples [Q, M, d'] of the flow for them; float32 on the CPU."""

    queries: Tensor
    samples: Tensor

    def __len__(self) -> int:
        return len(self.queries)

    def fingerprint(self) -> str:
        """A hash of the queries; the samples follow from them."""
        return hashing.digest([self.queries])

    def batch(self, index: Index, device: torch.device) -> RowBatch:
        """These rows on a device."""
        chosen = torch.from_numpy(index)
        return RowBatch(tuple(x[chosen].to(device, non_blocking=True) for x in (self.queries, self.samples)))

    def part(self, low: int, high: int) -> Lessons:
        """Some of the rows."""
        return Lessons(self.queries[low:high], self.samples[low:high])


class SampleRegression(Objective[RowBatch]):
    """Regression of the samples of a flow on the query: the mean squared distance of a query's samples."""

    ROWS = "queries"
    pairs: Lessons
    val: Lessons
    config: DistilConfig

    def __init__(self, sampler: DistilledSampler, lessons: Lessons, val: Lessons, config: DistilConfig) -> None:
        super().__init__(sampler, lessons, val, config, sampler.facts())
        self.sampler, self.device = sampler, sampler.centre.device
        self.order = ShuffledBatches(len(lessons), config.batch_size, config.seed)

    @torch.no_grad()
    def prepare(self) -> None:
        """Starts from the mean of each sample, and from the linear map that fits the mean of a query's samples best."""
        queries, samples = self.pairs.queries.double(), self.pairs.samples
        centre, moved = samples.mean(0, dtype=torch.float64), samples.mean(1, dtype=torch.float64)
        base = ridge_map(queries, moved - centre.mean(0))
        self.sampler.base.weight.copy_(base)
        self.sampler.centre.copy_(centre - queries.mean(0) @ base.T)

    def training_batch(self, step: int) -> RowBatch:
        """Shuffled queries and their samples."""
        return self.pairs.batch(self.order[step], self.device)

    def validation_batch(self, number: int) -> RowBatch:
        """Validation queries, in order."""
        return self.val.batch(validation_index(self.val, self.config.batch_size, number), self.device)

    def losses(self, batch: RowBatch) -> Tensor:
        """Mean squared distance between the samples of each query [B] and those of the flow."""
        queries, samples = batch.tensors
        drawn = self.sampler(queries, self.config.dropout if self.sampler.training else 0.0)
        return (drawn - samples).square().sum(-1).mean(1)

    def export(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Writes what `RetrievalEntropy.from_pretrained` reads, without an agreement as yet."""
        save_sampler(folder, self.sampler, weights, self.sampler.scoring, self.sampler.reference)


def distil(
    scorer: RetrievalEntropy,
    queries: Tensor | Array,
    held_out: Tensor | Array | None,
    conf: DistilConfig | None,
    out: str | Path | None,
    *,
    seed: int | None,
    resume: bool,
    progress: bool | None,
) -> RetrievalEntropy:
    """Does the work of `RetrievalEntropy.distil`."""
    source = _teacher(scorer)
    if conf is not None and not isinstance(conf, DistilConfig):
        raise TypeError(f"conf must be a DistilConfig, got {type(conf).__name__}")
    config = conf or DistilConfig()
    if seed is not None:
        config = dataclasses.replace(config, seed=checks.integer(seed, "seed"))
    folder = None if out is None else checks.path(out, "out")
    rows, unseen = _split(scorer, queries, held_out, config)
    _check_memory(len(rows), source)
    with progress_bar(len(rows) + len(unseen), 0, "queries", shown=progress) as advance:
        lessons = draw_lessons(source, rows, folder, resume=resume, advance=advance)
        expected = scorer(unseen, advance=advance).entropy
    sampler = _sampler_for(scorer, source, config)
    sampler.report = {"finished": False}  # while it is trained
    # The validation queries come last; `_split` has shuffled them.
    count = len(lessons) - max(1, round(config.val_fraction * len(lessons)))
    config = dataclasses.replace(config, batch_size=min(config.batch_size, count))
    objective = SampleRegression(sampler, lessons.part(0, count), lessons.part(count, len(lessons)), config)
    report = complete(Run(objective), folder, resume=resume, progress=progress)
    sampler.report = {"finished": report.finished, "steps": report.steps, "best_step": report.best_step}
    student = RetrievalEntropy(sampler, scorer.gallery, str(scorer.direction), top_k=scorer.top_k)
    sampler.agreement = agreement(student(unseen).entropy, expected, len(scorer.gallery))
    if folder is not None:
        student.save_pretrained(folder)
    return student


def _teacher(scorer: RetrievalEntropy) -> FlowSource:
    """The flow's samples, after checking that a sampler can take their place."""
    source = scorer.source
    if not isinstance(source, FlowSource):
        raise TypeError(f"only a flow's scorer can be distilled: a {source.NAME} takes one call of a network already")
    if not source.flow.config.manifold.unit_norm:
        raise ValueError("the samples of a Euclidean flow cannot be distilled: they are not on the sphere")
    if scorer.posterior == "bayes" and scorer.marginal == "density":
        raise ValueError('a distilled scorer has no density for reference="density"; give reference= queries [R, d]')
    if scorer.gallery.is_divided:
        raise ValueError("distil the scorer before its gallery is divided among ranks")
    return source


def _split(
    scorer: RetrievalEntropy, queries: Tensor | Array, held_out: Tensor | Array | None, config: DistilConfig
) -> tuple[Tensor, Tensor]:
    """The queries to learn from, shuffled, and those held out; float32 on the CPU."""
    plain = torch.empty(0, dtype=torch.float32, device="cpu")
    rows = checks.rows(queries, "queries", scorer.query_dim, plain, "Q")
    check_rows(rows, "queries")
    order = torch.from_numpy(np.random.default_rng(config.seed).permutation(len(rows)))
    if held_out is None:
        count = max(LEAST_HELD_OUT, round(HELD_OUT_SHARE * len(rows)))
        unseen, order = rows[order[:count]], order[count:]
    else:
        unseen = checks.rows(held_out, "held_out", scorer.query_dim, plain, "Q")
        check_rows(unseen, "held_out")
        if len(unseen) < LEAST_HELD_OUT:
            raise ValueError(f"held_out must be at least {LEAST_HELD_OUT} queries, got {len(unseen)}")
    if len(order) < 2:
        least = 2 + (LEAST_HELD_OUT if held_out is None else 0)
        raise ValueError(f"queries must be at least {least}, better a thousand or more, got {len(rows)}")
    return rows[order], unseen


def _check_memory(count: int, source: FlowSource) -> None:
    """Raises a ValueError if the samples of so many queries need more memory than is allowed."""
    each = source.sampling.n_samples * source.item_dim * torch.float32.itemsize
    if count * each > MOST_BYTES:
        raise ValueError(
            f"the samples of {count} queries take {count * each / 2**30:.1f} GiB, and at most {MOST_BYTES / 2**30:g} "
            f"GiB are kept in memory; pass at most {MOST_BYTES // each} queries to learn from"
        )


def draw_lessons(
    source: FlowSource, queries: Tensor, folder: Path | None, *, resume: bool, advance: Advance
) -> Lessons:
    """Draws the flow's samples for the queries. A folder keeps them for the next time, since they cost more than the
    training."""
    path = None if folder is None else folder / SAMPLES_FILE
    facts = {**_facts(source), "queries": hashing.digest([queries])}
    if path is not None and resume and path.is_file():
        tensors, info = load_tensors(path, kind=SAMPLES_KIND)
        if info == facts:
            advance(len(queries))
            with contents_of(path):
                return Lessons(queries, tensors["samples"])
    samples = source.draw(queries, advance).samples.to("cpu", torch.float32)
    if path is not None:
        save_tensors(path, {"samples": samples}, kind=SAMPLES_KIND, info=facts)
    return Lessons(queries, samples)


def _facts(source: FlowSource) -> dict[str, Any]:
    """What the flow's samples depend on besides the query."""
    settings = {name: value for name, value in source.settings.items() if name != "kappa"}
    return {"flow": source.digest(), **settings, **source.solver_settings}


def _sampler_for(scorer: RetrievalEntropy, source: FlowSource, config: DistilConfig) -> DistilledSampler:
    """A sampler that has learned nothing yet, for the use that `scorer` makes of its flow."""
    scoring = Scoring(scorer.direction, source.kappa, scorer.posterior, scorer.top_k)
    with torch.random.fork_rng([]), torch.device("cpu"):
        torch.manual_seed(config.seed)
        sampler = DistilledSampler(
            config, source.query_dim, source.item_dim, source.sampling.n_samples, scoring, _facts(source)
        )
    sampler.reference = None if scorer.reference is None else scorer.reference.float()
    return sampler.to(source.example.device)


def agreement(entropy: Tensor, expected: Tensor, items: int) -> DistilAgreement:
    """How far entropies [Q] of one scorer agree with those that another one gives the same queries."""
    ours, theirs = (x.double().cpu().numpy() for x in (entropy, expected))
    constant = np.ptp(ours) == 0 or np.ptp(theirs) == 0
    spearman = float("nan") if constant else float(stats.spearmanr(ours, theirs).statistic)
    return DistilAgreement(spearman, float(np.abs(ours - theirs).mean()), len(ours), items)
