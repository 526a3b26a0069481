"""The example on clip art: its committed embeddings, and how pictures become them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import geoflow_fast as gf

EXAMPLE = Path(__file__).parents[2] / "examples" / "openclipart"
DATA = EXAMPLE / "data"
PARTS = ("flow", "held_out", "test")
THUMBNAIL, PER_ROW = 56, 32
"""Pixels of a side, and how many stand in a row of the sheet."""
SVG = """<svg xmlns="http://www.w3.org/2000/svg"><metadata>
<rdf:RDF xmlns:cc="http://web.resource.org/cc/" xmlns:dc="http://purl.org/dc/elements/1.1/"
 xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><cc:Work rdf:about=""><dc:title>{title}</dc:title>
<dc:description>{description}</dc:description><dc:subject><rdf:Bag>{keywords}</rdf:Bag></dc:subject>
<cc:license rdf:resource="{licence}"/></cc:Work></rdf:RDF></metadata></svg>"""
FREE = "http://web.resource.org/cc/PublicDomain"


@pytest.fixture(scope="module")
def prepare():
    spec = importlib.util.spec_from_file_location("openclipart_prepare", EXAMPLE / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pictures():
    return json.loads((DATA / "pictures.json").read_text(encoding="utf-8"))


def write_svg(root, name, title="", description="", keywords=(), licence=FREE):
    path = root / "svg" / f"{name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = "".join(f"<rdf:li>{word}</rdf:li>" for word in keywords)
    path.write_text(SVG.format(title=title, description=description, keywords=listed, licence=licence))


@pytest.mark.parametrize("part", PARTS)
def test_committed_embeddings_open_and_match_their_pictures(part, pictures):
    pairs = gf.EmbeddingPairs.open(DATA / part)  # checks that rows are finite and of unit norm
    owner = [number for number, picture in enumerate(pictures[part]) for _ in picture["captions"]]
    assert len(pairs.image) == len(pictures[part]) > 200
    assert pairs.image_row.tolist() == owner
    image, text = pairs[np.arange(len(pairs))]
    right, mixed = (image * text).sum(1).mean(), (image * text.roll(len(text) // 2, 0)).sum(1).mean()
    assert right > mixed + 0.1  # pairs are pairs


def test_parts_share_no_group_and_no_caption(pictures):
    groups = {part: {row["group"] for row in rows} for part, rows in pictures.items()}
    texts = {part: {text.lower() for row in rows for text in row["captions"]} for part, rows in pictures.items()}
    assert set(groups) == {"heads", *PARTS}
    for one, other in itertools.combinations(groups, 2):
        assert not groups[one] & groups[other]
        assert not texts[one] & texts[other]


def test_committed_data_is_small_and_complete(pictures):
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < 5_000_000
    with Image.open(DATA / "test.jpg") as sheet:
        assert sheet.width == PER_ROW * THUMBNAIL
        assert sheet.height == -(-len(pictures["test"]) // PER_ROW) * THUMBNAIL


def test_only_public_domain_pictures_that_are_no_icons_are_read(prepare, tmp_path):
    write_svg(tmp_path, "animals/dog_01", "Dog")
    write_svg(tmp_path, "animals/cat_01", "Cat", licence="http://creativecommons.org/licenses/GPL/2.0/")
    write_svg(tmp_path, "animals/cow_01", "Cow", licence="")
    write_svg(tmp_path, "computer/icons/folder", "Folder")
    (tmp_path / "svg" / "animals" / "bare.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    pictures, left_out = prepare.read_metadata(tmp_path)
    assert [picture.name for picture in pictures] == ["animals/dog_01"]
    assert sorted(left_out.values()) == [1, 3]


def test_captions_leave_out_what_names_no_picture(prepare):
    def picture(name, title="", description="", keywords=()):
        return prepare.Picture(name, title, description, list(keywords))

    made = [
        picture("a/dog_01", "Bored dog", "A dog that is bored.", ["dog", "", "hash(0x8a)", "sofa"]),
        picture("a/contour_giraffe", "Clipart by Somebody - contour_chipmunk", "see http://example.org", ["mammal"]),
        picture("a/horse_a_person_01", "Cavallo", "Cavallo", ["mammal", "horse"]),
        picture("a/foal_a_person_01", "Foal", "", ["mammal", "horse"]),
        *(picture(f"b/x{number}", "Signs of a set", "", []) for number in range(prepare.COLLECTION + 1)),
    ]
    prepare.write_captions(made)
    assert made[0].captions == ["Bored dog", "dog, sofa", "A dog that is bored."]
    assert made[1].captions == ["contour giraffe", "contour giraffe, mammal"]
    assert made[2].captions == ["Cavallo", "Cavallo, mammal, horse"]
    assert made[3].captions == ["Foal", "Foal, mammal, horse"]
    assert all(not picture.captions for picture in made[4:])


def test_images_lose_their_margins_and_blank_ones_are_refused(prepare, tmp_path):
    drawing = Image.new("RGBA", (300, 200))  # transparent
    Image.new("RGBA", (300, 200)).save(tmp_path / "blank.png")
    drawing.paste((200, 0, 0, 255), (50, 50, 90, 70))
    drawing.save(tmp_path / "drawn.png")
    assert prepare.read_image(tmp_path / "blank.png") is None
    pixels = np.asarray(prepare.read_image(tmp_path / "drawn.png"))
    assert pixels.shape == (prepare.SIDE, prepare.SIDE, 3)
    red = (pixels == (200, 0, 0)).all(2)
    assert (red.sum(), (pixels == 255).all(2).sum()) == (40 * 20, prepare.SIDE**2 - 40 * 20)
    assert red[prepare.SIDE // 2, prepare.SIDE // 2]


def test_near_duplicates_and_equal_captions_stay_together(prepare):
    generator = np.random.default_rng(0)
    smooth = [Image.fromarray(generator.integers(0, 255, (6, 6), np.uint8)).resize((64, 64)) for _ in range(40)]
    images = [*smooth, smooth[0].point(lambda value: min(255, value + 3))]
    hashes = np.stack([prepare.perceptual_hash(image.convert("RGB")) for image in images])
    apart = prepare.distances(hashes)
    assert apart[0, 40] <= prepare.EQUAL
    np.testing.assert_array_equal(apart, (hashes[:, None] != hashes[None]).sum(2))
    pictures = [prepare.Picture(str(i), "", "", [], [f"caption {i}"]) for i in range(41)]
    pictures[7].captions = ["CAPTION 3"]
    groups = prepare.find_groups(pictures, apart)
    assert groups[0] == groups[40]
    assert groups[3] == groups[7]
    part = prepare.split(groups)
    assert (part[0], part[3]) == (part[40], part[7])
    shares = {name: float((part == name).mean()) for name in prepare.PARTS}
    assert shares == pytest.approx(prepare.PARTS, abs=0.05)
