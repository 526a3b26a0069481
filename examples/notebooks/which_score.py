"""Which score should I use: several scores on the same queries, for three different questions.

    python examples/notebooks/which_score.py

A notebook as a script: cells begin with `# %%`. `python -m tools.notebooks` renders it with its output.
"""

# %% A search whose truth is known
# 1,000 pictures, 1,000 queries of which a fifth have no right picture, and pairs to calibrate on and to train with. The
# world is synthetic, so that the exact posterior is known.
import matplotlib.pyplot as plt
import numpy as np
import torch

import geoflow_fast as gf

world, generator = gf.worlds.ConceptWorld(), torch.Generator().manual_seed(0)
task = world.sample_search(1000, 1000, "t2i", share=0.2, generator=generator)
judged = world.sample_search(500, 1000, "t2i", share=0.2, generator=generator)
train = gf.EmbeddingPairs.from_arrays(*world.sample(4000, generator=generator)[:2])
held_out = gf.EmbeddingPairs.from_arrays(*world.sample(400, generator=generator)[:2])
cosine = (task.queries @ task.gallery.T).sort(1, descending=True)
right = (cosine.indices[:, 0] == task.item).numpy()
print(f"the first hit of {right.mean():.0%} of the queries is right")

# %% Is this answer right? Scores that need no vectors
# The cosine, its lead over the second, and what `gf.Trust` makes of whole lists after 500 judged queries.
scores = cosine.values[:, :50].numpy()
lists = (judged.queries @ judged.gallery.T).sort(1, descending=True)
trust = gf.Trust(seed=0).fit(lists.values[:, :50].numpy(), (lists.indices[:, :50] == judged.item[:, None]).numpy())
surety = {"cosine": scores[:, 0], "lead over the second": scores[:, 0] - scores[:, 1]}
surety["trust"] = trust.predict_proba(scores)[:, 1]

# %% Scores that look at vectors
# The re-ranker without any model corrects for hubs; a head, trained on 4,000 pairs, is one more rung.
torch.manual_seed(0)
plain = gf.BayesReranker(None, task.gallery, direction="t2i", shortlist=50)
plain.calibrate(held_out, progress=False)
head = gf.PosteriorHead.fit(train, gf.HeadConfig(steps=60), seed=0)
ladder = gf.BayesReranker(None, task.gallery, direction="t2i", shortlist=50, head=head)
ladder.calibrate(held_out, progress=False)
found_plain, found_ladder = (each(task.queries, no_match_share=0.2) for each in (plain, ladder))
surety["re-ranker, no model"] = found_plain.p_answer.numpy()
surety["re-ranker with a head"] = found_ladder.p_answer.numpy()
pmi = world.gallery_pmi(task.queries, task.gallery, "t2i")
missing = world.missing_probability(task.queries, task.gallery, "t2i", 0.2)
exact = (pmi.softmax(1).gather(1, cosine.indices[:, :1]).squeeze(1) * (1 - missing)).numpy()
surety["exact posterior"] = exact
quality = {name: gf.evaluation.auroc(-values, right) for name, values in surety.items()}
for name, value in quality.items():
    print(f"{name:24} AUROC {value:.3f}")

# %% Is anything right here?
# The same question about the whole gallery. Even the exact posterior tells queries without a picture only so well.
absent = (task.item < 0).numpy()
for name, values in (
    ("low cosine", -scores[:, 0]),
    ("trust", trust.p_no_match(scores, 0.2)),
    ("re-ranker with a head", found_ladder.p_no_match.numpy()),
    ("exact posterior", missing.numpy()),
):
    print(f"{name:24} AUROC {gf.evaluation.auroc(values, ~absent):.3f}")

# %% How many items fit?
# The entropy answers another question: it follows the exact posterior's entropy, not whether the answer is right.
entropy = gf.RetrievalEntropy(head, task.gallery, direction="t2i")(task.queries).entropy.numpy()
truth = torch.special.entr(pmi.softmax(1)).sum(1).numpy()
print(f"correlation with the exact entropy: {np.corrcoef(entropy, truth)[0, 1]:.2f}")
for name, values in (("exact posterior", truth), ("head", entropy)):
    print(f"half of the queries fit fewer than {np.exp(np.median(values)):.0f} items by the {name}")

# %% In one picture
figure, axes = plt.subplots(figsize=(6.4, 3), layout="constrained")
axes.barh(list(quality), list(quality.values()), color="#3b6fb6")
axes.invert_yaxis()
axes.set(xlim=(0.5, 1), xlabel='AUROC of "this answer is wrong"')
figure.savefig("which_score.png", dpi=110)
