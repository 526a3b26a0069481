"""More than 2^31 elements in one array: offsets are 64 bits wide all the way down."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import geoflow_fast as gf
from geoflow_fast.data.rows import Rows, load_npy
from geoflow_fast.ops import extension

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(extension.missing() is not None, reason="needs the compiled extension"),
]
WIDTH, ITEMS = 16_384, 134_400
AVAILABLE = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "Available" in line)


@pytest.fixture(scope="module")
def sparse_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mapped float32 gallery of 2.2e9 elements. Row i is the axis i mod 16,000; one page per row is on the disk."""
    path = tmp_path_factory.mktemp("large") / "gallery.npy"
    if shutil.disk_usage(path.parent).free < 2**31:
        pytest.skip("needs 2 GB of disk")
    rows = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(ITEMS, WIDTH))
    assert rows.size > 2.2e9
    rows[np.arange(ITEMS), np.arange(ITEMS) % 16_000] = 1
    rows[-1] = 0
    rows[-1, -1] = 1  # the one item along the last axis has the largest offset of all
    rows.flush()
    return path


def test_a_mapped_gallery_of_2_2_billion_elements(sparse_file: Path):
    """Sample e_last: one item has cosine 1, all others 0, so the posterior is known exactly."""
    gallery = gf.Gallery(load_npy(sparse_file, mapped=True))
    sample = torch.zeros(1, 1, WIDTH)
    sample[0, 0, -1] = 1
    kappa = 12.0
    posterior = gallery.statistics(sample, kappa, 3).posterior()
    total = math.exp(kappa) + ITEMS - 1
    top, other = math.exp(kappa) / total, 1 / total
    assert posterior.top_index[0].tolist() == [ITEMS - 1, 0, 1]
    assert float(posterior.top_prob[0, 0]) == pytest.approx(top, rel=1e-5)
    assert float(posterior.entropy[0]) == pytest.approx(
        -top * math.log(top) - (ITEMS - 1) * other * math.log(other), rel=1e-4
    )


def test_the_kernel_addresses_all_of_it_in_one_call(sparse_file: Path):
    """Without cutting the gallery into blocks: one call over 8.8 GB."""
    items = torch.from_numpy(np.load(sparse_file, mmap_mode="c"))
    sample = torch.zeros(1, 1, WIDTH)
    sample[0, 0, -1] = 1
    _, weight, _, _, index = extension.required().gallery_posterior(sample, items, 12.0, 2, None, None, "float32")
    assert index[0].tolist() == [ITEMS - 1, 0]
    assert float(weight[0]) == pytest.approx(1 + (ITEMS - 1) * math.exp(-12.0), rel=1e-5)


def test_rows_at_the_end_are_read_where_they_are(sparse_file: Path):
    rows = Rows([load_npy(sparse_file, mapped=True)], "gallery")
    picked = rows[np.array([ITEMS - 1, ITEMS - 2, 0])]
    assert picked.argmax(1).tolist() == [WIDTH - 1, (ITEMS - 2) % 16_000, 0]


@pytest.mark.skipif(AVAILABLE < 12 * 2**20, reason="needs 12 GB of free memory")
def test_a_transport_matrix_beyond_2_31_entries():
    size = 46_400
    assert size**2 > 2**31
    noise, data = (torch.nn.functional.normalize(torch.randn(size, 4), dim=1) for _ in range(2))
    index, _, g, _ = torch.ops.geoflow.ot_solve(noise, noise, data, data, 0.05, 1e-3, 1, None, "cpu")
    rows = torch.tensor([0, 1, size // 2, size - 2, size - 1])
    angle = torch.acos((noise[rows].double() @ data.double().T).clamp(-1, 1))
    scores = g - 2 * angle
    best, got = scores.max(1).values, scores[torch.arange(len(rows)), index[rows]]
    torch.testing.assert_close(got, best, rtol=0, atol=1e-3)
