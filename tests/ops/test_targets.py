"""Every instruction set that the processor has: each passes the same tests, and all agree with each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from geoflow_fast.ops import extension
from geoflow_fast.ops.gallery_posterior import ROUNDING_LIMIT

TESTS = Path(__file__).parents[1]
OTHERS = [name for name in extension.supported_isas() if name != extension.isa()]
QUICK = {
    "baseline": ("ops/test_masked_interpolant.py",),
    "avx2": ("ops/test_gallery_search.py",),
}
"""Modules of tests that `make test` repeats, which also compares the results of all instruction sets; `make test-slow`
repeats all modules for each of them."""
MODULES = (
    "ops/test_gallery_posterior.py",
    "ops/test_gallery_search.py",
    "ops/test_gallery_bfloat16.py",
    "ops/test_masked_interpolant.py",
    "ops/test_native_fuzz.py",
    "ops/test_network_cpu.py",
    "ops/test_network_ops.py",
    "ops/test_segments.py",
    "ops/test_tangent_step.py",
    "ops/test_ot.py",
    "flow/test_inference.py",
    "reliability/test_widths.py",
)
CALLS = """
import sys
import torch
import geoflow_fast as gf
from geoflow_fast.ops import extension
from geoflow_fast.ops.tangent_step import tangent_ab2_rows
torch.manual_seed(0)
torch.set_num_threads(1)
def rows(*shape):
    return gf.geometry.normalize(torch.randn(*shape))
results = {"isa": extension.isa()}
samples, gallery = rows(21, 5, 129), rows(1023, 129)
for name, stored in (("", gallery), (" float16", gallery.half()), (" bfloat16", gallery.bfloat16())):
    post = gf.ops.gallery_posterior(samples, stored, 50.0, precision="float32")
    results |= {"entropy" + name: post.entropy, "log_z" + name: post.log_z}
    results["search" + name] = gf.ops.gallery_search(samples[:, 0], stored, 10)[0]
    codes = gf.ops.RowCodes.encode(stored)
    results |= {"codes" + name: codes.code, "code scale" + name: codes.scale, "code error" + name: codes.error}
results["entropy auto"] = gf.ops.gallery_posterior(samples, gallery, 50.0, precision="auto").entropy
many = rows(5000, 129)
results["search by codes"] = gf.ops.gallery_search(samples[:, 0], many, 10, codes=gf.ops.RowCodes.encode(many))[0]
clouds = [rows(300, width) for width in (65, 33, 65, 33)]
t, direction = torch.rand(300), (torch.arange(300) % 3).to(torch.int8)
for name, x in zip(("image_t", "text_t", "v_image", "v_text"), gf.ops.masked_interpolant(*clouds, t, direction)):
    results[name] = x
_, f, g, _ = torch.ops.geoflow.ot_solve(*clouds, 0.05, 1e-5, 1000, None, "cpu")
results |= {"f of points": f, "g of points": g}
solved = gf.ops.sinkhorn(torch.cdist(clouds[0], clouds[2]), 0.02, tol=2e-5)
results |= {"f of costs": solved.f, "g of costs": solved.g}
x, v = rows(129, 37), torch.randn(129, 37)
results["tangent_step"] = gf.ops.tangent_step(x, v, 0.1)
wide, scale = torch.randn(129, 37), torch.randn(1, 37)
results["ab2"], results["carried"] = tangent_ab2_rows(x, v, 0.1, None, 0.0, v, 0.5, "cpu")
results["adaln"], results["swiglu"] = gf.ops.adaln(wide, scale, scale), gf.ops.swiglu(wide, wide)
keep = gf.ops.keep_mask(wide.shape, 0.3)
results["noise"] = gf.ops.counter_noise(torch.arange(100), 37, 5, 6, 0, unit=False)
results["unit noise"] = gf.ops.counter_noise(torch.arange(100), 37, 5, 6, 0)
results["keep"] = keep
results["gate_residual"] = gf.ops.gate_residual(x, wide, v, scale, keep=keep, dropout=0.3)
results["flow_loss"] = gf.ops.flow_loss(v, wide, wide, v, x, x, direction[:129])[1]
torch.save(results, sys.argv[1])
"""
TOLERANCE = 2e-5
"""Between targets, of results of order 1 to 10: the roundings of float32 sums in another order. Potentials have ten
times this, since they are known to a marginal error of 1e-5 alone. Codes and masks are the same to the last bit."""
ALLOWED = {"f ": 10 * TOLERANCE, "g ": 10 * TOLERANCE, "codes": 0.0, "keep": 0.0, "entropy auto": ROUNDING_LIMIT}
"""By the beginnings of names; "auto" is bfloat16 where the processor has such a unit."""


def run(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GEOFLOW_ISA": isa}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment)


def test_an_unknown_name_is_an_error():
    isa = "AVX2" if "avx2" in OTHERS else "nonsense"
    result = run(isa, "-c", "from geoflow_fast.ops import extension; extension.isa()")
    assert result.returncode != 0
    assert (
        f"ValueError: GEOFLOW_ISA={isa}: this processor can run {', '.join(extension.supported_isas())}"
        in result.stderr
    )


def test_targets_agree(tmp_path):
    by_isa = {}
    for isa in extension.supported_isas():
        result = run(isa, "-c", CALLS, str(tmp_path / isa))
        assert result.returncode == 0, result.stderr
        by_isa[isa] = torch.load(tmp_path / isa, weights_only=True)
        assert by_isa[isa].pop("isa") == isa
    best = by_isa[extension.supported_isas()[-1]]
    for isa, results in by_isa.items():
        for name, value in results.items():
            allowed = next((ALLOWED[start] for start in ALLOWED if name.startswith(start)), TOLERANCE)
            assert torch.allclose(value.double(), best[name].double(), rtol=1e-6, atol=allowed), (isa, name)


@pytest.mark.parametrize(
    ("isa", "module"),
    [
        pytest.param(isa, module, marks=() if module in QUICK.get(isa, ()) else pytest.mark.slow)
        for isa in OTHERS
        for module in MODULES
    ],
)
def test_every_target_passes_the_same_tests(isa, module):
    result = run(isa, "-m", "pytest", "-q", "-m", "not slow and not gpu", str(TESTS / module))
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
