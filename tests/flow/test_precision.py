"""Products in another precision: who chooses it, and what it changes."""

from __future__ import annotations

import copy
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import spearmanr

import geoflow_fast as gf
from geoflow_fast.flow import precision
from geoflow_fast.flow.inference import InferenceNetwork
from geoflow_fast.flow.precision import product_dtype
from geoflow_fast.noise import sample_uniform
from geoflow_fast.ops import extension
from geoflow_fast.runtime.device import multiplies_in_tf32
from tests.samples import shaken

WIDTH = 24
HALVES = (torch.bfloat16, torch.float16)
needs_units = pytest.mark.skipif(
    extension.missing_bfloat16() is not None, reason="this processor has no bfloat16 units"
)


def make_flow(dtype: torch.dtype = torch.float32, **changes) -> gf.GeoFlow:
    """A network whose every part matters."""
    torch.manual_seed(0)
    shape = {"hidden": 64, "depth": 3, "heads": 4, "layer_scale": 0.5} | changes
    return shaken(gf.GeoFlow(gf.GeoFlowConfig(WIDTH, WIDTH, **shape)), 1 / 16).to(dtype)


def test_auto_is_float32_where_the_processor_has_no_units(monkeypatch):
    monkeypatch.setattr(extension, "missing_bfloat16", lambda: "this processor has no bfloat16 unit")
    like = torch.empty(0)
    assert product_dtype("auto", like) == torch.float32
    assert product_dtype("bfloat16", like) == torch.bfloat16  # which was asked for by name
    flow, text = make_flow(), sample_uniform(3, WIDTH)
    drawn = [
        gf.sample(flow, text=text, settings=settings, generator=torch.Generator().manual_seed(0))[0]
        for settings in (gf.SamplingSettings(40, 3, precision=name) for name in ("float32", "auto"))
    ]
    assert torch.equal(*drawn)


def test_auto_is_float32_where_bfloat16_is_slower(monkeypatch):
    monkeypatch.setattr(extension, "missing_bfloat16", lambda: None)
    for gain, chosen in ((0.5, torch.float32), (1.1, torch.float32), (2.0, torch.bfloat16)):
        monkeypatch.setattr(precision, "_measured_gain", lambda gain=gain: gain)
        assert product_dtype("auto", torch.empty(0)) == chosen


def test_auto_converts_no_weights_for_a_few_rows(monkeypatch):
    monkeypatch.setattr(precision, "bfloat16_pays", lambda _: True)
    assert product_dtype("auto", torch.empty(0), 127) == torch.float32
    assert product_dtype("auto", torch.empty(0), 128) == torch.bfloat16


def test_networks_of_other_types():
    assert product_dtype("auto", torch.empty(0, dtype=torch.float64)) == torch.float64
    with pytest.raises(ValueError, match="float64"):
        product_dtype("bfloat16", torch.empty(0, dtype=torch.float64))
    assert product_dtype("auto", torch.empty(0, dtype=torch.float16)) == torch.float32  # useless on processors


