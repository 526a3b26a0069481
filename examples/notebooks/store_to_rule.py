"""From the hits of a vector store to a rule, "nothing here" included.

    python examples/notebooks/store_to_rule.py

A notebook as a script: cells begin with `# %%`. `python -m tools.notebooks` renders it with its output.
"""

# %% A store, and its traffic
# 3,000 pictures in FAISS. Any other store of `gf.stores` gives the same numbers. A tenth of the queries ask for a
# picture that is not there.
import faiss
import matplotlib.pyplot as plt
import numpy as np
import torch

import geoflow_fast as gf

world, generator = gf.worlds.ConceptWorld(), torch.Generator().manual_seed(0)
task = world.sample_search(3000, 3000, "t2i", share=0.1, generator=generator)
index = faiss.IndexFlatIP(24)
index.add(task.gallery.numpy())
store = gf.stores.FaissStore(index, ids=[f"{number:04}.jpg" for number in range(3000)])

# %% Hits in
# `search` gives cosines and ids, best first. Judgements say which ids are right; a query without a right picture has
# an empty set.
hits = store.search(task.queries, 50)
right = [{f"{row:04}.jpg"} if row >= 0 else set() for row in task.item.tolist()]
labels = hits.labels(right)
print(f"the first hit of {labels[:, 0].mean():.0%} of the queries is right")

# %% Calibrated probabilities
# 300 judged queries are enough to learn what the shape of a list says.
trust = gf.Trust(seed=0).fit(hits.scores[:300], labels[:300])
new, truth = hits.scores[2000:], labels[2000:, 0]
p = trust.predict_proba(new)[:, 1]
print(f"AUROC of the cosine {gf.evaluation.auroc(-new[:, 0], truth):.2f}")
print(f"AUROC of the trust {gf.evaluation.auroc(1 - p, truth):.2f}")
measured = gf.evaluation.reliability(p, truth)
print(f"expected calibration error {measured.ece:.3f}")

# %% A rule
# At most 15 % of the answers are wrong, with 95 % confidence. The judged queries include those without a right picture.
rule = trust.certify(hits.scores[300:2000], labels[300:2000], max_error=0.15)
print(rule)
answered = rule(new)
print(f"new queries: {answered.mean():.0%} answered, {(~truth[answered]).mean():.1%} of the answers wrong")

# %% Nothing here
# How probable it is that nothing in the store is right, for queries that have a picture and for those that have none.
missing = (task.item[2000:] < 0).numpy()
nothing = trust.p_no_match(new, no_match_share=0.1)
print(f"mean probability {nothing[missing].mean():.2f} without a picture, {nothing[~missing].mean():.2f} with one")
for key, sure, chance in zip(hits.ids[2000:2006, 0], answered, nothing):
    print(key if sure else "nothing here", f"({chance:.2f})")

# %% Evidence from vectors
# The re-ranker needs no judged queries: held-out pairs calibrate it, and the vectors of the hits, fetched from the
# store, are its evidence. Without a head or a flow it knows little more than the scores do.
pairs = gf.EmbeddingPairs.from_arrays(*world.sample(400, generator=generator)[:2])
search = gf.stores.StoreReranker(store, direction="t2i", shortlist=50)
search.calibrate(pairs, progress=False)
answers = search(task.queries[2000:], no_match_share=0.1)
print(f"AUROC of the re-ranker {gf.evaluation.auroc(1 - answers.p_answer, truth):.2f}")

# %% The price of answering more
# The share of wrong answers against the share answered, most certain answers first.
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
for name, sure in (("cosine", new[:, 0]), ("trust", p), ("re-ranker over the store", answers.p_answer)):
    ranked = ~truth[np.argsort(-sure, kind="stable")]
    axes.plot(np.arange(1, len(ranked) + 1) / len(ranked), ranked.cumsum() / np.arange(1, len(ranked) + 1), label=name)
axes.axhline(0.15, color="#8a8f98", linewidth=0.8)
axes.set(xlabel="share of the queries answered", ylabel="share of wrong answers", xlim=(0.02, 1), ylim=(0, None))
axes.legend(frameon=False)
figure.savefig("store_to_rule.png", dpi=110)
