"""What Parquet and Arrow files take in memory once they are unpacked, known before anything is unpacked.

A few bytes can stand for gigabytes: run lengths of indices into a dictionary, compressed zeros, lists without values.
The sizes in the footer of a file are claims of its writer. A decoder goes by the headers of pages (Parquet) and by the
lengths of compressed buffers (Arrow), so these are read here, of the columns that are wanted and no others. Pages and
buffers take at least what their headers state, and values at least their width. Text that a dictionary holds is kept
once, with an index for every value, so that many equal captions are cheap; the length of all of it is bounded by
`text_bytes`, after the indices are read.

A `Budget` refuses a file as soon as it takes more than `LEAST` bytes and more than `FACTOR` times its size.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

LEAST, FACTOR = 1 << 28, 1000
"""A file may always take `LEAST` bytes, and `FACTOR` times its size."""
LEAST_TEXT = 1 << 30
"""Characters of text that is kept once may always be as many, since they cost nothing until they are written out."""
HEADER_BYTES = (1 << 10, 1 << 16, 1 << 24)
"""The header of a page is read in so many bytes, in more where that is too short."""
WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
INDEX_WIDTH, WORD_WIDTH, UUID_WIDTH, LEVEL_WIDTH = 12, 64, 128, 4
"""Bytes of a value beside its text: of one in a dictionary, of a string, of a UUID, and of the levels of a list."""
DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2 = 0, 2, 3
INDEX_ENCODINGS, PLAIN_ENCODINGS, LENGTHS_ENCODING, PREFIX_ENCODING = {2, 8}, {0, 2, 8}, 6, 7
"""Encodings of strings: indices into a dictionary, those that a reader can leave in a dictionary, lengths before all
text, and the one in which values share prefixes."""


@dataclass
class Budget:
    """Adds up the bytes that the columns of a file of `size` bytes take."""

    size: int
    taken: dict[str, int] = field(default_factory=dict)

    def take(self, column: str, count: int) -> None:
        """A ValueError names the largest column if this is too much."""
        self.taken[column] = self.taken.get(column, 0) + count
        total = sum(self.taken.values())
        if total > max(LEAST, FACTOR * self.size):
            largest = max(self.taken, key=lambda name: self.taken[name])
            raise ValueError(f"its {self.size} bytes claim to unpack to {total} or more, most in column {largest!r}")

    def take_text(self, column: str, count: int) -> None:
        """The same for text that is kept once."""
        if count > max(LEAST_TEXT, FACTOR * self.size):
            raise ValueError(f"its {self.size} bytes claim to unpack to {count} of text in column {column!r}")


@dataclass
class Page:
    """What the header of a page states."""

    kind: int
    values: int
    encoding: int
    size: int


@dataclass
class Text:
    """How a column of strings is to be read."""

    nested: bool = False
    """Whether they stand in lists."""
    in_dictionary: bool = True
    """Whether values can stay in a dictionary, where each is stored once."""
    dictionary: int = 0
    prefixed: int = 0
    """Sizes of the largest dictionary, and of the largest page in which values share prefixes."""
    indices: int = 0
    """How many values are indices into a dictionary."""

    @property
    def longest(self) -> int:
        """How long a value may be that takes almost no bytes in the file; 0 if there is none."""
        return self.prefixed if self.in_dictionary else max(self.prefixed, self.dictionary)

    def note(self, page: Page) -> None:
        """Takes a page of the column into account."""
        if page.kind == DICTIONARY_PAGE:
            self.dictionary = max(self.dictionary, page.size)
            return
        self.in_dictionary = self.in_dictionary and page.encoding in PLAIN_ENCODINGS
        if page.encoding == PREFIX_ENCODING:
            self.prefixed = max(self.prefixed, page.size)
        elif page.encoding in INDEX_ENCODINGS:
            self.indices += page.values


def parquet_columns(
    source: Any, metadata: Any, schema: Any, names: list[str] | None, budget: Budget
) -> dict[str, Text]:
    """Takes from the budget what the columns `names` of a Parquet file, or all of them, unpack to. Returns how the
    columns of strings among them are to be read, by path."""
    texts: dict[str, Text] = {}
    leaves = [(number, metadata.schema.column(number)) for number in range(metadata.num_columns)]
    if names is not None:
        leaves = [(n, leaf) for n, leaf in leaves if any(f"{leaf.path}.".startswith(f"{name}.") for name in names)]
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    if sum(group.column(number).total_compressed_size for group in groups for number, _ in leaves) > budget.size:
        raise ValueError(f"its columns claim more than its {budget.size} bytes")
    rows = sum(group.num_rows for group in groups)
    for column in schema if names is None else [schema.field(name) for name in names if name in schema.names]:
        # Lists of a fixed length are made even where they are missing and take no bytes in the file.
        Budget(budget.size).take(column.name, rows * _least_row(column.type))
    for number, leaf in leaves:
        text = Text(nested=bool(leaf.max_repetition_level))
        if leaf.physical_type == "BYTE_ARRAY":
            if leaf.logical_type.type == "DECIMAL":
                raise ValueError(f"column {leaf.path!r} has decimals of any length, which are not read")
            texts[leaf.path] = text
        for group in groups:
            chunk = group.column(number)
            known = 0
            for page in _pages(source, chunk, budget.size):
                text.note(page)
                known += page.values if page.kind != DICTIONARY_PAGE else 0
                budget.take(leaf.path, _page_bytes(page, leaf))
            # A reader reserves memory for what the footer claims.
            rest = max(chunk.num_values, group.num_rows) - known
            budget.take(leaf.path, max(0, rest) * _width(leaf))
        if leaf.physical_type == "BYTE_ARRAY" and text.nested and not text.in_dictionary:
            budget.take(leaf.path, text.indices * text.dictionary)  # a row of any length is unpacked at once
    return texts


def _least_row(kind: Any) -> int:
    """Bytes of a row of lists of a fixed length, which may not be stored at all where they are missing."""
    import pyarrow

    plain = getattr(kind, "storage_type", kind)
    if pyarrow.types.is_fixed_size_list(plain):
        return int(plain.list_size) * max(1, _least_row(plain.value_type))
    return plain.bit_width // 8 if pyarrow.types.is_primitive(plain) else 0


def _width(leaf: Any) -> int:
    levels = LEVEL_WIDTH if leaf.max_repetition_level else 0
    if leaf.physical_type == "BYTE_ARRAY":
        return INDEX_WIDTH + levels
    if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return max(leaf.length, UUID_WIDTH if leaf.length == 16 else 0) + levels
    return WIDTHS[leaf.physical_type] + levels


def _page_bytes(page: Page, leaf: Any) -> int:
    """The memory that a page takes while it is unpacked, or its values afterwards."""
    if page.kind == DICTIONARY_PAGE:
        return page.size + page.values * (WORD_WIDTH if leaf.physical_type == "BYTE_ARRAY" else _width(leaf))
    if leaf.physical_type != "BYTE_ARRAY" or page.encoding in INDEX_ENCODINGS:
        return max(page.size, page.values * _width(leaf))
    if page.encoding == PREFIX_ENCODING and leaf.max_repetition_level:
        return page.values * (WORD_WIDTH + page.size)  # a row of any length is unpacked at once
    return page.size + page.values * WORD_WIDTH


def _pages(source: Any, chunk: Any, size: int) -> Iterator[Page]:
    """The headers of the pages of a chunk of a column, as far as a reader goes."""
    position = chunk.data_page_offset
    if chunk.has_dictionary_page and 0 < (chunk.dictionary_page_offset or 0) < position:
        position = chunk.dictionary_page_offset
    end, seen = position + chunk.total_compressed_size, 0
    while position < end and seen < chunk.num_values:
        header, length = _header_at(source, position)
        page = _page_of(header)
        position += length + int(header[3])
        if page.size < 0 or page.values < 0 or int(header[3]) < 0 or position > size:
            raise ValueError("a page is cut short")
        if page.kind in (DATA_PAGE, DATA_PAGE_V2):
            seen += page.values
        yield page


def _page_of(header: dict[int, Any]) -> Page:
    kind = int(header[1])
    if kind not in (DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2):
        return Page(kind, 0, 0, int(header[2]))
    about = header[{DATA_PAGE: 5, DICTIONARY_PAGE: 7, DATA_PAGE_V2: 8}[kind]]
    return Page(kind, int(about[1]), int(about[4 if kind == DATA_PAGE_V2 else 2]), int(header[2]))


def _header_at(source: Any, position: int) -> tuple[dict[int, Any], int]:
    """The fields of the structure of Thrift's compact protocol at a position, and its length."""
    for most in HEADER_BYTES:
        source.seek(position)
        data = source.read(most)
        reader = _Compact(data)
        try:
            return reader.structure(), reader.at
        except IndexError:
            if len(data) < most:
                break
    raise ValueError("the header of a page is cut short")


