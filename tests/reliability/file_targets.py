"""Public functions that read or write files, encoders and baselines with good arguments; see `targets.py`."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast import baselines, evaluation
from geoflow_fast.training.config import RunConfig
from tests.encoders import tiny_clip
from tests.reliability.hostile import Target, fresh_path
from tests.reliability.targets import (
    IMAGE,
    TEXT,
    entries,
    normal,
    small_flow,
    small_head,
    some_pairs,
    square_flow,
    square_pairs,
    unit,
)
from tests.with_torchvision import import_torchvision

BAD_IMAGES: tuple[Any, ...] = (
    [],
    [None],
    [3],
    [object()],
    [b"bytes"],
    ["no such.png"],
    ["/proc/self/mem"],
    ["/dev/null"],
    ["\0"],
    [Path()],
    [torch.zeros(2, 2)],
    [torch.zeros(3, 32, 32), torch.zeros(3, 31, 32)],
    [torch.full((3, 32, 32), float("nan"))],
    [torch.zeros(3, 32, 32, dtype=torch.int64)],
    [Image.new("RGB", (1, 1))],
    [Image.new("RGBA", (3, 700))],
    [Image.new("L", (900, 2))],
    [Image.new("I;16", (9, 9))],
    [Image.new("CMYK", (9, 9))],
    [Image.new("P", (9, 9))],
    [Image.new("1", (9, 9))],
    Image.new("RGB", (4, 4)),
    np.zeros((2, 3, 32, 32), np.float32),
)
BAD_TEXTS: tuple[Any, ...] = (
    [],
    [""],
    [None],
    [3],
    [b"bytes"],
    [["a"]],
    [object()],
    "one text",
    ["\0", "🙂" * 500],
    ["\ud800"],
    ["word " * 5000],
    ("a", "b"),
    {"a": 1},
)


@functools.cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def kept(name: str, make: Callable[[Path], object]) -> Path:
    """A good file or folder, made once; it goes with the process."""
    path = Path(_kept().name) / name
    if not path.exists():
        make(path)
    return path


def pictures() -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (20 + k, 30, 3), dtype=np.uint8)) for k in range(3)]


def picture_folder() -> Path:
    """Three pictures with captions, and one file that is none."""

    def make(folder: Path) -> None:
        folder.mkdir()
        for number, picture in enumerate(pictures()):
            picture.save(folder / f"{number}.png")
            (folder / f"{number}.txt").write_text(f"picture {number}")
        (folder / "3.png").write_bytes(b"none")

    return kept("pictures", make)


def model_folder() -> Path:
    return kept("model", lambda folder: small_flow().save_pretrained(folder))


def qrels_file() -> Path:
    return kept("qrels.csv", lambda path: path.write_text("query,item,grade\n0,1,2\n0,2,1\n3,0,1\n"))


def judgements(path: Any) -> float:
    return float(gf.Qrels.open(path).relevant().grade.sum())


def head_folder() -> Path:
    return kept("head", lambda folder: small_head().save_pretrained(folder))


def pairs_folder() -> Path:
    return kept("pairs", lambda folder: some_pairs().save(folder))


def array_file(name: str, *shape: int) -> Path:
    return kept(name, lambda path: np.save(path, unit(*shape).numpy()))


# ---- encoders ------------------------------------------------------------------------------------------------------


@functools.cache
def tiny_encoder() -> gf.OpenClipEncoder:
    import_torchvision()
    folder = kept("clip", tiny_clip.save_model)
    return gf.OpenClipEncoder.load(f"local-dir:{folder}", device="cpu")


def rows_with_a_direction(rows: Tensor) -> Tensor:
    """An encoder says NaN of what has no direction, by contract."""
    return rows[~rows.isnan().any(1)]


def encoded(side: str, encoder: Callable[[], Any]) -> Callable[..., Any]:
    def call(items: Any) -> Tensor:
        return rows_with_a_direction(getattr(encoder(), f"encode_{side}")(items))

    return call


def of_encoder(name: str) -> Callable[..., Any]:
    return lambda value: getattr(tiny_encoder(), name)(value)


def encoder_from_folder(folder: Any, precision: Any) -> int:
    import_torchvision()
    return gf.OpenClipEncoder.load(f"local-dir:{folder}", device="cpu", precision=precision).dim


def wrapped_encoder(device: Any, precision: Any) -> int:
    tiny = tiny_encoder()
    return gf.OpenClipEncoder(tiny.model, tiny.preprocess, tiny.tokenizer, device=device, precision=precision).dim


def embedded(images: Any, **settings: Any) -> gf.EmbedSummary:
    return gf.embed_images(images, gf.ColourEncoder(), progress=False, **settings)


def tower_width(tower: str) -> int:
    return int(tiny_encoder().projections()[f"{tower}.weight"].shape[1])


def clip_folder() -> Path:
    tiny_encoder()
    return Path(_kept().name) / "clip"


ENCODERS = [
    Target(
        "ColourEncoder.encode_images",
        encoded("images", gf.ColourEncoder),
        lambda: entries(items=pictures()),
        extra={"items": BAD_IMAGES},
    ),
    Target(
        "ColourEncoder.encode_texts",
        encoded("texts", gf.ColourEncoder),
        lambda: entries(items=["a red car", "blue"]),
        extra={"items": BAD_TEXTS},
    ),
    Target(
        "ColourEncoder.prepare",
        gf.ColourEncoder().prepare,
        lambda: entries(image=pictures()[0]),
        extra={"image": [x[0] for x in BAD_IMAGES if isinstance(x, list) and x]},
    ),
    Target(
        "OpenClipEncoder.encode_images",
        encoded("images", tiny_encoder),
        lambda: entries(items=pictures()),
        extra={"items": BAD_IMAGES},
    ),
    Target(
        "OpenClipEncoder.encode_texts",
        encoded("texts", tiny_encoder),
        lambda: entries(items=["a red car", "blue"]),
        extra={"items": BAD_TEXTS},
    ),
    Target(
        "OpenClipEncoder.image_activations",
        of_encoder("image_activations"),
        lambda: entries(value=pictures()),
        spreads=True,
        extra={"value": BAD_IMAGES},
    ),
    Target(
        "OpenClipEncoder.text_activations",
        of_encoder("text_activations"),
        lambda: entries(value=["a red car", "blue"]),
        extra={"value": BAD_TEXTS},
    ),
    Target(
        "OpenClipEncoder.prepare",
        of_encoder("prepare"),
        lambda: entries(value=pictures()[0]),
        extra={"value": [x[0] for x in BAD_IMAGES if isinstance(x, list) and x]},
    ),
    Target(
        "OpenClipEncoder.project_images",
        of_encoder("project_images"),
        lambda: entries(value=normal(3, tower_width("image"))),
        spreads=True,
    ),
    Target(
        "OpenClipEncoder.project_texts",
        of_encoder("project_texts"),
        lambda: entries(value=normal(3, tower_width("text"))),
        spreads=True,
    ),
    Target("OpenClipEncoder", wrapped_encoder, lambda: entries(device="cpu", precision="float32")),
    Target("OpenClipEncoder.load", encoder_from_folder, lambda: entries(folder=clip_folder(), precision="float32")),
    Target(
        "embed_images",
        embedded,
        lambda: entries(
            images=picture_folder(),
            out=fresh_path(),
            batch_size=2,
            workers=1,
            shard_rows=2,
            dtype="float32",
            pre_projection=False,
            overwrite=False,
        ),
        dear=True,
    ),
]


# ---- files ---------------------------------------------------------------------------------------------------------


def opened(folder: Any, normalize: Any) -> tuple[Tensor, Tensor]:
    pairs = gf.EmbeddingPairs.open(folder, normalize=normalize)
    return pairs[np.arange(len(pairs))]


def opened_files(**paths: Any) -> tuple[Tensor, Tensor]:
    pairs = gf.EmbeddingPairs.open_files(**paths)
    return pairs[np.arange(len(pairs))]


def index_file() -> Path:
    return kept("index.safetensors", lambda path: gf.GalleryIndex.build(unit(9, 5), 3).save(path))


def reranker() -> gf.BayesReranker:
    return gf.BayesReranker(square_flow(), unit(60, IMAGE), shortlist=60, n_steps=1)


@functools.cache
def calibrated() -> gf.BayesReranker:
    result = reranker()
    result.calibrate(square_pairs(60), max_queries=60, progress=False)
    return result


def calibration_file() -> Path:
    return kept("calibration.json", lambda path: calibrated().save_calibration(path))


def trained_into(out: Any, resume: Any) -> float:
    config = gf.TrainConfig(steps=2, batch_size=8, warmup_steps=1, val_every=1)
    with torch.device("cpu"):
        flow = gf.GeoFlow(small_flow().config)
    return gf.train(flow, some_pairs(), config, out=out, resume=resume).best_val_loss


def report() -> evaluation.Report:
    return evaluation.Report("Title", "Lead")


def picture_file() -> Path:
    return kept("picture.png", lambda path: pictures()[0].save(path))


FILES = [
    Target(
        "PosteriorHead.from_pretrained",
        gf.PosteriorHead.from_pretrained,
        lambda: entries(folder=head_folder(), device="cpu"),
    ),
    Target("GeoFlow.from_pretrained", gf.GeoFlow.from_pretrained, lambda: entries(folder=model_folder(), device="cpu")),
    Target("Qrels.open", judgements, lambda: {"path": qrels_file()}),
    Target("EmbeddingPairs.open", opened, lambda: entries(folder=pairs_folder(), normalize=False)),
    Target(
        "EmbeddingPairs.open_files",
        opened_files,
        lambda: entries(
            images=array_file("images.npy", 9, IMAGE),
            texts=array_file("texts.npy", 9, TEXT),
            image_index=kept("rows.npy", lambda path: np.save(path, np.arange(9))),
            normalize=False,
        ),
    ),
    Target(
        "EmbeddingPairs.save",
        some_pairs().save,
        lambda: entries(folder=fresh_path(), rows_per_shard=7, dtype=np.float32),
    ),
    Target("Gallery.files", gf.Gallery, lambda: entries(source=array_file("gallery.npy", 9, IMAGE))),
    Target("GalleryIndex.load", gf.GalleryIndex.load, lambda: entries(path=index_file(), gallery=unit(9, 5))),
    Target(
        "BayesReranker.save_calibration",
        lambda path: calibrated().save_calibration(path),
        lambda: entries(path=fresh_path()),
    ),
    Target(
        "BayesReranker.load_calibration",
        lambda path: reranker().load_calibration(path).alpha,
        lambda: entries(path=calibration_file()),
    ),
    Target(
        "Calibration.load", gf.Calibration.load, lambda: entries(path=calibration_file(), made_for=reranker().made_for)
    ),
    Target("train.out", trained_into, lambda: entries(out=fresh_path(), resume=True), dear=True),
    Target(
        "evaluation.Report.section",
        lambda heading, words: report().section(heading, words),
        lambda: entries(heading="One", words="Words"),
    ),
    Target("evaluation.Report.text", lambda words: report().text(words), lambda: entries(words="Words")),
    Target(
        "evaluation.Report.table",
        lambda **given: report().table(**given),
        lambda: entries(rows=[{"a": 1, "b": 0.5}], caption="Table", best={"b": "max"}),
        extra={
            "rows": [[None], [3], ["word"], [{}], [{"a": float("nan")}], [{3: object()}]],
            "best": [{"a": 3}, {"c": "max"}],
        },
    ),
    Target(
        "evaluation.Report.figure",
        lambda **given: report().figure(**given),
        lambda: entries(png_path=picture_file(), caption="Picture", alt="alt"),
    ),
]


# ---- baselines -----------------------------------------------------------------------------------------------------


def activations() -> dict[str, Any]:
    return {
        "image": normal(40, 6),
        "text": normal(40, 7, seed=1),
        "image_weight": normal(IMAGE, 6, seed=2),
        "text_weight": normal(IMAGE, 7, seed=3),
    }


def bayesvlm(image: Any, text: Any, image_weight: Any, text_weight: Any) -> baselines.BayesVLM:
    given = baselines.Activations.from_arrays(image, text, {"image.weight": image_weight, "text.weight": text_weight})
    return baselines.BayesVLM(IMAGE, IMAGE).set_activations(given)


def bayesvlm_pairs() -> gf.EmbeddingPairs:
    parts = activations()
    image, text = (parts[name] @ parts[f"{name}_weight"].T for name in ("image", "text"))
    return gf.EmbeddingPairs.from_arrays(image, text, normalize=True)


DEAR = ("euclidean_flow", "repvlm")
SMALLER: dict[str, dict[str, Any]] = {"grove": {"latent": 2}}


def short_run(**settings: Any) -> RunConfig:
    return RunConfig(**{"steps": 2, "batch_size": 8, "warmup_steps": 1, "val_every": 1, "val_batches": 1, **settings})


@functools.cache
def fitted(method: str) -> baselines.Baseline:
    torch.manual_seed(0)
    if method == "bayesvlm":
        baseline: baselines.Baseline = bayesvlm(**activations())
        baseline.fit(bayesvlm_pairs(), config=short_run())
    else:
        baseline = baselines.find(method)(IMAGE, IMAGE, **SMALLER.get(method, {}))
        baseline.fit(square_pairs(40), config=short_run(), progress=False)
    return baseline


def uncertainty_of(method: str) -> Callable[..., Any]:
    return lambda **given: fitted(method).uncertainty(**given)


def good_queries(method: str) -> dict[str, Any]:
    if method == "bayesvlm":
        return {"queries": normal(3, 7), "gallery": normal(9, 6), "direction": "t2i"}
    return {"queries": unit(3, IMAGE), "gallery": unit(9, IMAGE, seed=1), "direction": "t2i"}


def fit_of(method: str) -> Callable[..., Any]:
    def call(image_dim: Any, text_dim: Any, pairs: Any, **settings: Any) -> object:
        with torch.device("cpu"):
            baseline = baselines.find(method)(image_dim, text_dim, **SMALLER.get(method, {}))
        return baseline.fit(pairs, config=short_run(**settings), progress=False)

    return call


def baseline_folder(method: str) -> Path:
    return kept(method, lambda folder: fitted(method).save(folder))


def activations_folder() -> Path:
    settings = {"batch_size": 2, "workers": 1, "pre_projection": True, "progress": False}
    return kept("activations", lambda out: gf.embed_images(picture_folder(), tiny_encoder(), out, **settings))


def opened_activations(folder: Any) -> int:
    return baselines.BayesVLM(tiny_encoder().dim, tiny_encoder().dim).set_activations(folder).settings["image_pre"]


def trained_preset(**given: Any) -> object:
    chosen = {"steps": 2, "batch_size": 8, "warmup_steps": 1, "seed": 0}
    return baselines.train_preset(pairs=square_pairs(40), val=None, overrides=chosen, folder=None, **given)


BASELINES = [
    Target("baselines.load", baselines.load, lambda: entries(folder=baseline_folder("knn"))),
    Target(
        "baselines.train_preset",
        trained_preset,
        lambda: entries(method="asymvlm_ps", out=fresh_path(), size="tiny", device="cpu"),
        dear=True,
    ),
    Target("baselines.Activations.from_arrays", bayesvlm, activations, spreads=True),
    Target("baselines.Activations.open", opened_activations, lambda: entries(folder=activations_folder()), dear=True),
    Target("baselines.Baseline.load", baselines.ProbVLM.load, lambda: entries(folder=baseline_folder("probvlm"))),
    *(
        Target(
            f"baselines.{kind.__name__}.uncertainty",
            uncertainty_of(name),
            functools.partial(good_queries, name),
            dear=name in DEAR,
        )
        for name, kind in baselines.METHODS.items()
    ),
    *(
        Target(
            f"baselines.{kind.__name__}.fit",
            fit_of(name),
            lambda: entries(
                image_dim=IMAGE, text_dim=IMAGE, pairs=square_pairs(40), steps=2, batch_size=8, lr=1e-3, seed=0
            ),
            dear=True,
        )
        for name, kind in baselines.METHODS.items()
        if name != "bayesvlm"
    ),
]
