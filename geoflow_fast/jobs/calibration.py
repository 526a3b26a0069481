"""What `geoflow train` stores beside a model for calibrated results: pairs that no model has seen, the kernel's
concentration and the guidance that suit them, and the weights of the ladder of evidence.

Everything is in the folder `calibration` of the model, so that a copied model works elsewhere; only the ladder is where
`BayesReranker.load_calibration` looks for it.
"""

from __future__ import annotations

import copy
import dataclasses
import errno
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from geoflow_fast.data.embeddings import IMAGE_IDS, TEXT_IDS
from geoflow_fast.data.ids import open_ids, row_numbers
from geoflow_fast.data.pairs import INDEX_FILE, OWN_FILES, EmbeddingPairs
from geoflow_fast.directions import CONDITIONAL, Direction
from geoflow_fast.distributed import ALONE, World
from geoflow_fast.flow.model import GeoFlow, flow_digest
from geoflow_fast.head.model import HEAD_FOLDER, PosteriorHead
from geoflow_fast.retrieval.bandwidth import fit_bandwidth
from geoflow_fast.retrieval.entropy import RetrievalEntropy
from geoflow_fast.retrieval.gallery import Gallery
from geoflow_fast.retrieval.rerank import BANK_DIGITS, BANK_SUFFIX, BayesReranker
from geoflow_fast.retrieval.task import RetrievalTask, drawn_rows
from geoflow_fast.runtime import hashing
from geoflow_fast.runtime.files import (
    LOCK_FILE,
    contents_of,
    locked,
    read_json,
    refuse_foreign,
    remove_own,
    sync_folder,
    write_json,
)
from geoflow_fast.runtime.progress import Announce
from geoflow_fast.training.loop import CHECKPOINT_FILE

CALIBRATION_FOLDER, HELD_OUT_FOLDER, SETTINGS_FILE = "calibration", "held_out", "settings.json"
OWN = "|".join(
    [
        re.escape(SETTINGS_FILE),
        re.escape(LOCK_FILE),
        rf"(?:{HELD_OUT_FOLDER}|\.{HELD_OUT_FOLDER}\.tmp)/(?:{OWN_FILES})",
    ]
)
"""What is stored in the folder, as a pattern. Nothing else is ever removed."""
LADDER_FILES = tuple(
    f"rerank_{direction}{ending}"
    for direction in CONDITIONAL
    for ending in (".json", f".{'[0-9a-f]' * BANK_DIGITS}{BANK_SUFFIX}")
)
"""Patterns of the files beside the folder that hold the weights of the ladder, and the banks of these."""
KIND, VERSION = "calibration of a trained model", 1
FEWEST_IMAGES, USUAL_IMAGES, MOST_IMAGES = 60, 100, 1000
"""Images that are held out: with fewer a calibration would often lack the 50 queries it needs, with more it would gain
nothing."""
USUAL_SHARE, LARGEST_SHARE = 0.1, 1 / 3
GUIDANCES = (0.0, 1.0, 3.0)
COST_SHARE = 0.2
"""The calibration may take this share of the time of training, beyond the fewest queries that it needs."""
LADDER_ROWS, BANDWIDTH_ROWS = 290, 800
"""What a query of the ladder and one of the bandwidth cost, in rows that go through the network forwards, as measured
with the preset `tiny`."""
LADDER_QUERIES, BANDWIDTH_QUERIES = (150, 500), (48, 256)
"""The fewest and the most queries for each direction."""
GALLERY_ITEMS = 20_000
"""Training items, at most, that serve as the gallery at the end of training."""
IMAGE_BLOCK = 65_536
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class HeldOutPairs:
    """Which pairs were held out of training."""

    pairs: int
    images: int
    of_images: int
    """All images that there were; 0 if the held-out pairs came from a folder of their own."""
    seed: int
    fingerprint: str
    """The fingerprint of the pairs as they were read, which is compared when a run is continued."""

    def __str__(self) -> str:
        texts = "" if self.pairs == self.images else f" with {self.pairs:,} texts"
        return f"{self.images:,} held-out images{texts}"


