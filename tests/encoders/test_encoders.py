"""Encoders: open_clip's models against open_clip itself, their weights from files that may be wrong, and colours."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from benchmarks.methods.activations import projections
from geoflow_fast.encoders.colours import ColourEncoder
from geoflow_fast.encoders.open_clip import OpenClipEncoder
from geoflow_fast.encoders.registry import open_encoder
from tests.encoders import tiny_clip

pytestmark = pytest.mark.usefixtures("_torchvision_operators")

TEXTS = ["a red circle", "something else", "Ünïcode"]
TIMM = {"timm_model_name": "test_vit", "image_size": 160, "timm_pool": "avg", "timm_proj": "linear"}
# Forms of towers that open_clip has: its own, timm's, ResNets; texts inside the model, apart, and SigLIP's with a bias.
MODELS = {
    "plain": (tiny_clip.CONFIG, True),
    "custom text": (tiny_clip.changed(custom_text=True), True),
    "timm": (tiny_clip.changed(vision_cfg=TIMM), True),
    "siglip": (
        tiny_clip.changed(
            custom_text=True,
            init_logit_bias=-10,
            vision_cfg=TIMM | {"timm_pool": "map", "timm_proj": "none"},
            text_cfg={"no_causal_mask": True, "proj_bias": True, "pool_type": "last"},
            embed_dim=64,
        ),
        False,
    ),
    "resnet": (tiny_clip.changed(vision_cfg={"layers": [1, 1, 1, 1], "width": 16, "patch_size": None}), False),
    "coca": (
        {
            **tiny_clip.changed(
                custom_text=True,
                vision_cfg={"output_tokens": True, "attentional_pool": True, "attn_pooler_heads": 2},
                text_cfg={"embed_cls": True, "output_tokens": True},
            ),
            "multimodal_cfg": {"context_length": 16, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1},
        },
        True,
    ),
}


def pictures(count: int = 5) -> list[Image.Image]:
    rng = np.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 256, (30 + 9 * k, 70, 3), dtype=np.uint8)) for k in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, _torchvision_operators) -> Path:
    """A tiny model in a folder of its own."""
    path = tmp_path_factory.mktemp("model")
    tiny_clip.save_model(path)
    return path


@pytest.mark.parametrize("form", MODELS)
def test_embeddings_are_those_of_open_clip(tmp_path, form):
    import open_clip

    config, separable = MODELS[form]
    model = tiny_clip.save_model(tmp_path, config)
    name = f"local-dir:{tmp_path}"
    encoder = OpenClipEncoder.load(name, device="cpu")
    _, _, transform = open_clip.create_model_and_transforms(name)
    tokens = open_clip.get_tokenizer(name)(TEXTS)
    with torch.no_grad():
        image = model.encode_image(torch.stack([transform(x) for x in pictures()]), normalize=True)
        text = model.encode_text(tokens, normalize=True)
    embeddings = encoder.encode_images(pictures()), encoder.encode_texts(TEXTS)
    for ours, theirs in zip(embeddings, (image, text)):
        assert ours.dtype == torch.float32
        assert ours.shape == (len(theirs), encoder.dim)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert encoder.encode_images([]).shape == encoder.encode_texts([]).shape == (0, encoder.dim)
    if separable:
        check_projections(encoder, embeddings)
    else:
        with pytest.raises(ValueError, match=r"image tower of .* does not end in a linear projection"):
            projections(encoder)


def check_projections(encoder: OpenClipEncoder, embeddings: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Checks in float64 that activations times projections are the embeddings."""
    weights = {name: value.double() for name, value in projections(encoder).items()}
    activations = encoder.image_activations(pictures()), encoder.text_activations(TEXTS)
    for tower, phi, expected in zip(("image", "text"), activations, embeddings):
        x = phi.double() @ weights[f"{tower}.weight"].T + weights.get(f"{tower}.bias", 0)
        torch.testing.assert_close(nn.functional.normalize(x), expected.double(), rtol=1e-5, atol=1e-6)


def test_the_wrapped_model_stays_as_it_was(folder):
    model = tiny_clip.save_model(folder)
    image = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        before = model.encode_image(image)
        encoder = OpenClipEncoder(
            model, lambda _: image[0], lambda texts: torch.ones(len(texts), 16).long(), device="cpu"
        )
        encoder.encode_images([image[0]])
        encoder.encode_texts(["x"])
        torch.testing.assert_close(model.encode_image(image), before, rtol=0, atol=0)
    assert encoder.facts()["weights"] == OpenClipEncoder.load(f"local-dir:{folder}", device="cpu").facts()["weights"]


