# Which answers of a LanceDB table to trust: python examples/stores/search_lancedb.py
import lancedb

import geoflow_fast as gf

task = gf.worlds.ConceptWorld().sample_search(3000, 3000, "t2i")  # yours: queries, and which item is right for some
rows = [{"id": k, "vector": row} for k, row in enumerate(task.gallery.numpy())]
table = lancedb.connect("pictures.lance").create_table("pictures", rows, mode="overwrite")
hits = gf.stores.LanceStore(table).search(task.queries, 50)  # cosines and ids
labels = hits.labels(task.item.tolist())
trust = gf.Trust().fit(hits.scores[:200], labels[:200])
rule = trust.certify(hits.scores[200:2980], labels[200:2980], max_error=0.10, no_match_share=0.1)
for key, sure, p in zip(hits.ids[2980:, 0], rule(hits.scores[2980:]), trust.p_no_match(hits.scores[2980:], 0.1)):
    print(key if sure else "nothing here", f"(the probability that nothing is right is {p:.2f})")