@dataclass(frozen=True)
class StoredCalibration:
    """What is stored beside a model. `bandwidth` and `ladder` have an entry for each direction that is done."""

    folder: Path
    """The folder of the model."""
    held_out: HeldOutPairs
    bandwidth: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By direction: kappa, guidance, the flow for which they were fitted, and how held-out queries fared with them."""
    ladder: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By direction: what the stored weights of the ladder were fitted for, the number of items of that gallery, and the
    digest of their file; or the reason why there are none."""

    @classmethod
    def read(cls, model: Path) -> StoredCalibration | None:
        """What is stored in the folder of a model; None if nothing is. A damaged file is a ValueError."""
        file = model / CALIBRATION_FOLDER / SETTINGS_FILE
        if not file.is_file():
            return None
        stored = read_json(file, "a calibration of a model")
        if not isinstance(stored, dict) or stored.get("kind") != KIND:
            raise ValueError(f"{file} is not the calibration of a model")
        if stored.get("version") != VERSION:
            raise ValueError(f"{file} is not of version {VERSION}")
        with contents_of(file):
            known = cls(model, HeldOutPairs(**stored["held_out"]), {**stored["bandwidth"]}, {**stored["ladder"]})
            for direction, fitted in known.bandwidth.items():
                Direction.of(direction, conditional=True)
                if not all(math.isfinite(fitted[name]) for name in ("kappa", "guidance", "half", "half_right")):
                    raise ValueError(f"its {direction} settings are {fitted}")
            if not all(isinstance(entry, dict) for entry in known.ladder.values()):
                raise ValueError(f"its ladder is {known.ladder}")
        return known

    def write(self) -> None:
        """Writes everything but the held-out pairs themselves, atomically."""
        content = {name: value for name, value in dataclasses.asdict(self).items() if name != "folder"}
        write_json(self.folder / CALIBRATION_FOLDER / SETTINGS_FILE, {"kind": KIND, "version": VERSION, **content})

    def pairs(self, world: World = ALONE) -> EmbeddingPairs:
        """The held-out pairs."""
        return EmbeddingPairs.open(self.folder / CALIBRATION_FOLDER / HELD_OUT_FOLDER, world=world)

    def with_ladder(self, direction: Direction, entry: Mapping[str, Any]) -> StoredCalibration:
        """The same with another entry for the ladder of one direction."""
        return dataclasses.replace(self, ladder={**self.ladder, str(direction): {**entry}})

    def bandwidth_of(self, flow: GeoFlow, direction: Direction | str) -> dict[str, Any] | None:
        """kappa, guidance and the rest for one direction; None if they were not fitted, or for other weights."""
        fitted = self.bandwidth.get(str(direction))
        return fitted if fitted is not None and fitted.get("flow") == flow_digest(flow) else None


def images_to_hold_out(images: int) -> int:
    """How many of so many images `geoflow train` holds out by default: a tenth, at least 100 and at most 1,000, but not
    more than a third; 0 if that third were too few."""
    most = math.floor(LARGEST_SHARE * images)
    return 0 if most < FEWEST_IMAGES else min(MOST_IMAGES, most, max(USUAL_IMAGES, round(USUAL_SHARE * images)))


def hold_out(
    pairs: EmbeddingPairs,
    out: Path,
    asked: float | int | EmbeddingPairs | None,
    seed: int,
    *,
    restart: bool = False,
    ids: Path | None = None,
    announce: Announce,
    world: World = ALONE,
) -> EmbeddingPairs:
    """Writes the held-out pairs of a run into its folder and returns the others, on which to train.

    `asked`: the share of the images to hold out, at least one of them, or their number, or pairs of other images; None
    for the usual share. A run that began without held-out pairs continues without them, unless `restart` is set. Beside
    the held-out pairs are the `ids` of their texts, those that the pairs come with, or the numbers of their rows.
    """
    if ids is not None:
        pairs = _with_ids(pairs, ids)
    stored = world.share(StoredCalibration.read(out) if world.is_main and not restart else None)
    went_without = stored is None and not restart and world.share(_has_begun(out))
    if went_without and asked is None:
        announce(f"{out} was begun without held-out pairs for calibration, and goes on without them")
        return pairs
    images = len(np.unique(pairs.group))
    if isinstance(asked, EmbeddingPairs):
        _refuse_shared_images(pairs, asked)
        rest, held_out, of_images = pairs, asked, 0
    else:
        if asked is None:
            count = images_to_hold_out(images)
        else:
            count = asked if isinstance(asked, int) else max(1, round(asked * images))
        count = stored.held_out.images if stored is not None and asked is None else count
        if asked is None and count == 0:
            least = math.ceil(FEWEST_IMAGES / LARGEST_SHARE)
            announce(f"{images} images are too few to hold some out for calibration; {least} are needed")
            if restart and world.is_main:
                forget_calibration(out)
            return pairs
        if went_without:
            raise ValueError(
                f"{out} was begun without held-out pairs, so it was trained on those that a share would hold out; "
                "leave out --held-out, name a folder of other pairs, or start again with --overwrite"
            )
        rest, held_out = pairs.split(count, seed)
        of_images = images
    facts = HeldOutPairs(len(held_out), len(np.unique(held_out.group)), of_images, seed, held_out.fingerprint())
    if stored is not None and stored.held_out != facts:
        raise ValueError(
            f"{out / CALIBRATION_FOLDER} holds other pairs ({stored.held_out}) than this command would hold out "
            f"({facts}); use a new folder, or the flags and files with which the run began"
        )
    if world.is_main and stored is None:
        if restart:
            forget_calibration(out)
        _write_held_out(held_out, out, facts)
    world.barrier()
    of = f" of {images:,}" if of_images else ""
    announce(
        f"{facts}{of} for calibration, which nothing is trained on (--held-out changes them, --no-calibrate needs none)"
    )
    return rest