def test_files_images_and_prepared_images_give_the_same_embeddings(folder, tmp_path):
    encoder = OpenClipEncoder.load(f"local-dir:{folder}", device="cpu")
    image = pictures(1)[0]
    image.save(tmp_path / "ü.png")
    alike = encoder.encode_images([image, tmp_path / "ü.png", str(tmp_path / "ü.png"), encoder.prepare(image)])
    torch.testing.assert_close(alike, alike[:1].expand_as(alike), rtol=1e-5, atol=1e-6)


def test_mixed_precision_gives_near_but_other_embeddings(folder):
    exact, mixed = (
        OpenClipEncoder.load(f"local-dir:{folder}", device="cpu", precision=name) for name in ("auto", "bfloat16")
    )
    a, b = (encoder.encode_images(pictures()) for encoder in (exact, mixed))
    assert 0 < float((a - b).abs().max()) < 0.05
    assert b.dtype == torch.float32
    torch.testing.assert_close(b.norm(dim=1), torch.ones(5), rtol=1e-6, atol=1e-6)
    assert exact.facts() != mixed.facts()


def test_checkpoints_replace_the_weights(folder, tmp_path):
    model = tiny_clip.save_model(tmp_path / "other")
    with torch.no_grad():
        model.visual.proj.mul_(-1)
    torch.save({"state_dict": {f"module.{k}": v for k, v in model.state_dict().items()}, "epoch": 3}, tmp_path / "x.pt")
    plain, other = (
        OpenClipEncoder.load(f"local-dir:{folder}", checkpoint=file, device="cpu") for file in (None, tmp_path / "x.pt")
    )
    torch.testing.assert_close(other.encode_images(pictures()), -plain.encode_images(pictures()))
    assert plain.facts()["weights"] != other.facts()["weights"]


class Harm:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def harmful(path: Path) -> None:
    torch.save({"state_dict": {"visual.proj": Harm(path.with_name("harm"))}}, path)


def harmful_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Harm(path.with_name("harm"))))


def scripted(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)


