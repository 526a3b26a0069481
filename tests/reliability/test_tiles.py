"""Tiles are cut by the sizes of the caches, and results do not depend on them."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from geoflow_fast.ops import extension

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
KB = 1024
SIZES = {"small": (16 * KB, 128 * KB, 1024 * KB), "large": (64 * KB, 2048 * KB, 64 * 1024 * KB)}
"""Of L1, L2 and what cores share."""
CALLS = """
import sys
import torch
import geoflow_fast as gf
from geoflow_fast.ops import extension
torch.manual_seed(0)
torch.set_num_threads(1)
def rows(*shape):
    return gf.geometry.normalize(torch.randn(*shape))
gallery, samples = rows(5000, 700), rows(40, 3, 700)
codes = gf.ops.RowCodes.encode(gallery)
results = {"caches": torch.tensor(extension.caches())}
for precision in ("float32", "auto"):
    post = gf.ops.gallery_posterior(samples, gallery, 50.0, precision=precision)
    results |= {"entropy " + precision: post.entropy, "log_z " + precision: post.log_z}
for count in (1, 40):
    queries = samples[:count, 0].contiguous()
    results[f"search {count}"] = gf.ops.gallery_search(queries, gallery, 10)[0]
    results[f"by codes {count}"] = gf.ops.gallery_search(queries, gallery, 10, codes=codes)[0]
clouds = [rows(1100, width) for width in (700, 300, 700, 300)]
for eps in (0.05, 0.2):  # in float32, and from rows in bfloat16 where the processor has a unit for them
    index, f, g, _ = torch.ops.geoflow.ot_solve(*clouds, eps, 1e-3, 1000, None, "cpu")
    results |= {f"f {eps}": f, f"g {eps}": g, f"index {eps}": index}
torch.save(results, sys.argv[1])
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the targets compile on x86-64 alone"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
    pytest.mark.skipif(sys.platform != "linux", reason="the sizes of caches are asked for on Linux alone"),
]


@pytest.mark.skipif(extension.missing_bfloat16() is not None, reason=str(extension.missing_bfloat16()))
def test_every_tile_grows_with_its_cache(tmp_path):
    flags = json.loads((ROOT / "csrc" / "cpu" / "targets.json").read_text())["avx512bf16"]["flags"]
    program = tmp_path / "tiles"
    command = [
        "g++",
        "-std=c++17",
        "-O1",
        "-w",
        "-fopenmp",
        *flags,
        f"-I{ROOT / 'csrc'}",
        "-DGEOFLOW_TARGET=avx512bf16",
    ]
    subprocess.run([*command, str(HERE / "tile_driver.cpp"), "-o", str(program)], check=True)
    tiles = {}
    for name, sizes in SIZES.items():
        text = subprocess.run([str(program), *map(str, sizes)], check=True, capture_output=True, text=True).stdout
        tiles[name] = {line.split()[0]: int(line.split()[1]) for line in text.splitlines()}
    assert len(tiles["small"]) == 7
    for name, size in tiles["small"].items():
        assert 0 < size < tiles["large"][name], name


def test_results_do_not_depend_on_the_sizes_of_caches(tmp_path):
    library = tmp_path / "cache_sizes.so"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", str(HERE / "cache_sizes.cpp"), "-ldl", "-o", str(library)]
    subprocess.run(command, check=True)
    results = []
    for name, sizes in SIZES.items():
        caches = {"LD_PRELOAD": str(library), "GEOFLOW_TEST_CACHES": " ".join(map(str, sizes))}
        command = [sys.executable, "-c", CALLS, str(tmp_path / name)]
        subprocess.run(command, check=True, env={**os.environ, **caches})
        results.append(torch.load(tmp_path / name, weights_only=True))
        assert tuple(results[-1].pop("caches").tolist()) == sizes
    assert results[0].keys() == results[1].keys()
    assert len(results[0]) >= 14
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
