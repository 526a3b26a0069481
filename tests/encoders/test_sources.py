"""Folders, tables and tar shards of images: what is read, in which order, and what is left out with a reason."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from geoflow_fast.encoders import sources
from geoflow_fast.encoders.sources import Skipped, decode_image, open_images


def picture(colour: str = "red", size: tuple[int, int] = (9, 7), form: str = "PNG", mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).convert(mode).save(file, form)
    return file.getvalue()


def put(path: Path, data: bytes | str = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data or picture())
    return path


def put_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def read_all(path: Path, **columns: str) -> tuple[dict[str, tuple[str, ...]], list[Skipped]]:
    """Returns the captions of the images that could be read, by name, and what was left out."""
    source = open_images(path, **columns)
    samples = [source.read(number) for number in range(len(source))]
    good = {sample.name: sample.captions for sample in samples if sample.image is not None}
    return good, [*source.rejected, *(item for sample in samples for item in sample.skipped)]


def test_folder_with_captions_in_sorted_order(tmp_path):
    for name in ("b.png", "a.JPG", "sub/c.webp", "ünïcode Ω.png", "notes.md"):
        put(tmp_path / name)
    put(tmp_path / "a.txt", "one  caption\n\n and another\n")
    put(tmp_path / "ünïcode Ω.txt", "\ufeffdie Höhe")
    put(tmp_path / "sub/c.txt", b"\xff\xfe broken")
    good, skipped = read_all(tmp_path)
    assert list(good) == ["a.JPG", "b.png", "sub/c.webp", "ünïcode Ω.png"]
    assert good["a.JPG"] == ("one caption", "and another")
    assert good["ünïcode Ω.png"] == ("die Höhe",)
    assert good["b.png"] == good["sub/c.webp"] == ()
    assert [(item.item, item.part) for item in skipped] == [("b.png", "caption"), ("sub/c.webp", "caption")]
    assert skipped[0].reason == "there is none"
    assert "utf-8" in skipped[1].reason


def test_a_folder_without_captions(tmp_path):
    put(tmp_path / "a.png")
    assert not open_images(tmp_path).has_captions
    assert read_all(tmp_path) == ({"a.png": ()}, [])


@pytest.mark.skipif(os.name != "posix", reason="file names of any bytes")
def test_names_that_are_not_text(tmp_path):
    put(tmp_path / os.fsdecode(b"\xff.png"))
    good, _ = read_all(tmp_path)
    assert [sources.printable(name) for name in good] == ["\\xff.png"]


def png_header(width: int, height: int) -> bytes:
    """Returns a PNG of a hundred bytes that claims to be large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    about = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", about) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


BAD_IMAGES = {
    "empty": (b"\n"[:0], "is empty"),
    "junk": (b"this is no picture", "not an image of a known format"),
    "truncated": (picture(size=(300, 300), form="JPEG")[:-200], "truncated"),
    "bomb": (png_header(60_000, 60_000), "more than 89478485 pixels"),
    "large": (png_header(10_000, 10_000), "has 10000 x 10000 pixels"),
    "thread": (png_header(1, 5000), "over 200 times the other"),
    "headless": (png_header(10, 10), ""),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n", "not an image of a known format"),
}


@pytest.mark.filterwarnings("ignore:Image size")
@pytest.mark.parametrize("name", BAD_IMAGES)
def test_bad_images_give_a_reason(tmp_path, name):
    data, reason = BAD_IMAGES[name]
    (tmp_path / "x.png").write_bytes(data)
    put(tmp_path / "y.png")
    good, skipped = read_all(tmp_path)
    assert list(good) == ["y.png"]
    assert [(item.item, item.part) for item in skipped] == [("x.png", "image")]
    assert reason in skipped[0].reason
    assert skipped[0].reason
    assert "\n" not in skipped[0].reason


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_cut_of_a_file_is_read_or_refused():
    """Bytes that are cut off or flipped anywhere give an image or one of the errors in `UNREADABLE`."""
    rng = np.random.default_rng(0)
    for form in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"):
        whole = picture(size=(20, 20), form=form)
        for _ in range(60):
            data = bytearray(whole[: rng.integers(len(whole))])
            for position in rng.integers(len(data), size=3) if data else []:
                data[position] ^= int(rng.integers(256))
            try:
                assert decode_image(bytes(data)).mode == "RGB"
            except sources.UNREADABLE:
                continue


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_images_of_all_modes_become_rgb(mode):
    image = decode_image(
        picture("white", form="TIFF" if mode == "CMYK" else "PNG", mode="RGB" if mode == "RGBA" else mode)
    )
    assert image.mode == "RGB"
    assert np.asarray(image).min() == 255


