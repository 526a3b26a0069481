"""Rejects images unlike the training data: an out-of-distribution filter with a false-alarm rate that you choose.

    python examples/ood_filter.py

A script of cells, each of which begins with `# %%`; the last one draws ood_filter.png. A minute
or two on two cores. Pairs come from a synthetic world, in which some concepts are kept from training; with your own
embeddings replace the first cell.
"""

# %% Pairs to train on, pairs to set the threshold with, and a stream that contains unseen concepts
import math
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

import geoflow_fast as gf
from geoflow_fast.worlds import ConceptWorld

world = ConceptWorld()
generator = torch.Generator().manual_seed(0)
image, text, _ = world.sample(30_000, generator=generator)
train = gf.EmbeddingPairs.from_arrays(image, text)  # yours: gf.EmbeddingPairs.open_files("images.npy", "texts.npy")
held_image, held_text, _ = world.sample(1000, generator=generator)  # pairs that the flow will not have seen

stream = {
    "known concepts": world.sample(800, generator=generator),
    "unseen, in a known group": world.sample(200, generator=generator, concepts=world.near),
    "unseen group": world.sample(200, generator=generator, concepts=world.far),
}

# %% One flow learns which pairs occur. The run is kept, so running this cell again takes no time
torch.manual_seed(0)
flow = gf.GeoFlow(gf.GeoFlowConfig.tiny(train.image_dim, train.text_dim))
gf.train(flow, train, replace(gf.TrainConfig.tiny(), steps=800), out="runs/ood_filter")


# %% How surprised the flow is at an image: -log p(image), in nats; `.score` adds the text's
def surprise(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """Two probes: one is enough for images far from the training data, near ones need two."""
    return -gf.epistemic(flow, images, texts, n_probes=2, generator=torch.Generator().manual_seed(1)).image


typical = surprise(held_image, held_text)
surprises = {name: surprise(images, texts) for name, (images, texts, _) in stream.items()}

# %% The threshold. If the next familiar image is exchangeable with the n held-out ones, its surprise is as likely to
# take any of the n + 1 places among them; so it lies beyond the ceil((n + 1) (1 - rate))-th with probability `rate` at
# most. Nothing is assumed about the flow: a bad one raises no more false alarms, it misses unseen concepts
rate = 0.05
rank = math.ceil((len(typical) + 1) * (1 - rate))
threshold = float(typical.sort().values[rank - 1])
alarms = {name: float((score > threshold).double().mean()) for name, score in surprises.items()}
print(f"threshold {threshold:.2f} nats for at most {rate:.0%} false alarms; turned away:")
for name, share in alarms.items():
    print(f"  {name}: {share:.1%} of {len(surprises[name])}")


# %% How well unseen concepts are told apart, whatever the threshold; for comparison the distance to the nearest
# training images, which needs no flow but all training images
def distance(images: torch.Tensor) -> torch.Tensor:
    return 1 - (images @ image.T).topk(10).values[:, -1]


auroc = {}
for name in list(stream)[1:]:
    familiar = torch.arange(len(stream["known concepts"][0]) + len(stream[name][0])) < len(surprises["known concepts"])
    both = torch.cat([stream["known concepts"][0], stream[name][0]])
    scores = {
        "flow": torch.cat([surprises["known concepts"], surprises[name]]),
        "10th neighbour": distance(both),
    }
    auroc[name] = {kind: gf.evaluation.auroc(score, familiar) for kind, score in scores.items()}
    print(f"AUROC, {name}: " + ", ".join(f"{kind} {value:.3f}" for kind, value in auroc[name].items()))

# %% A picture
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
every = torch.cat(list(surprises.values()))
edges = torch.linspace(float(every.quantile(0.002)), float(every.quantile(0.998)), 45).tolist()
for (name, score), colour in zip(surprises.items(), ("#3b6fb6", "#3f9b6c", "#e07b28")):
    axes.hist(score.tolist(), edges, density=True, color=colour, alpha=0.25)
    label = f"{name}: {alarms[name]:.0%} turned away"
    axes.hist(score.tolist(), edges, density=True, color=colour, histtype="step", label=label)
axes.axvline(threshold, color="#2b2f36", linewidth=1.5)
axes.text(threshold, axes.get_ylim()[1], "  turned away", va="bottom", fontsize=9)
axes.set(xlabel="-log p(image), nats: further right is more surprising", yticks=[])
axes.set_ylim(0, axes.get_ylim()[1] * 1.15)
axes.spines[["top", "right", "left"]].set_visible(False)
axes.legend(frameon=False, fontsize=9, loc="upper left")
figure.savefig("ood_filter.png", dpi=140)
print("Wrote ood_filter.png")
