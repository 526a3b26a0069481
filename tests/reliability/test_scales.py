"""Scales of rows: whatever multiplies the rows of a file, an array or a tensor, their directions are the same.

Every path from stored rows to unit rows is compared with the same rows at scale one. Where the scale is a power of two
the results must be equal to the last bit, and so must those of all paths; a row without a direction is an error that
names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast import geometry
from geoflow_fast.data.rows import Rows
from geoflow_fast.encoders.protocol import unit_rows as encoder_rows
from geoflow_fast.jobs.embed_columns import _unit as embedded_rows
from geoflow_fast.ops.unit_rows import unit_rows_reference
from tests.stores.test_protocol import Fake

COUNT, DIM = 40, 24
TENS = {torch.float32: 30, torch.float64: 300, torch.float16: 3, torch.bfloat16: 30}
"""Powers of ten up to which rows of each type are scaled, in both directions."""
ALL = torch.arange(COUNT, device="cpu")


def of_gallery(gallery: gf.Gallery) -> Tensor:
    """The rows as a scan reads them, after a check that single reads give the same."""
    rows = torch.cat([block.clone() for _, block in gallery.blocks("cpu")])
    assert torch.equal(gallery.take(ALL), rows)
    return rows


def on_disk(rows: Tensor, folder: Path) -> Path:
    np.save(folder / "rows.npy", rows.numpy())
    return folder / "rows.npy"


def of_table(rows: Tensor) -> pa.Table:
    return pa.table({"embedding": pa.FixedSizeListArray.from_arrays(pa.array(rows.numpy().ravel()), DIM)})


PATHS: dict[str, Callable[[Tensor, Path], Tensor]] = {
    "gallery of a tensor": lambda x, _: of_gallery(gf.Gallery(x, normalize=True)),
    "gallery of an array": lambda x, _: of_gallery(gf.Gallery(x.numpy(), normalize=True)),
    "gallery of a file": lambda x, folder: of_gallery(gf.Gallery(on_disk(x, folder), normalize=True)),
    "embeddings of an array": lambda x, _: of_gallery(gf.Gallery(gf.Embeddings.from_arrays(x.numpy(), normalize=True))),
    "embeddings of a file": lambda x, folder: of_gallery(
        gf.Gallery(gf.Embeddings.open(on_disk(x, folder), normalize=True))
    ),
    "embeddings of a table": lambda x, _: of_gallery(gf.Gallery(gf.Embeddings.from_table(of_table(x), normalize=True))),
    "pairs": lambda x, _: gf.EmbeddingPairs.from_arrays(x.numpy(), x.numpy(), normalize=True)[ALL.numpy()][0],
    "rows": lambda x, _: torch.from_numpy(Rows([x.numpy()], "rows")[ALL.numpy()]),
    "encoder": lambda x, _: encoder_rows(x).float(),
    "embedded": lambda x, _: torch.from_numpy(embedded_rows(x.numpy(), "rows", 0)),
    "gathered": lambda x, _: gf.ops.unit_rows(x, ALL),
    "gathered by plain torch": lambda x, _: unit_rows_reference(x, ALL),
    "geometry": lambda x, _: geometry.unit_rows(x).float(),
}
NOT_NUMPY = {"gallery of a tensor", "encoder", "gathered", "gathered by plain torch", "geometry"}
"""The paths that take bfloat16, which numpy does not have."""


def rows_of(dtype: torch.dtype) -> Tensor:
    """Always the same rows, whose entries keep all their bits when they are scaled by a power of two."""
    drawn = torch.randn(COUNT, DIM, generator=torch.Generator().manual_seed(0))
    return drawn.half().to(dtype)


def cases() -> list[object]:
    return [
        pytest.param(path, dtype, id=f"{path}, {str(dtype).removeprefix('torch.')}")
        for path in PATHS
        for dtype in TENS
        if dtype != torch.bfloat16 or path in NOT_NUMPY
    ]


@pytest.mark.parametrize(("path", "dtype"), cases())
def test_scaled_rows_have_the_same_directions(path, dtype, tmp_path):
    for power in range(-TENS[dtype], TENS[dtype] + 1, max(1, TENS[dtype] // 15)):
        scaled = (rows_of(dtype).double() * 10.0**power).to(dtype)
        exact = scaled.double() / 10.0**power  # the product has lost bits of its own
        exact /= torch.linalg.vector_norm(exact, dim=1, keepdim=True)
        torch.testing.assert_close(PATHS[path](scaled, tmp_path).double(), exact, rtol=0, atol=3e-7)


@pytest.mark.parametrize("path", PATHS)
def test_powers_of_two_change_no_bit(path, tmp_path):
    plain = rows_of(torch.float32)
    expected = PATHS[path](plain, tmp_path)
    for power in (-100, -60, -20, -1, 1, 20, 60, 100):
        assert torch.equal(PATHS[path](plain * 2.0**power, tmp_path), expected), power


def test_all_paths_give_the_same_bits(tmp_path):
    for dtype in (torch.float16, torch.float32):
        plain = rows_of(dtype)
        direct = plain.float() / torch.linalg.vector_norm(plain.float(), dim=1, keepdim=True)
        for path, call in PATHS.items():
            if path != "embedded":  # an encoder's output is scaled in float64
                assert torch.equal(call(plain, tmp_path), direct), path


@pytest.mark.parametrize("path", PATHS)
def test_denormal_and_huge_rows_have_directions(path, tmp_path):
    rows = torch.zeros(COUNT, DIM)
    rows[:, 0], rows[:, 1] = 2.0**-149, -(2.0**-149)
    rows[1, :2], rows[2, :2] = 3.4e38, torch.tensor((3.0e38, -3.0e38))
    rows[3, :2] = torch.tensor((3e-42, 4e-42))
    unit = PATHS[path](rows, tmp_path).double()
    torch.testing.assert_close(torch.linalg.vector_norm(unit, dim=1), torch.ones(COUNT, dtype=torch.float64))
    assert unit[0, :2].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-7)
    assert unit[1, :2].tolist() == pytest.approx([0.5**0.5, 0.5**0.5], abs=1e-7)
    assert unit[2, :2].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-7)
    assert unit[3, :2].tolist() == pytest.approx([0.6, 0.8], abs=1e-3)  # what is left of 3e-42 and 4e-42


CHECKED = {
    name: call for name, call in PATHS.items() if name.startswith(("gallery", "embeddings", "pairs", "embedded"))
}


@pytest.mark.parametrize("path", CHECKED)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("fault", [0.0, math.nan, math.inf, -math.inf])
def test_rows_without_a_direction_are_refused_by_number(path, scale, fault, tmp_path):
    rows = rows_of(torch.float32) * scale
    rows[7] = rows[7] * 0 if fault == 0 else rows[7]
    rows[7, 3], rows[11, 5] = fault, fault
    with pytest.raises(ValueError, match=r"row 7 is (not finite|all zeros)|no direction for row 7 "):
        CHECKED[path](rows, tmp_path)


@pytest.mark.parametrize("kind", [Tensor, np.ndarray])
@pytest.mark.parametrize("scale", [1e-30, 1e-13, 0.5, 1e30])
def test_other_norms_are_named_as_they_are(kind, scale):
    """Without `normalize`, a message says which norm a row has, at any scale."""
    rows = scale * torch.eye(4, 6)
    with pytest.raises(ValueError, match=rf"gallery row 0 has norm {scale:.6g}, not 1".replace("+", r"\+")):
        gf.Gallery(rows if kind is Tensor else rows.numpy())
    with pytest.raises(ValueError, match=rf"queries row 0 has norm {scale:.6g}, not 1".replace("+", r"\+")):
        gf.RetrievalEntropy(small_head(), torch.eye(4, 6))(rows)


def small_head() -> gf.PosteriorHead:
    head = gf.PosteriorHead(gf.HeadConfig(points=2, hidden=4, bias_hidden=3, bank=4), 6, 6).eval()
    head.bank_image.copy_(torch.eye(4, 6))
    head.bank_text.copy_(torch.eye(4, 6))
    return head


def test_vectors_of_stores_have_the_same_directions():
    """Stores of cosines do not ask for unit vectors, so that they may have any scale."""
    store = Fake().store()
    row = np.linspace(1, 2, store.dim)
    expected = row / np.linalg.norm(row)
    for power in range(-30, 31, 5):
        np.testing.assert_allclose(store.unit_vector("a", (row * 10.0**power).astype(np.float32)), expected, atol=1e-6)