def test_only_plain_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    put(tmp_path / "a.png")
    put(tmp_path / "table.csv", "path\n/dev/zero\npipe.png\na.png\nmissing.png\n\0.png\n")
    good, skipped = read_all(tmp_path / "table.csv", caption_column="")
    assert list(good) == ["a.png"]
    assert [item.item for item in skipped] == ["/dev/zero", "pipe.png", "missing.png", "\0.png"]
    assert skipped[1].reason == "is not a regular file"
    assert "No such file" in skipped[2].reason


def test_files_larger_than_the_limit_are_not_read(tmp_path):
    with open(tmp_path / "x.png", "wb") as file:
        file.truncate(sources.MAX_IMAGE_BYTES + 1)
    put(tmp_path / "y.png")
    _, skipped = read_all(tmp_path)
    assert "more than 268435456" in skipped[0].reason


def write_table(path: Path, rows: list[tuple[str, str | None]]) -> Path:
    """Writes rows in the form that the suffix of the name says."""
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"caption": [row[1] for row in rows], "path": [row[0] for row in rows]})
        pyarrow.parquet.write_table(table, path)
    else:
        mark = "," if path.suffix == ".csv" else "\t"
        lines = [("path", "caption"), *rows]
        quoted = (mark.join('"' + (cell or "").replace('"', '""') + '"' for cell in row) for row in lines)
        path.write_text("\n".join(quoted), encoding="utf-8-sig")
    return path


@pytest.mark.parametrize("form", ["csv", "tsv", "parquet"])
def test_tables(tmp_path, form):
    """Rows of one path, however it is written, are one image with several captions, in the order of first rows."""
    for name in ("a.png", "sub/é.png"):
        put(tmp_path / name)
    rows = [("sub/é.png", 'says "é",\nin two lines'), ("a.png", "first"), ("./a.png", "second"), ("a.png", None)]
    rows += [("", "lost"), (str(tmp_path / "a.png"), "absolute"), ("gone.png", "x")]
    good, skipped = read_all(write_table(tmp_path / f"table.{form}", rows))
    assert good == {"sub/é.png": ('says "é", in two lines',), "a.png": ("first", "second", "absolute")}
    assert list(good) == ["sub/é.png", "a.png"]
    assert [(item.item, item.part) for item in skipped] == [
        (f"table.{form} row 5", "image"),
        ("a.png", "caption"),
        ("gone.png", "image"),
    ]


def test_parquet_lists_are_several_captions(tmp_path):
    import pyarrow
    import pyarrow.parquet

    put(tmp_path / "a.png")
    put(tmp_path / "b.png")
    table = pyarrow.table({"path": ["a.png", "b.png"], "texts": [["one", "two"], None], "size": [1, 2]})
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet")
    good, skipped = read_all(tmp_path / "table.parquet", caption_column="texts")
    assert good == {"a.png": ("one", "two"), "b.png": ()}
    assert skipped == [Skipped("b.png", "caption", "there is none")]
    with pytest.raises(ValueError, match=r"column size holds int64, not strings"):
        open_images(tmp_path / "table.parquet", caption_column="size")


