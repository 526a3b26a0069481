# Which answers of a PostgreSQL table to trust: PGHOST=... python examples/stores/search_pgvector.py
import psycopg

import geoflow_fast as gf

task = gf.worlds.ConceptWorld().sample_search(3000, 3000, "t2i")  # yours: queries, and which item is right for some
connection = psycopg.connect(autocommit=True)
connection.execute("CREATE TEMPORARY TABLE pictures (id int, embedding vector(24))")
connection.cursor().executemany("INSERT INTO pictures VALUES (%s, %s)", enumerate(map(str, task.gallery.tolist())))
hits = gf.stores.PgvectorStore(connection, "pictures").search(task.queries, 50)  # cosines and ids
labels = hits.labels(task.item.tolist())
trust = gf.Trust().fit(hits.scores[:200], labels[:200])
rule = trust.certify(hits.scores[200:2980], labels[200:2980], max_error=0.10, no_match_share=0.1)
for key, sure, p in zip(hits.ids[2980:, 0], rule(hits.scores[2980:]), trust.p_no_match(hits.scores[2980:], 0.1)):
    print(key if sure else "nothing here", f"(the probability that nothing is right is {p:.2f})")
