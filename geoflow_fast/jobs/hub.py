"""The folder of a run of `geoflow train` on the Hugging Face hub: its model card, and its upload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geoflow_fast.data.cards import model_card
from geoflow_fast.flow.model import WEIGHTS_FILE, GeoFlow
from geoflow_fast.head.model import HEAD_FOLDER, PosteriorHead
from geoflow_fast.jobs.calibration import CALIBRATION_FOLDER, HELD_OUT_FOLDER, StoredCalibration, outcome
from geoflow_fast.jobs.entropy import HEAD, model_kind
from geoflow_fast.runtime import checks, hub

LEFT_OUT = ("*last.safetensors", "*metrics.jsonl", "*.tmp", "*.lock", "*trials/*", "*events.*")
"""What only a run that goes on needs."""


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    *,
    held_out: bool = False,
    commit_message: str = "Upload a run of geoflow train",
    private: bool | None = None,
    token: str | None = None,
    branch: str | None = None,
) -> str:
    """Uploads the folder of a run of `geoflow train` to the repository `repo_id` ("user/name") of the Hugging Face hub,
    which is created if need be, and returns the address of the commit.

    Flow, head, their calibrated weights and a model card are uploaded; the state of the run is not. The embeddings that
    were held out for calibration are yours: they are uploaded only with `held_out`, and without them whoever downloads
    the run calibrates it on pairs of their own. It needs the extra `hub`.
    """
    path = checks.path(folder, "folder")
    if not (path / WEIGHTS_FILE).is_file():
        raise FileNotFoundError(f"{path} holds no {WEIGHTS_FILE}: it is not the folder of a trained model")
    write_card(path)
    ignored = LEFT_OUT if held_out else (*LEFT_OUT, f"{CALIBRATION_FOLDER}/*")
    options: dict[str, Any] = {"private": private, "token": token, "branch": branch, "ignore": ignored}
    return hub.push_folder(path, repo_id, message=commit_message, **options)


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
        calibration = [f"On {stored.held_out}{of_all}, which nothing was trained on:", ""]
        calibration += [f"- {line}" for line in outcome(stored)]
        for direction, fitted in stored.bandwidth.items():
            about = f"{fitted['queries']} held-out queries over {fitted['items']:,} items, {direction}"
            figures[f"negative log-likelihood of the right item, nats, {about}"] = fitted["nll"]
            figures[f"share with an item of probability 1/2 or more, {about}"] = fitted["half"]
            figures[f"of these, right, {about}"] = fitted["half_right"]
    beside = folder if model_kind(folder) == HEAD else folder / HEAD_FOLDER
    head = PosteriorHead.from_pretrained(beside) if (beside / WEIGHTS_FILE).is_file() else None
    if head is not None and isinstance(head.report.get("nll"), float):
        figures["head: negative log-likelihood of held-out items, nats"] = head.report["nll"]
    if model_kind(folder) == HEAD:
        assert head is not None
        what, widths = f"A posterior head: {head.extra_repr()}.", (head.image_dim, head.text_dim)
        network = head.config.to_json()
        return model_card("PosteriorHead", what, widths, head.origin, network, figures, calibration)
    flow = GeoFlow.from_pretrained(folder)
    with_head = "" if head is None else f" The folder `{HEAD_FOLDER}` holds a posterior head: {head.extra_repr()}."
    widths = flow.config.image_dim, flow.config.text_dim
    what = f"{flow.summary()}.{with_head}"
    return model_card("GeoFlow", what, widths, flow.origin, flow.config.to_json(), figures, calibration)
