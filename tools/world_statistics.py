"""Statistics of CLIP embeddings beside those of `ClipWorld`: the table of docs/method.md, and what a test compares.

`python -m tools.world_statistics` prints the table. The real embeddings are read from the folder `shared/data` beside
the repository, which is not part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from geoflow_fast.geometry import normalize
from geoflow_fast.worlds import ClipWorld

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
PAIRS = (500, 1000)
SEEDS = range(5)
NAMES = {
    "cosine of two images": "image cosine",
    "cosine of two texts": "text cosine",
    "effective rank of images": "image rank",
    "effective rank of texts": "text rank",
    "exponent of the images' spectrum": "image decay",
    "exponent of the texts' spectrum": "text decay",
    "cosine of an image and its nearest": "image nearest",
    "cosine of a text and its nearest": "text nearest",
    "the same, 99th percentile, images": "image twins",
    "the same, 99th percentile, texts": "text twins",
    "largest coordinate of the mean image": "image rogue",
    "largest coordinate of the mean text": "text rogue",
    "distance of the two means": "gap",
    "cosine of the two means": "mean cosine",
    "cosine of a pair": "matched",
    "its standard deviation": "matched deviation",
    "cosine of image and text of two pairs": "unmatched",
    "its standard deviation ": "unmatched deviation",
    "Recall@1, texts search images": "t2i recall",
    "Recall@1, images search texts": "i2t recall",
    "Recall@10, texts search images": "t2i recall 10",
    "hubs: skewness of 10-occurrence, images": "t2i hubs",
    "hubs: skewness of 10-occurrence, texts": "i2t hubs",
}
"""The statistics in words."""


def statistics(image: Tensor, text: Tensor) -> dict[str, float]:
    """The statistics of unit rows [n, d]; text k belongs to image k."""
    image, text = normalize(image.double()), normalize(text.double())
    numbers = {}
    for name, rows in (("image", image), ("text", text)):
        numbers |= {f"{name} {what}": value for what, value in of_one_modality(rows).items()}
    means = image.mean(0), text.mean(0)
    cosine = text @ image.T
    matched, unmatched = cosine.diagonal(), cosine[~torch.eye(len(cosine), dtype=torch.bool)]
    numbers |= {
        "gap": float((means[0] - means[1]).norm()),
        "mean cosine": float(torch.cosine_similarity(*means, dim=0)),
        "matched": float(matched.mean()),
        "matched deviation": float(matched.std()),
        "unmatched": float(unmatched.mean()),
        "unmatched deviation": float(unmatched.std()),
    }
    for direction, table in (("t2i", cosine), ("i2t", cosine.T)):
        rank = (table > table.diagonal()[:, None]).sum(1)
        numbers |= {f"{direction} recall": share(rank < 1), f"{direction} recall 10": share(rank < 10)}
        hits = table.topk(10).indices.flatten().bincount(minlength=len(table))
        numbers[f"{direction} hubs"] = float(stats.skew(hits.numpy()))
    return numbers


def of_one_modality(rows: Tensor) -> dict[str, float]:
    centred = rows - rows.mean(0)
    spectrum = torch.linalg.svdvals(centred).square()
    spectrum = spectrum / spectrum.sum()
    order = torch.arange(4, 61)
    decay = np.polyfit(order.log().numpy(), spectrum[order - 1].log().numpy(), 1)[0]
    cosine = (rows @ rows.T).fill_diagonal_(-1)
    nearest = cosine.amax(1)
    count = len(rows)
    return {
        "cosine": float((rows.sum(0).square().sum() - count) / (count * (count - 1))),
        "rank": float(torch.special.entr(spectrum).sum().exp()),
        "decay": -float(decay),
        "nearest": float(nearest.mean()),
        "twins": float(nearest.quantile(0.99)),
        "rogue": float(rows.mean(0).abs().max()),
    }


def share(hits: Tensor) -> float:
    return float(hits.double().mean())


def real_sets() -> Iterator[tuple[str, int, Tensor, Tensor]]:
    """Name, number of pairs, images and texts: photographs with captions, ImageNet with one image of a class each."""
    for name, file in (("COCO", "coco500"), ("Unsplash", "unsplash500")):
        with np.load(DATA / "photos" / f"{file}.npz", allow_pickle=False) as data:
            image, text, index = (data[key] for key in ("image_emb", "text_emb", "text_image_index"))
        yield name, len(text), torch.from_numpy(image[index]), torch.from_numpy(text)
    with np.load(DATA / "imagenet" / "vitb32.npz", allow_pickle=False) as data:
        image, label, prompts = (data[key] for key in ("image_emb", "label", "class_text_emb"))
    classes, first = np.unique(label, return_index=True)
    order = np.random.default_rng(0).permutation(len(classes))
    for count in PAIRS:
        some = order[:count]
        yield "ImageNet", count, torch.from_numpy(image[first[some]]), torch.from_numpy(prompts[classes[some]])


def of_the_world(world: ClipWorld, count: int) -> dict[str, float]:
    """Means of the statistics over several draws of `count` pairs."""
    draws = [statistics(*world.sample(count, generator=torch.Generator().manual_seed(seed))[:2]) for seed in SEEDS]
    return {name: float(np.mean([draw[name] for draw in draws])) for name in draws[0]}


def main() -> None:
    world = ClipWorld()
    columns = {f"{name}, {count}": statistics(image, text) for name, count, image, text in real_sets()}
    columns |= {f"`ClipWorld`, {count}": of_the_world(world, count) for count in PAIRS}
    print("| | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for words, name in NAMES.items():
        digits = 0 if name.endswith("rank") else 1 if name.endswith("hubs") else 3 if name.endswith("deviation") else 2
        cells = [f"{column[name]:.{digits}f}".removeprefix("0") for column in columns.values()]
        print(f"| {words.strip()} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
