# Which answers of a Qdrant collection to trust: python examples/stores/search_qdrant.py
from qdrant_client import QdrantClient, models

import geoflow_fast as gf

task = gf.worlds.ConceptWorld().sample_search(3000, 3000, "t2i")  # yours: queries, and which item is right for some
client = QdrantClient(":memory:")
client.create_collection("pictures", vectors_config=models.VectorParams(size=24, distance=models.Distance.COSINE))
client.upload_collection("pictures", vectors=task.gallery.numpy(), ids=range(3000))
hits = gf.stores.QdrantStore(client, "pictures").search(task.queries, 50)  # cosines and ids
labels = hits.labels(task.item.tolist())
trust = gf.Trust().fit(hits.scores[:200], labels[:200])
rule = trust.certify(hits.scores[200:2980], labels[200:2980], max_error=0.10, no_match_share=0.1)
for key, sure, p in zip(hits.ids[2980:, 0], rule(hits.scores[2980:]), trust.p_no_match(hits.scores[2980:], 0.1)):
    print(key if sure else "nothing here", f"(the probability that nothing is right is {p:.2f})")