def _has_begun(out: Path) -> bool:
    return any((folder / CHECKPOINT_FILE).is_file() for folder in (out, out / HEAD_FOLDER))


def _refuse_shared_images(train: EmbeddingPairs, held_out: EmbeddingPairs) -> None:
    """Raises a ValueError if an image of the held-out pairs is one of those trained on."""
    known = {image for block in _image_blocks(held_out) for image in block}
    shared = {image for block in _image_blocks(train) for image in block if image in known}
    if shared:
        raise ValueError(
            f"{len(shared):,} of the {len(known):,} held-out images are training images, too; hold out pairs of other "
            "images, such as one part of `EmbeddingPairs.split`"
        )


def _image_blocks(pairs: EmbeddingPairs) -> Iterator[list[bytes]]:
    """The embeddings of all images, in half precision, which is how folders often store them."""
    rows = np.unique(pairs.image_row)
    for first in range(0, len(rows), IMAGE_BLOCK):
        block = pairs.image[rows[first : first + IMAGE_BLOCK]].astype(np.float16)
        yield [row.tobytes() for row in block]


def forget_calibration(out: Path) -> None:
    """Removes what is stored beside the model of an earlier run in the folder `out`: its held-out pairs, on which the
    next run may train, and all that was fitted to them. The settings go first, since they make the rest count."""
    if not out.is_dir():
        return
    with locked(out):
        folder = out / CALIBRATION_FOLDER
        if folder.exists():
            refuse_foreign(folder, OWN)
        (folder / SETTINGS_FILE).unlink(missing_ok=True)
        for file in [file for pattern in LADDER_FILES for file in out.glob(pattern)]:
            file.unlink()
        if folder.exists():
            remove_own(folder, OWN, SETTINGS_FILE)


def _write_held_out(held_out: EmbeddingPairs, out: Path, facts: HeldOutPairs) -> None:
    """Writes the pairs under a temporary name and renames them; the settings, which come last, make them count."""
    folder = out / CALIBRATION_FOLDER
    whole = folder / HELD_OUT_FOLDER
    if whole.exists():
        remove_own(whole, OWN_FILES, INDEX_FILE)
    folder.mkdir(parents=True, exist_ok=True)
    write_pairs(held_out, whole)
    StoredCalibration(out, facts).write()


def _with_ids(pairs: EmbeddingPairs, ids: Path) -> EmbeddingPairs:
    """The same pairs, with the ids of their texts that a file holds."""
    named = pairs.subset(np.arange(len(pairs)))
    named.text = copy.copy(pairs.text)
    named.text.ids = open_ids(ids, len(named.text), "texts")
    return named


def write_pairs(pairs: EmbeddingPairs, folder: Path) -> None:
    """Writes pairs and the ids of their texts and images, or the numbers of their rows, under a temporary name, and
    renames it. Pairs in half precision stay so."""
    begun = folder.with_name(f".{folder.name}.tmp")
    if begun.exists():
        remove_own(begun, OWN_FILES, INDEX_FILE)
    stored = {part.dtype for rows in (pairs.image, pairs.text) for part in rows.parts}
    pairs.save(begun, dtype=np.float16 if stored == {np.dtype(np.float16)} else np.float32)
    for file, rows, kept in (
        (TEXT_IDS, pairs.text, pairs.text_row),
        (IMAGE_IDS, pairs.image, np.unique(pairs.image_row)),
    ):
        if rows.ids is None:
            row_numbers(len(rows)).save(begun / file, kept, are_given=False)
    begun.rename(folder)
    sync_folder(folder.parent)


