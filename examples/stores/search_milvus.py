# Which answers of a Milvus collection to trust: python examples/stores/search_milvus.py
from pymilvus import MilvusClient

import geoflow_fast as gf

task = gf.worlds.ConceptWorld().sample_search(3000, 3000, "t2i")  # yours: queries, and which item is right for some
client = MilvusClient("pictures.db")
client.create_collection("pictures", dimension=24, metric_type="COSINE")
client.insert("pictures", [{"id": k, "vector": row} for k, row in enumerate(task.gallery.tolist())])
hits = gf.stores.MilvusStore(client, "pictures").search(task.queries, 50)  # cosines and ids
labels = hits.labels(task.item.tolist())
trust = gf.Trust().fit(hits.scores[:200], labels[:200])
rule = trust.certify(hits.scores[200:2980], labels[200:2980], max_error=0.10, no_match_share=0.1)
for key, sure, p in zip(hits.ids[2980:, 0], rule(hits.scores[2980:]), trust.p_no_match(hits.scores[2980:], 0.1)):
    print(key if sure else "nothing here", f"(the probability that nothing is right is {p:.2f})")