@pytest.mark.parametrize("settings", [gf.SamplingSettings, gf.DensitySettings])
def test_unknown_precisions_are_refused(settings):
    for name in ("float32", "tf32", "bfloat16", "auto"):
        assert settings(precision=name).precision == name
    with pytest.raises(ValueError, match="precision must be one of auto, float32, bfloat16, tf32, got 'half'"):
        settings(precision="half")


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_facts_name_the_precision(name):
    assert gf.DensitySettings(precision=name).facts()["precision"] == name


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("changes", [{}, {"centre": True, "pca_dim": 12}, {"anchored": True}])
def test_flows_of_16_bits_sample_and_score(dtype, changes):
    """The points stay float32 and on the sphere; results are those of the same weights in float32, up to rounding."""
    half = make_flow(dtype, **changes)
    wide = copy.deepcopy(half).float()
    pair = sample_uniform(6, WIDTH), sample_uniform(6, WIDTH)
    results = []
    for flow in (wide, half):
        image, _ = gf.sample(flow, text=pair[1], n_samples=8, n_steps=4, generator=torch.Generator().manual_seed(0))
        joint = gf.sample(flow, n_samples=8, n_steps=4, generator=torch.Generator().manual_seed(0))
        assert all(x.dtype == torch.float32 for x in (image, *joint))
        torch.testing.assert_close(image.norm(dim=-1), torch.ones(6, 8))
        log_p = gf.log_density(flow, *pair, n_steps=4, generator=torch.Generator().manual_seed(0))
        assert log_p.dtype == torch.float64
        results.append((image, joint[1], log_p))
    for actual, expected, tolerance in zip(*results, (0.1, 0.1, 0.5)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def test_pairs_of_16_bits_are_scored_by_flows_of_16_bits():
    flow, pair = make_flow(torch.bfloat16), [sample_uniform(3, WIDTH).bfloat16() for _ in range(2)]
    assert torch.isfinite(gf.log_density(flow, *pair, n_steps=2)).all()
    assert torch.isfinite(gf.sample(flow, text=pair[1], n_samples=2, n_steps=2)[0]).all()
    v_image, _ = flow.velocity(*pair, 0.5, "joint")
    assert v_image.dtype == torch.bfloat16


def test_autocast_reaches_samples_and_densities(monkeypatch):
    chosen = []
    begin = InferenceNetwork.__init__

    def watch(self, *arguments):
        begin(self, *arguments)
        chosen.append(self.products)

    monkeypatch.setattr(InferenceNetwork, "__init__", watch)
    flow, pair = make_flow(), [sample_uniform(4, WIDTH) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        cast = gf.log_density(flow, *pair, n_steps=4, generator=torch.Generator().manual_seed(0))
        gf.sample(flow, text=pair[1], n_samples=2, n_steps=2)
    plain = gf.log_density(flow, *pair, n_steps=4, generator=torch.Generator().manual_seed(0))
    assert chosen == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert cast.dtype == torch.float64
    assert 0 < (cast - plain).abs().max() < 0.5


@needs_units
def test_entropies_rank_queries_as_in_float32():
    """And the bias of log-densities is below the noise of their probes."""
    flow, world = make_flow(), sample_uniform(400, WIDTH)
    queries = sample_uniform(60, WIDTH)
    sampling = {"n_samples": 20, "n_steps": 8, "guidance": 1.0}
    entropies = []
    for name in ("float32", "bfloat16"):
        settings = gf.SamplingSettings(**sampling, precision=name)
        scorer = gf.RetrievalEntropy(flow, world, direction="t2i", kappa=20.0, settings=settings)
        entropies.append(scorer(queries).entropy)
    assert spearmanr(*entropies).statistic >= 0.999
    pair = sample_uniform(200, WIDTH), sample_uniform(200, WIDTH)
    terms = []
    for name in ("float32", "bfloat16"):
        settings = gf.DensitySettings(n_steps=8, n_probes=2, precision=name)
        generator = torch.Generator().manual_seed(0)
        terms.append(gf.epistemic(flow, *pair, settings=settings, generator=generator))
    bias = (terms[1].score - terms[0].score).mean().abs()
    assert bias < 0.1 * terms[0].stderr.mean()


@pytest.mark.parametrize("name", ["bfloat16", "tf32", "auto"])
def test_other_precisions_are_close(name):
    flow, text = make_flow(), sample_uniform(8, WIDTH)
    drawn = [
        gf.sample(flow, text=text, settings=settings, generator=torch.Generator().manual_seed(0))[0]
        for settings in (gf.SamplingSettings(16, 6, precision=p) for p in ("float32", name))
    ]
    assert (drawn[0] * drawn[1]).sum(-1).min() > 0.99
    if name == "bfloat16":
        assert not torch.equal(*drawn)


@pytest.fixture
def torch_settings():
    """Puts back what a test tells torch about float32 products."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield matmul
    matmul.fp32_precision = before


needs_names = pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this torch has the earlier name alone"
)


@needs_names
@pytest.mark.parametrize("chosen", ["float32", "tf32"])
def test_calls_work_whatever_the_user_tells_torch(torch_settings, chosen):
    """After the new name was used, the earlier one, allow_tf32, raises."""
    flow, rows = make_flow(), sample_uniform(3, WIDTH)
    settings = gf.DensitySettings(n_steps=2, precision=chosen), gf.SamplingSettings(2, 2, precision=chosen)

    def results():
        generator = torch.Generator().manual_seed(0)
        density = gf.log_density(flow, rows, rows.flip(0), generator=generator, settings=settings[0])
        return density, *gf.sample(flow, text=rows, generator=generator, settings=settings[1])

    expected = results()
    torch_settings.fp32_precision = "tf32"
    assert all(torch.equal(one, two) for one, two in zip(results(), expected))
    with precision.tf32_products(enabled=True, device=torch.device("cuda")):
        assert multiplies_in_tf32()
    assert torch_settings.fp32_precision == "tf32"


@pytest.mark.parametrize("earlier", [True, False])
def test_tf32_is_allowed_for_one_call(monkeypatch, earlier):
    if earlier:
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=False))
    assert not multiplies_in_tf32()
    with precision.tf32_products(enabled=True, device=torch.device("cpu")):
        assert not multiplies_in_tf32()

    def failing_call() -> None:
        with precision.tf32_products(enabled=True, device=torch.device("cuda")):
            with precision.tf32_products(enabled=True, device=torch.device("cuda")):
                assert multiplies_in_tf32()
            assert multiplies_in_tf32()
            raise KeyError

    with pytest.raises(KeyError):
        failing_call()
    assert not multiplies_in_tf32()
    assert not torch.backends.cuda.matmul.allow_tf32


def test_calls_of_several_threads_do_not_change_the_precision_of_each_other():
    seen: list[tuple[bool, bool]] = []
    start = threading.Barrier(4)

    def call(enabled: bool) -> None:
        start.wait()
        for _ in range(50):
            with precision.tf32_products(enabled, torch.device("cuda")):
                time.sleep(1e-4)  # lets others run
                seen.append((enabled, multiplies_in_tf32()))

    threads = [threading.Thread(target=call, args=(enabled,)) for enabled in (True, False) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 200
    assert all(enabled is found for enabled, found in seen)
    assert not multiplies_in_tf32()