def calibrate_model(
    out: Path,
    train: EmbeddingPairs,
    flow: GeoFlow | None,
    head: PosteriorHead | None,
    *,
    trained_rows: float,
    seed: int,
) -> StoredCalibration | None:
    """Fits what is missing of the calibration of the model in the folder `out`, in both directions, and stores it.

    `train`: the pairs that it was trained on, whose items serve as the gallery of the ladder. `trained_rows`: the rows
    that training took through the network, which bound the cost. None if no pairs were held out.
    """
    stored = StoredCalibration.read(out)
    if stored is None:
        return None
    held_out = stored.pairs()
    for direction in CONDITIONAL:
        if flow is not None and stored.bandwidth_of(flow, direction) is None:
            queries = affordable(trained_rows, BANDWIDTH_ROWS, BANDWIDTH_QUERIES)
            fitted = fitted_bandwidth(flow, held_out, direction, queries, seed)
            stored = dataclasses.replace(stored, bandwidth={**stored.bandwidth, str(direction): fitted})
            stored.write()
        if head is None and held_out.image_dim != held_out.text_dim:
            reason = "images and texts differ in width, so shortlists need a head"
            stored = stored.with_ladder(direction, {"reason": reason})
            stored.write()
            continue
        by = "cosine" if held_out.image_dim == held_out.text_dim else "head"
        items = training_gallery(train, direction, seed)
        reranker = BayesReranker(flow, items, direction, head=head, shortlist_by=by, seed=seed)
        reranker = reranker.to(reranker.example.device)
        is_done = stored.ladder.get(str(direction), {}).get("models") == _models(reranker)
        if not is_done and not made_elsewhere(reranker.calibration_file(out), held_out):
            queries = affordable(trained_rows, LADDER_ROWS, LADDER_QUERIES)
            stored = settle_ladder(stored, reranker, held_out, max_queries=queries)
    return stored


def affordable(trained_rows: float, rows_per_query: int, bounds: tuple[int, int]) -> int:
    """How many queries of one direction to calibrate on: the bandwidth and the ladder have half of the budget each, and
    both directions half of that."""
    least, most = bounds
    return min(most, max(least, int(COST_SHARE * trained_rows / 4 / rows_per_query)))


def training_gallery(train: EmbeddingPairs, direction: Direction, seed: int) -> Gallery:
    """The items that the model was trained on, or as many as make a gallery for its calibration."""
    rows = direction.items(np.unique(train.image_row), train.text_row)
    chosen = rows[drawn_rows(len(rows), GALLERY_ITEMS, seed)]
    return Gallery(torch.from_numpy(direction.items(train.image, train.text)[chosen]))


def fitted_bandwidth(
    flow: GeoFlow, held_out: EmbeddingPairs, direction: Direction, queries: int, seed: int
) -> dict[str, Any]:
    """kappa and guidance for one direction, and how the held-out queries fare with them: the share "half" that has an
    item of probability 1/2 or more, and the share "half_right" of those for which it is right."""
    fit = fit_bandwidth(flow, held_out, direction, guidances=GUIDANCES, max_queries=queries, seed=seed)
    task = RetrievalTask.of(held_out, direction, max_queries=queries, seed=seed, any_widths=True)
    scorer = RetrievalEntropy.fast(flow, task.items, direction, kappa=fit.kappa, guidance=fit.guidance, seed=seed)
    post = scorer.to(next(flow.parameters()).device)(task.queries)
    half = (post.map_prob >= 0.5).cpu()
    right = task.is_right(post.map_index)
    return {
        "kappa": fit.kappa,
        "guidance": fit.guidance,
        "nll": fit.nll,
        "queries": len(task),
        "items": len(task.items),
        "half": float(half.double().mean()),
        "half_right": float(right[half].double().mean()) if bool(half.any()) else 0.0,
        "flow": flow_digest(flow),
    }


def made_elsewhere(file: Path, held_out: EmbeddingPairs) -> bool:
    """Whether a file of the ladder's weights exists that was fitted on other pairs, which the user then chose."""
    if not file.is_file():
        return False
    known = read_json(file, "a calibration")
    return not isinstance(known, dict) or known.get("pairs") != held_out.fingerprint()


def made_in_training(file: Path) -> bool:
    """Whether a file of the ladder's weights in the folder of a model was fitted on what its training held out."""
    stored = StoredCalibration.read(file.parent)
    return stored is not None and file.is_file() and not made_elsewhere(file, stored.pairs())