BAD = {
    "harmful.pt": (harmful, "without executing code"),
    "harmful.bin": (harmful_pickle, "without executing code"),
    "junk.pt": (lambda path: path.write_bytes(b"junk"), "without executing code"),
    "empty.pt": (lambda path: path.write_bytes(b""), "without executing code"),
    "script.pt": (scripted, "without executing code"),
    "other.pt": (lambda path: torch.save(nn.Linear(2, 2).state_dict(), path), "does not hold the weights"),
    "list.pt": (lambda path: torch.save([1, 2], path), "does not hold the weights"),
    "junk.safetensors": (lambda path: path.write_bytes(b"junk"), "does not hold the weights"),
    "arrays.npz": (lambda path: np.savez(path, a=np.ones(2)), "archive of numpy"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", BAD)
def test_wrong_checkpoints_are_refused_and_execute_nothing(folder, tmp_path, monkeypatch, name):
    """This holds even if the environment allows torch to execute code."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    make, message = BAD[name]
    make(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name} .*{message}") as error:
        OpenClipEncoder.load(f"local-dir:{folder}", checkpoint=tmp_path / name, device="cpu")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "harm").exists()


def test_folders_with_wrong_weights_execute_nothing(tmp_path):
    tiny_clip.save_model(tmp_path)
    (tmp_path / "open_clip_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"could not be loaded: .*[Rr]equired"):
        OpenClipEncoder.load(f"local-dir:{tmp_path}", device="cpu")
    harmful(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="could not be loaded"):
        OpenClipEncoder.load(f"local-dir:{tmp_path}", device="cpu")
    assert not (tmp_path / "harm").exists()


def test_tokenizers_of_a_folder(tmp_path):
    """Hugging Face files beside the configuration are read without a network; a tokenizer with code is refused."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    config = tiny_clip.changed(text_cfg={"hf_tokenizer_name": "somebody/else", "vocab_size": 9})
    tiny_clip.save_model(tmp_path, config)
    words = Tokenizer(WordLevel({"[PAD]": 0, "a": 1, "red": 2, "circle": 3, "[UNK]": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    encoder = OpenClipEncoder.load(f"local-dir:{tmp_path}", device="cpu")
    rows = encoder.encode_texts(["a red circle", "a red  circle", "circle a red"])
    torch.testing.assert_close(rows[0], rows[1])
    assert float((rows[0] - rows[2]).abs().max()) > 1e-3

    config["text_cfg"]["tokenizer_kwargs"] = {"trust_remote_code": True}
    tiny_clip.save_model(tmp_path, config)
    encoder = OpenClipEncoder.load(f"local-dir:{tmp_path}", device="cpu")
    assert encoder.encode_images(pictures(1)).shape == (1, 16)
    with pytest.raises(ValueError, match="would execute code"):
        encoder.encode_texts(["a"])


@pytest.fixture
def by_name(folder, monkeypatch) -> Path:
    """Registers the model with open_clip as `tiny-test`, and returns its weights."""
    import open_clip

    weights = folder / "open_clip_model.safetensors"
    monkeypatch.setitem(open_clip.factory._MODEL_CONFIGS, "tiny-test", tiny_clip.CONFIG)
    common = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "interpolation": "bicubic", "resize_mode": "shortest"}
    tags = {
        "here": {**common, "file": str(weights)},
        "there": {**common, "url": "https://nowhere.invalid/x.pt"},
    }
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "tiny-test", tags)
    return weights


def test_models_by_name(by_name, folder):
    expected = OpenClipEncoder.load(f"local-dir:{folder}", device="cpu").encode_images(pictures())
    for weights in ({"pretrained": "here"}, {"checkpoint": by_name}, {"checkpoint": by_name, "pretrained": "there"}):
        encoder = OpenClipEncoder.load("tiny-test", **weights, device="cpu")
        torch.testing.assert_close(encoder.encode_images(pictures()), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("by_name")
def test_a_failed_download_names_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(OSError, match=r"tiny-test could not be downloaded .*--checkpoint") as error:
        OpenClipEncoder.load("tiny-test", "there", device="cpu")
    assert "\n" not in str(error.value)


def test_the_tag_of_a_checkpoint_decides_how_images_are_prepared(by_name, monkeypatch):
    """open_clip knows two kinds of preprocessing for the model, so the tag must be named."""
    import open_clip

    tags = open_clip.pretrained._PRETRAINED["tiny-test"]
    monkeypatch.setitem(tags, "there", {**tags["there"], "resize_mode": "squash", "quick_gelu": True})
    with pytest.raises(ValueError, match=r"differ in how images are prepared.*here, there"):
        OpenClipEncoder.load("tiny-test", checkpoint=by_name, device="cpu")
    encoder = OpenClipEncoder.load("tiny-test", "there", by_name, device="cpu")
    assert encoder.facts()["preprocess"]["resize_mode"] == "squash"
    assert any(type(module).__name__ == "QuickGELU" for module in encoder.model.modules())


def test_the_papers_encoders_are_known():
    import open_clip

    from geoflow_fast.encoders.open_clip import USUAL_WEIGHTS, _settings_of_weights

    for model, tag in USUAL_WEIGHTS.items():
        assert _settings_of_weights(open_clip, model, None, None) == open_clip.get_pretrained_cfg(model, tag)
    assert _settings_of_weights(open_clip, "ViT-L-16-SigLIP-384", None, None)["mean"] == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "tiny-tset"}, "no model 'tiny-tset'; similar names: .*tiny-test"),
        ({"model": "tiny-test"}, "name the weights of tiny-test by --pretrained or --checkpoint; it has here, there"),
        ({"model": "tiny-test", "pretrained": "nope"}, "no weights 'nope' for tiny-test; it has here, there"),
        ({"model": "tiny-test", "checkpoint": "nowhere.pt"}, "nowhere.pt does not exist"),
        ({"model": "local-dir:nowhere"}, "nowhere holds no open_clip_config.json"),
        ({"model": "local-dir:nowhere", "pretrained": "here"}, "comes with its weights"),
        ({"model": "tiny-test", "pretrained": "here", "precision": "int4"}, "precision must be auto, float32"),
        ({"model": "tiny-test", "pretrained": "here", "device": "cuda:99"}, "cannot be used here"),
    ],
)
@pytest.mark.usefixtures("by_name")
def test_wrong_names(arguments, message):
    with pytest.raises((ValueError, OSError), match=message):
        OpenClipEncoder.load(**arguments)


def test_texts_that_name_a_colour_find_its_images():
    encoder = ColourEncoder()
    names = [name for name, _ in encoder.COLOURS]
    images = encoder.encode_images([Image.new("RGB", (50, 40), rgb) for _, rgb in encoder.COLOURS])
    texts = encoder.encode_texts([f"a picture of a {name} thing" for name in names])
    assert images.shape == texts.shape == (11, encoder.dim)
    for rows in (images, texts):
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(11))
    assert (texts @ images.T).argmax(1).tolist() == list(range(11))
    same = encoder.encode_texts(["Gray, violet!", "grey purple"])
    torch.testing.assert_close(same[0], same[1])
    assert encoder.encode_images([]).shape == (0, 64)
    assert encoder.encode_texts([""]).isfinite().all()


def test_encoders_by_name():
    assert isinstance(open_encoder("colours"), ColourEncoder)
    with pytest.raises(ValueError, match="--checkpoint is for --encoder open_clip"):
        open_encoder("colours", checkpoint=Path("x"))
    with pytest.raises(ValueError, match="encoder must be open_clip, transformers, sentence-transformers, colours"):
        open_encoder("nope")
