"""The network against its definition, its symmetries and gradients, and the files it is saved in."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor

import geoflow_fast as gf
from benchmarks.methods.euclidean import twin_of
from geoflow_fast.directions import DIRECTIONS
from geoflow_fast.flow.model import save_weights
from geoflow_fast.flow.network import generated_rows
from geoflow_fast.flow.preprocess import Preprocess
from geoflow_fast.noise import sample_uniform
from geoflow_fast.runtime.tensors import save_tensors
from tests.samples import randomised

SMALL = gf.GeoFlowConfig(image_dim=9, text_dim=7, hidden=32, depth=3, heads=4, dropout=0.0)


def random_flow(config: gf.GeoFlowConfig = SMALL, dtype: torch.dtype = torch.float64) -> gf.GeoFlow:
    return randomised(gf.GeoFlow(config).to(dtype))


def points(rows: int, config: gf.GeoFlowConfig = SMALL, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    image, text = (sample_uniform(rows, d, dtype=dtype) for d in config.flow_dims)
    return image, text


def plain_velocity(flow: gf.GeoFlow, image: Tensor, text: Tensor, t: float, direction: str) -> list[Tensor]:
    """The network written out one stream, one head, one layer at a time from its definition."""
    w, config = flow.state_dict(), flow.config
    given = {"joint": None, "i2t": 0, "t2i": 1}[direction]

    def unit_rows(x):
        return (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()

    def norm(name, x):
        return unit_rows(x) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def condition(stream):
        phase = 2 * torch.pi * (0.0 if stream == given else t) * w["conditioning.frequencies"]
        x = linear("conditioning.time", torch.cat((phase.sin(), phase.cos())))
        x = x + w["conditioning.direction.weight"][("joint", "i2t", "t2i").index(direction)]
        x = x @ w["conditioning.first.weight"][stream] + w["conditioning.first.bias"][stream, 0]
        x = x * x.sigmoid()
        return x @ w["conditioning.second.weight"][stream] + w["conditioning.second.bias"][stream, 0]

    def modulated(stream, half):
        shift, scale = (
            c[stream] @ w["modulation.weight"][k, stream] + w["modulation.bias"][k, stream, 0]
            for k in (2 * half, 2 * half + 1)
        )
        return unit_rows(h[stream]) * (1 + scale) + shift

    c = [condition(stream) for stream in range(2)]
    h = [norm(f"encoders.{s}.1", linear(f"encoders.{s}.0", x)) for s, x in enumerate((image, text))]
    width = config.hidden // config.heads
    for block in range(config.depth):
        cross, cross_scale = w[f"blocks.{block}.cross_weight"], w[f"blocks.{block}.cross_scale"]
        seen = [modulated(stream, 2 * block) for stream in range(2)]
        for own, other in ((0, 1), (1, 0)):
            for head in range(config.heads):
                part = slice(head * width, (head + 1) * width)
                gate = seen[own][:, part] @ cross[own, head, :, :width]
                value = seen[other][:, part] @ cross[other, head, :, width:]
                h[own][:, part] += cross_scale[own, :, part] * gate.sigmoid() * value
        for stream in range(2):
            wide = modulated(stream, 2 * block + 1) @ w[f"blocks.{block}.expand.weight"][stream]
            gate, value = wide[:, : config.inner], wide[:, config.inner :]
            update = (gate * gate.sigmoid() * value) @ w[f"blocks.{block}.contract.weight"][stream]
            h[stream] = h[stream] + w[f"blocks.{block}.forward_scale"][stream] * update
    out = [linear(f"decoders.{s}.1", norm(f"decoders.{s}.0", h[s])) for s in range(2)]
    tangent = [v - (v * x).sum(1, keepdim=True) * x for v, x in zip(out, (image, text))]
    return [torch.zeros_like(v) if stream == given else v for stream, v in enumerate(tangent)]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_network_is_the_one_of_the_paper(direction):
    flow, (image, text) = random_flow(), points(7)
    with torch.no_grad():
        got = flow.velocity(image, text, 0.37, direction)
    for a, b in zip(got, plain_velocity(flow, image, text, 0.37, direction)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_training_and_eval_mode_differ_by_dropout_alone():
    flow, (image, text) = random_flow(), points(29)
    t, direction = torch.rand(29, dtype=torch.float64), torch.randint(0, 3, (29,), dtype=torch.int8)
    for a, b in zip(flow.velocity(image, text, t, direction), flow.train().velocity(image, text, t, direction)):
        torch.testing.assert_close(a, b)


def test_the_gates_of_a_new_network_are_spread_evenly_around_zero():
    """Uniform within 1 / sqrt(width of a head), and values that nothing is sent by yet."""
    torch.manual_seed(0)
    flow = gf.GeoFlow(gf.GeoFlowConfig(8, 8, hidden=128, depth=2, heads=2))
    bound = 64**-0.5
    for block in flow.blocks:
        gate, value = block.cross_weight.detach().chunk(2, dim=-1)
        assert not value.any()
        assert float(gate.abs().max()) <= bound
        assert abs(float(gate.mean())) < 0.05 * bound
        assert float(gate.std()) == pytest.approx(bound / 3**0.5, rel=0.05)


def test_a_new_network_has_zero_velocity():
    flow = gf.GeoFlow(SMALL)
    for direction in DIRECTIONS:
        for v in flow.velocity(*points(5, dtype=torch.float32), 0.3, direction):
            assert not v.any()


@pytest.mark.parametrize("shape", [SMALL, twin_of(SMALL)])
@pytest.mark.parametrize("rows", [1, 7, 129])
def test_rows_do_not_see_each_other(shape, rows):
    """Rows of mixed directions and times give the same velocities as each row alone."""
    flow, (image, text) = random_flow(shape), points(rows)
    t, direction = torch.rand(rows, dtype=torch.float64), torch.randint(0, 3, (rows,), dtype=torch.int8)
    v_image, v_text = flow.velocity(image, text, t, direction)
    for k in range(min(rows, 20)):
        one = flow.velocity(image[k : k + 1], text[k : k + 1], t[k], DIRECTIONS[int(direction[k])])
        torch.testing.assert_close(v_image[k], one[0][0])
        torch.testing.assert_close(v_text[k], one[1][0])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_one_time_for_all_rows_and_a_time_per_row_agree(direction):
    flow, (image, text) = random_flow(), points(7)
    shared = flow.velocity(image, text, 0.25, direction)
    own = flow.velocity(image, text, torch.full((7,), 0.25, dtype=torch.float64), direction)
    for a, b in zip(shared, own):
        torch.testing.assert_close(a, b)


def test_velocities_are_tangent_and_zero_for_a_given_stream():
    flow, (image, text) = random_flow(), points(33)
    v_image, v_text = flow.velocity(image, text, 0.4, "joint")
    assert float((v_image * image).sum(1).detach().abs().max()) < 1e-12
    assert float((v_text * text).sum(1).detach().abs().max()) < 1e-12
    assert torch.equal(flow.velocity(image, text, 0.4, "i2t")[0], torch.zeros_like(image))
    assert torch.equal(flow.velocity(image, text, 0.4, "t2i")[1], torch.zeros_like(text))


def test_velocity_depends_on_time_and_on_the_given_stream():
    """The velocity of the text changes with t and with the given image."""
    flow, (image, text) = random_flow(), points(4)
    early, late = flow.velocity(image, text, 0.1, "i2t")[1], flow.velocity(image, text, 0.9, "i2t")[1]
    other = flow.velocity(image.roll(1, 0), text, 0.1, "i2t")[1]
    assert not torch.allclose(early, late, atol=1e-3)
    assert not torch.allclose(early, other, atol=1e-3)


def test_an_empty_batch_has_empty_velocities():
    flow = random_flow()
    for direction in ("joint", "t2i", torch.empty(0, dtype=torch.int8)):
        v_image, v_text = flow.velocity(*points(0), 0.5, direction)
        assert v_image.shape == (0, 9)
        assert v_text.shape == (0, 7)


def test_swapping_streams_and_weights_swaps_velocities():
    config = dataclasses.replace(SMALL, text_dim=9)
    flow, swapped = random_flow(config), gf.GeoFlow(config).double().eval()
    state = dict(flow.state_dict())
    state["conditioning.direction.weight"] = state["conditioning.direction.weight"][[0, 2, 1]]
    for name, value in list(state.items()):
        if name.startswith("modulation."):
            state[name] = value.flip(1)
        elif name.startswith(("blocks.", "conditioning.first", "conditioning.second")):
            state[name] = value.flip(0)
        elif name.startswith(("encoders.0", "decoders.0")):
            other = name.replace("s.0", "s.1", 1)
            state[name], state[other] = state[other], value
    swapped.load_state_dict(state)
    image, text = points(6, config)
    for direction, mirrored in (("joint", "joint"), ("i2t", "t2i"), ("t2i", "i2t")):
        v_image, v_text = flow.velocity(image, text, 0.3, direction)
        w_image, w_text = swapped.velocity(text, image, 0.3, mirrored)
        torch.testing.assert_close(v_image, w_text)
        torch.testing.assert_close(v_text, w_image)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("t", [0.6, torch.tensor([0.1, 0.6, 0.9], dtype=torch.float64)], ids=["shared", "own"])
def test_velocity_is_differentiable_in_reverse_and_forward_mode(direction, t):
    flow, (image, text) = random_flow(), points(3)

    def both(image: Tensor, text: Tensor) -> Tensor:
        return torch.cat(flow.velocity(image, text, t, direction), dim=1)

    inputs = (image.requires_grad_(), text.requires_grad_())
    assert torch.autograd.gradcheck(both, inputs, fast_mode=True)
    tangents = (torch.randn_like(image), torch.randn_like(text))
    _, pushed = torch.func.jvp(both, (image.detach(), text.detach()), tangents)
    weight = torch.randn_like(pushed)
    pulled = torch.autograd.grad((both(*inputs) * weight).sum(), inputs)
    torch.testing.assert_close((pushed * weight).sum(), sum((a * b).sum() for a, b in zip(pulled, tangents)))


def test_float32_agrees_with_float64():
    """This compares the compiled kernels with plain torch, through the whole network."""
    double, (image, text) = random_flow(), points(130)
    single = gf.GeoFlow(SMALL).eval()
    single.load_state_dict(double.state_dict())
    t, direction = torch.rand(130, dtype=torch.float64), torch.randint(0, 3, (130,), dtype=torch.int8)
    fast = single.velocity(image.float(), text.float(), t.float(), direction)
    for a, b in zip(fast, double.velocity(image, text, t, direction)):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4 * float(b.detach().abs().max()))


def test_number_of_parameters_and_summary():
    assert gf.GeoFlow(gf.GeoFlowConfig.tiny()).num_parameters() == 1_428_272
    assert "1.43 million parameters" in gf.GeoFlow(gf.GeoFlowConfig.tiny()).summary()
    assert gf.GeoFlowConfig.paper().inner == 1408


def test_a_saved_flow_is_loaded_unchanged(tmp_path):
    flow = random_flow(dtype=torch.float32)
    flow.save_pretrained(tmp_path / "model")
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    loaded = gf.GeoFlow.from_pretrained(tmp_path / "model")
    assert not loaded.training
    assert loaded.config == SMALL
    image, text = points(5, dtype=torch.float32)
    for a, b in zip(flow.velocity(image, text, 0.5, "joint"), loaded.velocity(image, text, 0.5, "joint")):
        assert torch.equal(a, b)


def test_loading_keeps_the_dtype_draws_no_random_numbers_and_copies_the_file(tmp_path):
    flow = random_flow()
    flow.save_pretrained(tmp_path)
    before = torch.get_rng_state()
    loaded = gf.GeoFlow.from_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    path = tmp_path / "model.safetensors"
    with open(path, "r+b") as file:  # overwrites the file: a memory-mapped tensor would become zero
        file.write(bytes(path.stat().st_size))
    for (name, a), b in zip(loaded.state_dict().items(), flow.state_dict().values()):
        assert a.dtype == torch.float64
        assert torch.equal(a, b), name
    assert all(p.requires_grad for p in loaded.parameters())


def test_weights_that_do_not_fit_their_configuration_are_refused(tmp_path):
    flow = random_flow(dtype=torch.float32)
    other = dataclasses.replace(SMALL, hidden=1 << 20)  # far too large to be allocated before the shapes are compared
    save_weights(tmp_path, other, flow.state_dict())
    with pytest.raises(ValueError, match="its configuration asks for"):
        gf.GeoFlow.from_pretrained(tmp_path)
    save_weights(tmp_path, SMALL, {**flow.state_dict(), "extra": torch.zeros(1)})
    with pytest.raises(ValueError, match="as extra, but its configuration asks for nothing"):
        gf.GeoFlow.from_pretrained(tmp_path)
    save_tensors(tmp_path / "model.safetensors", flow.state_dict(), kind="model", info={})
    with pytest.raises(
        ValueError, match=r"model.safetensors is damaged or was not written by geoflow_fast: KeyError\('config'\)"
    ):
        gf.GeoFlow.from_pretrained(tmp_path)


def test_a_configuration_survives_json():
    config = dataclasses.replace(SMALL, pca_dim=3, centre=True, anchored=True)
    assert gf.GeoFlowConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    with pytest.raises(ValueError, match="novel"):
        gf.GeoFlowConfig.from_json({**config.to_json(), "novel": 1})


@pytest.mark.parametrize("damage", ["truncated", "flipped", "header", "version", "foreign", "missing"])
def test_damaged_files_are_refused(tmp_path, damage):
    random_flow(dtype=torch.float32).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    raw = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(raw[:-10])
    elif damage == "flipped":
        raw[-5] ^= 1
        path.write_bytes(raw)
    elif damage == "header":
        changed = raw.replace(rb"\"time_scale\": 1.0", rb"\"time_scale\": 2.0")
        assert changed != raw
        path.write_bytes(changed)
    elif damage == "version":
        path.write_bytes(raw.replace(b'"geoflow_version": "1"', b'"geoflow_version": "9"'))
    elif damage == "foreign":
        path.write_bytes(raw.replace(b"geoflow_version", b"another_version"))
    else:
        path.unlink()
    message = {
        "truncated": "truncated",
        "flipped": "corrupt",
        "header": "corrupt",
        "version": "format version 9",
        "foreign": "not written by geoflow_fast",
        "missing": "does not exist",
    }[damage]
    with pytest.raises((ValueError, OSError), match=message):
        gf.GeoFlow.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 30}, "multiple of heads"),
        ({"image_dim": 1}, "image_dim"),
        ({"dropout": 1.0}, "dropout"),
        ({"pca_dim": 8}, "pca_dim"),
        ({"time_scale": 0.0}, "time_scale"),
    ],
)
def test_bad_configurations_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_bad_arguments_are_refused():
    flow, (image, text) = random_flow(), points(3)
    with pytest.raises(ValueError, match="direction must be one of"):
        flow.velocity(image, text, 0.5, "sideways")
    with pytest.raises(ValueError, match="direction row 1 is 7"):
        flow.velocity(image, text, 0.5, torch.tensor([0, 7, 1], dtype=torch.int8))
    with pytest.raises(ValueError, match=r"text must be \[B, 7\]"):
        flow.velocity(image, image, 0.5, "joint")
    with pytest.raises(ValueError, match="text has 2"):
        flow.velocity(image, text[:2], 0.5, "joint")
    with pytest.raises(ValueError, match="t must be a number"):
        flow.velocity(image, text, torch.zeros(2), "joint")
    with pytest.raises(ValueError, match=r"text is torch\.float32 on cpu, but the flow is torch\.float64"):
        flow.velocity(image, text.float(), 0.5, "joint")
    with pytest.raises(ValueError, match=r"image is torch\.float64 on meta"):
        flow.velocity(image.to("meta"), text, 0.5, "joint")
    centred = random_flow(dataclasses.replace(SMALL, centre=True))
    with pytest.raises(ValueError, match=r"image is torch\.float32"):
        centred.to_flow(image.float(), text.float())


def test_preprocessing_can_be_undone_on_its_own_subspace():
    """Data on a small circle around a mean: centring and two components lose nothing."""
    angle = torch.arange(50, dtype=torch.float64) * (2 * torch.pi / 50)
    x = torch.stack((0.6 * angle.cos(), 0.6 * angle.sin(), torch.full_like(angle, 0.8), torch.zeros_like(angle)), 1)
    part = Preprocess(4, 2).double()
    part.fit([x[:20], x[20:]], centre=True)
    torch.testing.assert_close(part(x).norm(dim=1), torch.ones(50, dtype=torch.float64))
    torch.testing.assert_close(part.restore(part(x)), x, atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match="cannot determine"):
        Preprocess(4, 3).fit([x[:2]], centre=True)


@pytest.mark.parametrize("centre", [True, False])
def test_preprocessing_keeps_the_leading_components(centre):
    x = sample_uniform(200, 6, dtype=torch.float64) * torch.tensor([3.0, 2, 1, 0.5, 0.2, 0.1])
    x = torch.nn.functional.normalize(x + torch.tensor([0.0, 0, 1, 0, 0, 0]))
    part = Preprocess(6, 2).double()
    part.fit(x.split(33), centre=centre)
    mean = x.mean(0) if centre else torch.zeros(6, dtype=torch.float64)
    _, _, right = torch.linalg.svd(x - mean)
    torch.testing.assert_close(part.mean, mean)
    torch.testing.assert_close(part.basis.T @ part.basis, right[:2].T @ right[:2])
    torch.testing.assert_close(part.radius, ((x - mean) @ right[:2].T).square().sum(1).mean().sqrt())


def test_preprocessing_does_not_depend_on_the_signs_of_eigenvectors(monkeypatch):
    x = sample_uniform(50, 6, dtype=torch.float64)
    parts, solve = [Preprocess(6, 3).double() for _ in range(2)], torch.linalg.eigh
    parts[0].fit([x], centre=True)
    signs = torch.tensor([-1.0, 1, -1, -1, 1, -1], dtype=torch.float64)
    monkeypatch.setattr(torch.linalg, "eigh", lambda a: (solve(a)[0], -solve(a)[1] * signs))
    parts[1].fit([x], centre=True)
    monkeypatch.setattr(torch.linalg, "eigh", lambda a: (solve(a)[0], solve(a)[1] * signs))
    parts.append(Preprocess(6, 3).double())
    parts[2].fit([x], centre=True)
    for part in parts[1:]:
        torch.testing.assert_close(part.basis, parts[0].basis)


def test_preprocessing_is_saved_with_the_model(tmp_path):
    config = dataclasses.replace(SMALL, centre=True, pca_dim=4)
    flow = gf.GeoFlow(config)
    image, text = sample_uniform(40, 9), sample_uniform(40, 7)
    for part, x in zip(flow.preprocess, (image, text)):
        part.fit([x], centre=True)
    flow.save_pretrained(tmp_path)
    loaded = gf.GeoFlow.from_pretrained(tmp_path)
    seen = loaded.to_flow(image, text)
    assert [x.shape[1] for x in seen] == [4, 4]
    for a, b in zip(seen, flow.to_flow(image, text)):
        assert torch.equal(a, b)
    assert [x.shape[1] for x in loaded.from_flow(*seen)] == [9, 7]
    assert loaded.to_flow(text=text)[0] is None


def test_calling_a_flow_gives_its_velocity():
    flow, (image, text) = random_flow(), points(4)
    for a, b in zip(flow(image, text, 0.3, "i2t"), flow.velocity(image, text, 0.3, "i2t")):
        assert torch.equal(a, b)


@pytest.mark.parametrize("path", ["velocity", "rows of their own times", "training"])
def test_hooks_on_every_block_fire_and_may_change_its_output(path):
    flow, (image, text) = random_flow(), points(4)
    codes = torch.tensor([0, 1, 2, 0], dtype=torch.int8)
    runs = {
        "velocity": lambda: flow.velocity(image, text, 0.3, "joint"),
        "rows of their own times": lambda: flow.velocity(image, text, torch.linspace(0, 1, 4).double(), codes),
        "training": lambda: flow.train().generated(image, text, torch.linspace(0, 1, 4).double(), (1, 2, 1)),
    }
    plain, seen = runs[path](), []
    for block in flow.blocks:
        block.register_forward_hook(lambda block, _, output: seen.append((block, output)))
    for a, b in zip(runs[path](), plain):
        assert torch.equal(a, b)
    assert [block for block, _ in seen] == list(flow.blocks)
    assert all(output.shape == (2, 4, 32) for _, output in seen[:-1])
    # The last block computes only the rows in which a stream is generated: all but n_i2t, and all but n_t2i.
    generated = 4 if path == "velocity" else 3
    assert [output.shape for output in seen[-1][1]] == [(generated, 32)] * 2
    flow.blocks[0].register_forward_hook(lambda *call: call[-1] + 1)
    assert not torch.equal(runs[path]()[0], plain[0])


@pytest.mark.parametrize("counts", [(2, 3, 4), (0, 5, 0), (3, 0, 2), (4, 0, 0), (0, 0, 1), (0, 1, 0)])
def test_gradients_of_the_rows_that_are_generated(counts):
    """Rows in which a stream is given are left out, and have no gradient."""
    x = torch.randn(2, sum(counts), 3, dtype=torch.float64, requires_grad=True)
    image, text = generated_rows(x, counts)
    assert torch.equal(image, x[0, counts[0] :])
    assert torch.equal(text, x[1, : counts[0] + counts[1]])
    (2 * image.sum() + 3 * text.sum()).backward()
    expected = torch.zeros_like(x)
    expected[0, counts[0] :], expected[1, : counts[0] + counts[1]] = 2, 3
    assert torch.equal(x.grad, expected)
