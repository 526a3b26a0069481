"""The two uncertainties in two figures, on a sphere in three dimensions; no training, a few seconds.

    python examples/two_uncertainties.py

A notebook as a script: cells begin with `# %%`. Instead of a trained flow it uses the distribution that a flow would
learn, which can be sampled and whose density is known. Draws ambiguous.png and unseen.png, the figures of
docs/uncertainties.md.
"""

# %% A sphere seen from the front: x to the right, z up, y away
import math

import matplotlib.pyplot as plt
import torch
from torch import Tensor

import geoflow_fast as gf
from geoflow_fast.spherical import log_bump, sample_bump

BLUE, ORANGE, GREY, PALE = "#3b6fb6", "#e07b28", "#8a8f98", "#c9ced6"
generator = torch.Generator().manual_seed(3)


def show_sphere(axes: plt.Axes) -> None:
    turn = torch.linspace(0, 2 * math.pi, 200)
    axes.fill(turn.cos(), turn.sin(), color="#f1f3f6", zorder=0)
    axes.set(xlim=(-1.05, 1.05), ylim=(-1.05, 1.05), aspect="equal")
    axes.set_axis_off()


def show_points(axes: plt.Axes, points: Tensor, colour: str, size: float, alpha: float = 1.0) -> None:
    front = points[points[:, 1] < 0]
    axes.scatter(front[:, 0], front[:, 2], s=size, color=colour, alpha=alpha, linewidths=0)


def point(x: float, z: float) -> Tensor:
    """The point of the front that is seen at (x, z)."""
    return torch.tensor([x, -math.sqrt(1 - x * x - z * z), z], dtype=torch.float64)


# %% The first: how many items fit the query. A gallery of 200 images, and two captions; from the flow come fifty image
# embeddings that each could mean. What lies near them gets the probability
captions = {'"my cat Tom on the blue chair"': (point(-0.3, 0.35), 4.2), '"a cat"': (point(0.2, -0.15), 2.0)}
gallery = gf.geometry.sample_uniform(200, 3, generator=generator).double()
gallery[0] = point(-0.31, 0.36)  # Tom
kappa = 150.0
figure, panels = plt.subplots(2, 2, figsize=(9, 7.4), height_ratios=(2.2, 1), layout="constrained")
entropies = {}
for (caption, (centre, strength)), colour, (sphere, bars) in zip(captions.items(), (BLUE, ORANGE), panels.T):
    samples = sample_bump(centre.expand(50, 3), strength, generator)
    post = gf.ops.gallery_posterior(samples.unsqueeze(0).float(), gallery.float(), kappa, top_k=20)
    entropies[caption] = entropy = float(post.entropy)
    risk = float(gf.risk_lower_bound(post.entropy, len(gallery)))
    show_sphere(sphere)
    show_points(sphere, gallery, PALE, 40)
    show_points(sphere, samples, colour, 16, alpha=0.75)
    probable = gallery[post.top_index[0][post.top_prob[0] > 0.03]]  # circled
    probable = probable[probable[:, 1] < 0]
    sphere.scatter(probable[:, 0], probable[:, 2], s=110, facecolors="none", edgecolors="#2b2f36", linewidths=1.2)
    sphere.set_title(f"{caption}\nH = {entropy:.1f} nats: as if among {math.exp(entropy):.0f} images", fontsize=11)
    bars.bar(range(1, 21), post.top_prob[0], color=colour)
    bars.set(ylim=(0, 1), xticks=(1, 5, 10, 15, 20), xlabel="gallery images, most probable first", ylabel="probability")
    words = f"any pick errs with probability\n{risk:.2f} or more"
    bars.text(0.97, 0.9, words, transform=bars.transAxes, ha="right", va="top", fontsize=10)
    bars.spines[["top", "right"]].set_visible(False)
figure.savefig("ambiguous.png", dpi=140)
print({caption: f"H = {entropy:.2f} nats" for caption, entropy in entropies.items()})

# %% The second: has training seen anything like it? Three kinds of images were trained on; no gallery is involved
centres = torch.stack([point(-0.45, 0.35), point(0.45, 0.45), point(-0.05, -0.5)])
kinds = torch.randint(3, (600,), generator=generator)
strength = 3.2
seen, held_out = sample_bump(centres[kinds], strength, generator).split(300)
asked = {"a chair": (point(-0.53, 0.24), BLUE), "an X-ray": (point(0.6, -0.3), ORANGE)}


def surprise(points: Tensor) -> Tensor:
    """-log p in nats: the law is a mixture of three bumps."""
    return math.log(3) - log_bump(points @ centres.T, strength, 3).logsumexp(1)


figure, (sphere, axes) = plt.subplots(1, 2, figsize=(9.5, 4.4), width_ratios=(1, 1.25), layout="constrained")
show_sphere(sphere)
show_points(sphere, seen, GREY, 12, alpha=0.6)
axes.hist(surprise(held_out).tolist(), 30, color=PALE)
limit = float(surprise(held_out).quantile(0.95))
axes.axvline(limit, color=GREY, linestyle=":")
words = " 95 % of the\n held-out images\n lie to the left"
axes.text(limit, axes.get_ylim()[1] * 0.9, words, fontsize=9, color=GREY, va="top")
scores = {}
for name, (point, colour) in asked.items():
    sphere.scatter(point[0], point[2], s=130, color=colour, marker="*", zorder=5)
    sphere.text(float(point[0]), float(point[2]) - 0.08, name, color=colour, fontsize=11, ha="center", va="top")
    scores[name] = score = float(surprise(point.unsqueeze(0)))
    axes.axvline(score, color=colour, linewidth=2)
    axes.text(score, axes.get_ylim()[1] * 1.01, name, color=colour, ha="center", va="bottom", fontsize=11)
sphere.set_title("training images (grey) and two new ones", fontsize=11)
axes.set(xlabel="surprise, -log p(image) in nats", ylabel="held-out images")
axes.spines[["top", "right"]].set_visible(False)
figure.savefig("unseen.png", dpi=140)
print({name: f"{score:.2f} nats" for name, score in scores.items()}, f"95 % of the held-out images: below {limit:.2f}")
