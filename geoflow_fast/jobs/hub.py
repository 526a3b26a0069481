"""The folder of a run of `geoflow train` on the Hugging Face hub: its model card, and its upload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geoflow_fast.data.cards import model_card
from geoflow_fast.flow.model import GeoFlow
from geoflow_fast.head.model import HEAD_FOLDER, PosteriorHead
from geoflow_fast.jobs.calibration import (
    CALIBRATION_FOLDER,
    HELD_OUT_FOLDER,
    LADDER_FILES,
    SETTINGS_FILE,
    StoredCalibration,
    fitted_lines,
)
from geoflow_fast.jobs.entropy import HEAD, model_kind
from geoflow_fast.runtime import checks, hub
from geoflow_fast.runtime.hub import WEIGHTS_FILE
from geoflow_fast.runtime.pretrained import refuse_training_rows

RUN_FILES = (*hub.MODEL_FILES, *(f"{HEAD_FOLDER}/{name}" for name in hub.MODEL_FILES))
"""The files of a run that are uploaded: its models, without any calibration."""
HELD_OUT_FILES = (
    f"{CALIBRATION_FOLDER}/{SETTINGS_FILE}",
    f"{CALIBRATION_FOLDER}/{HELD_OUT_FOLDER}/*",
    *LADDER_FILES,
)
"""Patterns of the files that contain held-out embeddings, or are of no use without them."""


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    *,
    held_out: bool = False,
    training_rows: bool = False,
    commit_message: str = "Upload a run of geoflow train",
    private: bool | None = None,
    token: str | None = None,
    branch: str | None = None,
) -> str:
    """Uploads the folder of a run of `geoflow train` to the repository `repo_id` ("user/name") of the Hugging Face hub,
    which is created if need be, and returns the address of the commit.

    Weights, configurations and model cards of flow and head are uploaded, and no other file of the folder. Embeddings
    are uploaded only on request. `held_out`: also upload the held-out pairs and the calibrations, which contain
    held-out queries and items; without them whoever downloads the run calibrates it on pairs of their own.
    `training_rows`: upload a head although its weights contain some of the training pairs, those of its bank; without
    it, a run with such a head is refused. It needs the extra `hub`.
    """
    path = checks.path(folder, "folder")
    if not (path / WEIGHTS_FILE).is_file():
        raise FileNotFoundError(f"{path} holds no {WEIGHTS_FILE}: it is not the folder of a trained model")
    if (head := head_of(path)) is not None:
        refuse_training_rows(head, f"the head of {path}", allowed=training_rows)
    write_card(path)
    files = (*RUN_FILES, *HELD_OUT_FILES) if held_out else RUN_FILES
    options: dict[str, Any] = {"private": private, "token": token, "branch": branch}
    return hub.push_folder(path, repo_id, files, message=commit_message, **options)


def head_of(folder: Path) -> PosteriorHead | None:
    """The head that the folder of a run holds; None if there is none."""
    own = folder if model_kind(folder) == HEAD else folder / HEAD_FOLDER
    return PosteriorHead.from_pretrained(own) if (own / WEIGHTS_FILE).is_file() else None


def write_card(folder: Path) -> None:
    """Writes the model card of the folder of a run, unless somebody has edited it."""
    hub.write_card(folder, run_card(folder))


def run_card(folder: Path) -> str:
    """The model card of the folder of a run: its flow or head, and what was calibrated and measured on held-out
    pairs."""
    stored = StoredCalibration.read(folder)
    calibration = None
    figures: dict[str, Any] = {}
    if stored is not None and (folder / CALIBRATION_FOLDER / HELD_OUT_FOLDER).is_dir():
        of_all = f" of {stored.held_out.of_images:,}" if stored.held_out.of_images else ""
        calibration = [f"Fitted on {stored.held_out}{of_all}, which nothing was trained on:", ""]
        calibration += [*(f"- {hub.escaped(line)}" for line in fitted_lines(stored, with_reasons=False)), ""]
        for direction, known in stored.bandwidth.items():
            about = f"{known['queries']} held-out queries over {known['items']:,} items, {direction}"
            figures[f"negative log-likelihood of the right item, nats, {about}"] = known["nll"]
            figures[f"share with an item of probability one half or more, {about}"] = known["half"]
            figures[f"of these, right, {about}"] = known["half_right"]
    head = head_of(folder)
    if head is not None and isinstance(head.report.get("nll"), float):
        figures["head: negative log-likelihood of held-out items, nats"] = head.report["nll"]
    if model_kind(folder) == HEAD:
        assert head is not None
        what = f"A posterior head: {head.extra_repr()}.{head.told_bank}"
        network, widths = head.config.to_json(), (head.image_dim, head.text_dim)
        return model_card("PosteriorHead", what, widths, head.origin, network, figures, calibration)
    flow = GeoFlow.from_pretrained(folder)
    with_head = ""
    if head is not None:
        with_head = f" The folder `{HEAD_FOLDER}` holds a posterior head: {head.extra_repr()}.{head.told_bank}"
    widths = flow.config.image_dim, flow.config.text_dim
    what = f"{flow.summary()}.{with_head}"
    return model_card("GeoFlow", what, widths, flow.origin, flow.config.to_json(), figures, calibration)
