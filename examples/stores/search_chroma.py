# Which answers of a Chroma collection to trust: python examples/stores/search_chroma.py
import chromadb

import geoflow_fast as gf

task = gf.worlds.ConceptWorld().sample_search(3000, 3000, "t2i")  # yours: queries, and which item is right for some
collection = chromadb.EphemeralClient().create_collection("pictures", configuration={"hnsw": {"space": "cosine"}})
collection.add(ids=[f"{k}.jpg" for k in range(3000)], embeddings=task.gallery.numpy())
hits = gf.stores.ChromaStore(collection).search(task.queries, 50)  # cosines and ids
labels = hits.labels([f"{k}.jpg" for k in task.item.tolist()])
trust = gf.Trust().fit(hits.scores[:200], labels[:200])
rule = trust.certify(hits.scores[200:2980], labels[200:2980], max_error=0.10, no_match_share=0.1)
for key, sure, p in zip(hits.ids[2980:, 0], rule(hits.scores[2980:]), trust.p_no_match(hits.scores[2980:], 0.1)):
    print(key if sure else "nothing here", f"(the probability that nothing is right is {p:.2f})")