def test_rows_with_a_wrong_number_of_fields_are_left_out(tmp_path):
    put(tmp_path / "a.png")
    put(tmp_path / "table.csv", "path,caption\na.png,one\na.png,two,three\n\na.png\n")
    good, skipped = read_all(tmp_path / "table.csv")
    assert good == {"a.png": ("one",)}
    assert [item.item for item in skipped] == ["table.csv row 2", "table.csv row 3"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "file,caption\na,b\n", r"t.csv has no column 'path'; its columns are: file, caption; --path-column"),
        (
            "t.csv",
            "path,text\na,b\n",
            r"'caption'; its columns are: path, text; --caption-column .*without captions",
        ),
        ("t.csv", "path,path,caption\na,b,c\n", "has 2 columns 'path'"),
        ("t.csv", "", "no column 'path'; its columns are: none"),
        ("t.csv", "path,caption\n", "holds no images"),
        ("t.csv", b"path,caption\na,\xff\n", "is not CSV in UTF-8"),
        ("t.csv", 'path,caption\na,"' + "x" * 200_000 + '"\n', "is not CSV in UTF-8: field larger"),
        ("t.parquet", "no parquet", "is damaged or not Parquet"),
        ("t.tar", "no tar", "holds no images; t.tar: is damaged after 0 samples"),
        ("t.tar.gz", "x", "neither a folder.*decompress it first"),
        ("t.png", "x", "neither a folder"),
    ],
)
def test_input_that_cannot_be_opened(tmp_path, name, content, message):
    put(tmp_path / name, content or b"\n"[:0])
    if not content:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        open_images(tmp_path / name)