def settle_ladder(
    stored: StoredCalibration, reranker: BayesReranker, held_out: EmbeddingPairs, *, max_queries: int
) -> StoredCalibration:
    """Gives the re-ranker the stored weights of the ladder if they were fitted for its gallery and settings. Otherwise
    fits them to the held-out queries in this gallery and stores them; if that cannot be done, the entry says why.

    In a world of several ranks the main rank does it. A folder that cannot be written to is no obstacle to one alone.
    """
    world, file = reranker.gallery.world, reranker.calibration_file(stored.folder)
    wanted = _ladder_facts(reranker, max_queries)
    entry = stored.ladder.get(str(reranker.direction), {})
    is_known = entry.get("for") == wanted
    if world.share(is_known and "reason" in entry):
        return stored
    if world.share(is_known and "file" in entry and _file_digest(file) == entry["file"]):
        reranker.load_calibration(file)
        return stored
    entry = {"for": wanted, "models": _models(reranker), "items": len(reranker.gallery)}
    if world.is_main:
        entry |= _fit_ladder(reranker, held_out, max_queries)
        entry |= _kept(stored, reranker, entry, file)
    entry = world.share(entry)
    if world.size > 1 and "file" in entry:
        reranker.load_calibration(file)
    return stored.with_ladder(reranker.direction, entry)


def _fit_ladder(reranker: BayesReranker, held_out: EmbeddingPairs, max_queries: int) -> dict[str, Any]:
    """Calibrates the re-ranker: what its entry of the stored calibration says about that."""
    try:
        fitted = reranker.calibrate(held_out, max_queries=max_queries)
    except ValueError as error:
        return {"reason": str(error)}
    return {"evidence": list(fitted.by_feature), "queries": fitted.queries}


def _kept(stored: StoredCalibration, reranker: BayesReranker, entry: dict[str, Any], file: Path) -> dict[str, Any]:
    """Saves the weights, if there are any, and their entry: the digest of their file, or why nothing could be kept.

    Meanwhile other processes wait that save theirs; entries that they have written since `stored` was read are kept.
    """
    is_fitted, more = "reason" not in entry, {}
    try:
        with locked(stored.folder / CALIBRATION_FOLDER, wait=True):
            if is_fitted:
                reranker.save_calibration(file)
                more = {"file": _file_digest(file)}
            latest = StoredCalibration.read(stored.folder) or stored
            latest.with_ladder(reranker.direction, {**entry, **more}).write()
    except OSError as error:
        if error.errno not in READ_ONLY or (is_fitted and reranker.gallery.world.size > 1):
            raise
        return {"not_kept": str(error.strerror)}
    return more


def _ladder_facts(reranker: BayesReranker, max_queries: int) -> str:
    """A digest of everything that weights fitted on the stored pairs depend on."""
    facts = {**searched_facts(reranker), "seed": reranker.seed, "max_queries": max_queries}
    return hashing.fingerprint({**facts, **reranker.made_for})


def searched_facts(reranker: BayesReranker) -> dict[str, str]:
    """Digests of the gallery of a re-ranker, and of its bank of queries if one was given."""
    bank = hashing.digest([reranker.bank]) if reranker.bank_is_given and reranker.bank is not None else ""
    return {"gallery": reranker.gallery.digest(), "bank": bank}


def _models(reranker: BayesReranker) -> dict[str, str]:
    """The digests of the models that a re-ranker asks."""
    return {name: digest for name, digest in reranker.made_for.items() if name in ("flow", "head")}


def _file_digest(file: Path) -> str | None:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def outcome(stored: StoredCalibration) -> list[str]:
    """What the end of training has fitted, in a line for each direction, and what is fitted later."""
    return [*fitted_lines(stored), "`geoflow rerank` fits the evidence again to the gallery it is given"]


def fitted_lines(stored: StoredCalibration, *, with_reasons: bool = True) -> list[str]:
    """What the end of training has fitted, in a line for each direction. `with_reasons`: also why something could not
    be fitted, which may name files."""
    lines = []
    for direction in map(str, CONDITIONAL):
        fitted, entry = stored.bandwidth.get(direction), stored.ladder.get(direction)
        parts = [] if fitted is None else [f"kappa {fitted['kappa']:.3g}, guidance {fitted['guidance']:g}"]
        if entry is not None and "reason" in entry:
            parts.append("no probabilities of re-ranked items" + f": {entry['reason']}" * with_reasons)
        elif entry is not None:
            evidence = " + ".join(name.replace("_", " ") for name in entry["evidence"])
            parts.append(f"{evidence} on {entry['queries']} queries in a gallery of {entry['items']:,} training items")
        lines.append(f"calibrated {direction}: {'; '.join(parts)}")
    return lines