class _Compact:
    """Reads structures of Thrift's compact protocol: the integers of a structure and those inside it, by the numbers of
    their fields. An IndexError tells that the data end before."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def structure(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while kind := self._byte():
            step, kind = kind >> 4, kind & 15
            number = number + step if step else self._signed()
            fields[number] = self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):  # in a structure, the type of a truth value is the value
            return None
        if kind == 3:
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind in (7, 8):
            length = 8 if kind == 7 else self._unsigned()
            self.at += length
            if self.at > len(self.data):
                raise IndexError
            return None
        if kind in (9, 10):
            head = self._byte()
            for _ in range(head >> 4 if head >> 4 < 15 else self._unsigned()):
                self._element(head & 15)
            return None
        if kind == 11:
            count = self._unsigned()
            kinds = self._byte() if count else 0
            for _ in range(count):
                self._element(kinds >> 4)
                self._element(kinds & 15)
            return None
        if kind == 12:
            return self.structure()
        raise ValueError("the header of a page is damaged")

    def _element(self, kind: int) -> None:
        if kind in (1, 2):
            self._byte()
        else:
            self._value(kind)

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("the header of a page is damaged")

    def _signed(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)


def arrow_messages(source: Any, budget: Budget) -> None:
    """Takes from the budget what the batches of a stream of Arrow unpack to: compressed buffers by the lengths at their
    beginnings, and rows that may take no bytes. Other buffers lie in the mapped file as they are."""
    import pyarrow

    reader = pyarrow.ipc.MessageReader.open_stream(source)
    for number, message in enumerate(reader):
        if message.type in ("record batch", "dictionary"):
            budget.take(f"of batch {number}", _batch_bytes(message.metadata.to_pybytes(), message.body))


def _batch_bytes(words: bytes, body: Any) -> int:
    batch = _field(words, _offset(words, 0), 2)
    if batch is None:
        raise ValueError("a batch is damaged")
    batch = _offset(words, batch)
    kind = _field(words, _offset(words, 0), 1)
    if kind is not None and words[kind] == 2:  # a dictionary, which holds a batch
        batch = _offset(words, _need(_field(words, batch, 1)))
    total = 8 * sum(max(0, length) for length, _ in _pairs(words, _field(words, batch, 1)))
    if _field(words, batch, 3) is not None:
        for start, length in _pairs(words, _field(words, batch, 2)):
            if length >= 8:
                if start < 0 or start + 8 > body.size:
                    raise ValueError("a buffer is cut short")
                total += max(length, *struct.unpack("<q", body[start : start + 8].to_pybytes()))
    return total


def _offset(words: bytes, at: int) -> int:
    return at + int(struct.unpack_from("<I", words, at)[0])


def _field(words: bytes, table: int, number: int) -> int | None:
    """Where a field of a table of FlatBuffers lies; None where it is left out."""
    about = table - struct.unpack_from("<i", words, table)[0]
    place = 4 + 2 * number
    (size,) = struct.unpack_from("<H", words, about)
    shift = struct.unpack_from("<H", words, about + place)[0] if place < size else 0
    return table + shift if shift else None


def _need(place: int | None) -> int:
    if place is None:
        raise ValueError("a batch is damaged")
    return place


def _pairs(words: bytes, place: int | None) -> Iterator[tuple[int, int]]:
    """The pairs of integers in a vector."""
    if place is not None:
        start = _offset(words, place)
        (count,) = struct.unpack_from("<I", words, start)
        if start + 4 + 16 * count > len(words):
            raise ValueError("a batch is damaged")
        yield from struct.iter_unpack("<qq", words[start + 4 : start + 4 + 16 * count])


def text_bytes(column: Any) -> int:
    """The length of the text of a column, or a part of one, if each of its values were written out."""
    import pyarrow
    import pyarrow.compute

    if isinstance(column, pyarrow.ChunkedArray):
        return sum(text_bytes(chunk) for chunk in column.chunks)
    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        if not _is_text(kind.value_type):
            return 0
        lengths = pyarrow.compute.binary_length(column.dictionary).fill_null(0).cast("int64")
        return sum(
            pyarrow.compute.sum(lengths.take(column.indices.slice(low, 1 << 20))).as_py() or 0
            for low in range(0, len(column), 1 << 20)
        )
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind):
        return text_bytes(column.flatten())
    return 0


def _is_text(kind: Any) -> bool:
    import pyarrow

    tests = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_binary)
    return any(test(kind) for test in (*tests, pyarrow.types.is_large_binary))