def test_missing_and_empty_input(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        open_images(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no images"):
        open_images(tmp_path)


def test_tar_shards(tmp_path):
    first = [
        ("./000.jpg", picture(form="JPEG")),
        ("./000.txt", b"a  caption\nof two lines"),
        ("./000.json", b'{"caption": "from json"}'),
        ("dir/001.x.png", picture()),
        ("dir/001.json", json.dumps({"captions": ["é", "two", 3]}).encode()),
        ("002.cls", b"7"),
        ("../../evil.png", picture()),
        ("/tmp/evil.png", b"junk"),
    ]
    second = [("000.png", picture("blue")), ("000.json", b'{"url": "x"}'), ("003.txt", b"lost"), ("._000.png", b"x")]
    put_tar(tmp_path / "00000.tar", first)
    put_tar(tmp_path / "00001.tar", second)
    before = sorted(tmp_path.rglob("*"))
    good, skipped = read_all(tmp_path)
    assert good == {
        "00000.tar/./000.jpg": ("a caption of two lines",),
        "00000.tar/dir/001.x.png": ("é", "two"),
        "00000.tar/../../evil.png": (),
        "00001.tar/000.png": (),
    }
    assert {(item.item, item.part, item.reason) for item in skipped} == {
        ("00001.tar/003", "image", "captions without an image"),
        ("00000.tar/dir/001.x.png", "caption", "is not text but int"),
        ("00000.tar/../../evil.png", "caption", "there is none"),
        ("00000.tar//tmp/evil.png", "image", "is not an image of a known format"),
        ("00001.tar/000.png", "caption", "its JSON has no caption or captions"),
    }
    assert sorted(tmp_path.rglob("*")) == before
    assert not (tmp_path / "../../evil.png").exists()


def test_tar_keys_that_appear_again(tmp_path):
    members = [("a.png", picture("red")), ("a.txt", b"one"), ("a.jpg", picture("blue", form="JPEG")), ("a.txt", b"two")]
    source = open_images(put_tar(tmp_path / "x.tar", members))
    sample = source.read(0)
    assert len(source) == 1
    assert sample.captions == ("one",)
    assert sample.image is not None
    assert sample.image.getpixel((0, 0)) == (255, 0, 0)
    assert [item.item for item in source.rejected] == ["x.tar/a.jpg", "x.tar/a.txt"]
    assert all("appears again" in item.reason for item in source.rejected)


def test_tar_links_are_not_followed(tmp_path):
    secret = put(tmp_path / "secret/s.png")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, str(secret)
        archive.addfile(link)
        archive.add(secret, "real.png")
    good, skipped = read_all(tmp_path / "x.tar")
    assert list(good) == ["x.tar/real.png"]
    assert skipped == [Skipped("x.tar/link.png", "image", "is not a plain file")]


@pytest.mark.parametrize("damage", ["cut in data", "cut between members", "broken header"])
def test_damaged_tars_give_the_samples_before_the_damage(tmp_path, damage):
    data = picture()
    path = put_tar(tmp_path / "x.tar", [(f"{k}.png", data) for k in range(4)])
    whole = bytearray(path.read_bytes())
    step = 1024  # header and padded data
    assert len(data) < 512
    if damage == "broken header":
        whole[3 * step : 3 * step + 512] = b"\xa5" * 512
    path.write_bytes(
        whole[: 2 * step + 520] if damage == "cut in data" else whole[: 3 * step] if "between" in damage else whole
    )
    good, skipped = read_all(path)
    assert list(good) == [f"x.tar/{k}.png" for k in range(2 if damage == "cut in data" else 3)]
    assert any(item.item == "x.tar" and "damaged" in item.reason for item in skipped)


def test_images_beside_tars_are_refused(tmp_path):
    put(tmp_path / "a.png")
    put_tar(tmp_path / "x.tar", [("a.png", picture())])
    with pytest.raises(ValueError, match=r"images \(a.png\) beside tar shards"):
        open_images(tmp_path)


def test_captions_that_are_not_text(tmp_path):
    captions = ["\ud800 alone", "", "   ", None, ["x"], "fine"]
    data = json.dumps({"captions": captions}).encode()
    good, skipped = read_all(put_tar(tmp_path / "x.tar", [("a.png", picture()), ("a.json", data)]))
    assert good == {"x.tar/a.png": ("fine",)}
    assert len(skipped) == 5
    deep = b'{"captions": ' + b"[" * 200_000 + b"}"
    _, skipped = read_all(put_tar(tmp_path / "y.tar", [("a.png", picture()), ("a.json", deep)]))
    assert [item.part for item in skipped] == ["caption"]


def test_digest_changes_with_what_would_be_read(tmp_path):
    put(tmp_path / "a.png")
    put(tmp_path / "a.txt", "one")
    seen = {open_images(tmp_path).digest()}
    assert open_images(tmp_path).digest() in seen
    put(tmp_path / "a.txt", "two!")
    seen.add(open_images(tmp_path).digest())
    put(tmp_path / "a.png", picture("blue", (50, 50)))
    seen.add(open_images(tmp_path).digest())
    put(tmp_path / "b.png")
    seen.add(open_images(tmp_path).digest())
    os.utime(tmp_path / "b.png", ns=(1, 1))
    seen.add(open_images(tmp_path).digest())
    assert len(seen) == 5


PEAK = """
import io, resource, sys
from PIL import Image
from geoflow_fast.encoders.sources import decode_image
mode, form, side = sys.argv[1], sys.argv[2], int(sys.argv[3])
def encoded(side):
    file = io.BytesIO()
    Image.new(mode, (side, side), 77).save(file, form)
    return file.getvalue()
if len(sys.argv) > 4:
    open(sys.argv[4], "wb").write(encoded(side))
else:
    decode_image(encoded(8))
    data = sys.stdin.buffer.read()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert decode_image(data).mode == "RGB"
    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.parametrize(("mode", "form", "most"), [("RGB", "PNG", 4), ("RGBA", "PNG", 8), ("RGBA", "WEBP", 24)])
def test_decoding_takes_no_more_memory_than_promised(tmp_path, mode, form, most):
    side, file = 3000, tmp_path / "image"
    command = [sys.executable, "-c", PEAK, mode, form, str(side)]
    subprocess.run([*command, str(file)], check=True)  # in a process of its own: the peak is never reset
    with open(file, "rb") as stdin:
        peak = int(subprocess.run(command, check=True, stdin=stdin, capture_output=True).stdout)
    assert peak < 1.15 * most * side**2


@pytest.mark.parametrize(("form", "accepted"), [("PNG", True), ("WEBP", False)])
def test_the_limit_of_an_image_is_the_memory_that_its_format_takes(monkeypatch, form, accepted):
    monkeypatch.setattr(sources, "MAX_DECODING_BYTES", 8 * 100)
    file = io.BytesIO()
    Image.new("RGB", (10, 10)).save(file, form)
    if accepted:
        assert sources.decode_image(file.getvalue()).resize((3, 3)).size == (3, 3)
    else:
        with pytest.raises(ValueError, match="too many to decode WEBP"):
            sources.decode_image(file.getvalue())
