"""Finds captions that belong to another image, in the very pairs that the flow is trained on.

    python examples/clean_pairs.py

A script of cells, each of which begins with `# %%`; the last one draws clean_pairs.png. A minute
or two on two cores. A tenth of the captions of a synthetic world are swapped, so that the hits can be counted; with
your own embeddings replace the first cell.
"""

# %% Pairs, of which a tenth has the caption of another
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

import geoflow_fast as gf
from geoflow_fast.worlds import ConceptWorld

generator = torch.Generator().manual_seed(0)
image, text, concept = ConceptWorld().sample(30_000, generator=generator)
swapped = torch.randperm(len(text), generator=generator)[: len(text) // 10]
text[swapped] = text[swapped.roll(1)]  # each takes the caption of the next
mismatched = torch.zeros(len(text), dtype=torch.bool)
mismatched[swapped] = True
pairs = gf.EmbeddingPairs.from_arrays(image, text)  # yours: gf.EmbeddingPairs.open_files("images.npy", "texts.npy")

# %% One flow learns the pairs, wrong ones included: they have no pattern, so the right ones dominate. The run is kept
torch.manual_seed(0)
flow = gf.GeoFlow(gf.GeoFlowConfig.tiny(pairs.image_dim, pairs.text_dim))
gf.train(flow, pairs, replace(gf.TrainConfig.tiny(), steps=800), out="runs/clean_pairs")

# %% Pointwise mutual information: how many nats more likely the two are together than independently. It is high for an
# unusual image with its own unusual caption, and low for two ordinary ones that have nothing to do with each other.
# `geoflow density --pairs FOLDER` writes it for all pairs of a folder; here for the first 3,000
checked = slice(0, 3000)
pmi = gf.epistemic(flow, image[checked], text[checked], generator=torch.Generator().manual_seed(1)).pmi
cosine = (image[checked] * text[checked]).sum(1)


# %% Starting from the lowest score: how many of the pairs looked at are wrong, how many of the wrong ones are found
def precision_recall(score: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hits = mismatched[checked][score.argsort()].double().cumsum(0)
    return hits / torch.arange(1, len(hits) + 1), hits / hits[-1]


def average_precision(score: torch.Tensor) -> float:
    precision, recall = precision_recall(score)
    return float((precision * recall.diff(prepend=torch.zeros(1))).sum())


precisions = {"PMI of the flow": average_precision(pmi), "cosine": average_precision(cosine)}
share = float(mismatched[checked].double().mean())
print(f"{share:.1%} of {len(pmi)} captions are swapped; average precision of a search for them:")
for name, value in precisions.items():
    print(f"  {name}: {value:.3f}")

# %% What to look at: read the list from its top. Below zero, image and text are more likely independently than together
negative = pmi < 0
print(
    f"PMI below zero: {int(negative.sum())} pairs, {float(mismatched[checked][negative].double().mean()):.0%} of them "
    f"swapped, {float(negative[mismatched[checked]].double().mean()):.0%} of all swapped ones"
)
print("first ten to look at:", pmi.argsort()[:10].tolist())

# %% A picture
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
edges = torch.linspace(float(pmi.quantile(0.002)), float(pmi.quantile(0.998)), 45).tolist()
wrong = mismatched[checked]
for words, part, colour in (("own caption", ~wrong, "#3b6fb6"), ("swapped", wrong, "#d1495b")):
    left.hist(pmi[part].tolist(), edges, color=colour, alpha=0.25)
    left.hist(pmi[part].tolist(), edges, color=colour, histtype="step", label=words)
left.set(xlabel="pointwise mutual information, nats", ylabel="pairs")
for score, name, colour in ((pmi, "PMI of the flow", "#3b6fb6"), (cosine, "cosine", "#8a8f98")):
    precision, recall = precision_recall(score)
    right.plot(
        recall.numpy(),
        precision.numpy(),
        color=colour,
        label=f"{name}, average precision {precisions[name]:.2f}",
    )
right.axhline(share, color="#8a8f98", linewidth=0.8, linestyle=":")
right.set(xlabel="of the swapped captions, found", ylabel="of those looked at, swapped", ylim=(0, 1.03))
for axes, corner in ((left, "upper right"), (right, (0.02, 0.14))):
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc=corner)
figure.savefig("clean_pairs.png", dpi=140)
print("Wrote clean_pairs.png")
