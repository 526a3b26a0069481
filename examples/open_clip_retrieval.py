"""Text-to-image search with open_clip that also reports how ambiguous a query is: three lines more than the search.

    pip install ".[encoders]"
    python examples/open_clip_retrieval.py --model ViT-B-32 --pretrained laion2b_s34b_b79k

Without --pretrained or --checkpoint the weights of the encoder are random and nothing is downloaded: the code runs, but
the answers mean little. The pictures are drawn here: coloured shapes, whose captions name shape and colour, or only one
of them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import open_clip
import torch
from PIL import Image, ImageDraw
from torch import Tensor

import geoflow_fast as gf

COLOURS = ("red", "green", "blue", "yellow", "white")
SHAPES = ("circle", "square", "triangle")


def draw(colour: str, shape: str, size: int, at: int) -> Image.Image:
    picture = Image.new("RGB", (224, 224), "black")
    box = (at, at, at + size, at + size)
    pen = ImageDraw.Draw(picture)
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    else:
        pen.polygon([(at, at + size), (at + size, at + size), (at + size // 2, at)], fill=colour)
    return picture


def captioned_pictures() -> tuple[list[Image.Image], list[str]]:
    """Pictures with one caption each, some of which say less than others."""
    pictures, captions = [], []
    for number, (colour, shape, size) in enumerate(itertools.product(COLOURS, SHAPES, range(60, 140, 10))):
        pictures.append(draw(colour, shape, size, 10 + 7 * (number % 11)))
        captions.append((f"a {colour} {shape}", f"a {shape}", f"something {colour}")[number % 3])
    return pictures, captions


def open_encoder(model: str, pretrained: str | None, checkpoint: str | None) -> gf.OpenClipEncoder:
    """The encoder of an open_clip search; a model that is already loaded is wrapped as in the last line."""
    if pretrained or checkpoint:
        return gf.OpenClipEncoder.load(model, pretrained, checkpoint)
    clip, _, preprocess = open_clip.create_model_and_transforms(model)
    return gf.OpenClipEncoder(clip, preprocess, open_clip.get_tokenizer(model))


def in_batches(encode: Callable[[list], Tensor], items: list, size: int = 32) -> Tensor:
    return torch.cat([encode(items[first : first + size]) for first in range(0, len(items), size)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ViT-S-32-alt", help="any model of open_clip.list_models()")
    parser.add_argument("--pretrained", help="its weights; without, random ones")
    parser.add_argument("--checkpoint", help="a file of weights, where none can be downloaded")
    parser.add_argument("--steps", type=int, default=300, help="training steps of the flow")
    options = parser.parse_args()
    torch.manual_seed(0)
    encoder = open_encoder(options.model, options.pretrained, options.checkpoint)
    pictures, captions = captioned_pictures()
    images, texts = in_batches(encoder.encode_images, pictures), in_batches(encoder.encode_texts, captions)

    # Once per encoder, on as many pairs as you have; here on the pictures above. GeoFlow.from_pretrained loads a flow.
    flow = gf.GeoFlow(gf.GeoFlowConfig.tiny(images.shape[1], texts.shape[1]))
    pairs, held_out = gf.EmbeddingPairs.from_arrays(images, texts).split(0.2, seed=0)
    gf.train(flow, pairs, gf.TrainConfig(steps=options.steps, batch_size=64, lr=2e-3, warmup_steps=20))

    queries = ["a red circle", "a circle", "something red", "anything"]
    query = encoder.encode_texts(queries)
    nearest = (query @ images.T).argmax(1)  # the search, as it was

    fitted = gf.fit_bandwidth(flow, held_out, direction="t2i")
    scorer = gf.RetrievalEntropy.fast(flow, images, "t2i", kappa=fitted.kappa, guidance=fitted.guidance)
    post = scorer(query)

    print(f"{len(images)} pictures; kappa {fitted.kappa:.3g}, guidance {fitted.guidance:g}", end=" ")
    print(f"fitted on {len(held_out)} pairs held out from training")
    for row, text in enumerate(queries):
        print(
            f"{text!r}: picture {int(nearest[row])}, entropy {float(post.entropy[row]):.2f} nats, "
            f"as if among {float(post.entropy[row].exp()):.0f} pictures; "
            f"if that is right, any pick errs with probability {float(post.risk_lower_bound[row]):.2f} or more"
        )


if __name__ == "__main__":
    main()
