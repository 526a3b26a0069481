"""Re-ranks what a FAISS index finds and gives the probability that each result is right. The index is not changed.

pip install faiss-cpu
python examples/rerank_faiss.py runs/first held_out_pairs/ images.npy texts.npy
"""

import sys

import faiss
import numpy as np
import torch

import geoflow_fast as gf

model, held_out, images, texts = sys.argv[1:]
vectors = np.load(images).astype(np.float32)
index = faiss.IndexFlatIP(vectors.shape[1])  # or yours: IVF, HNSW, ... over the same rows
index.add(vectors)

reranker = gf.BayesReranker(gf.GeoFlow.from_pretrained(model), gf.Gallery(vectors, store=index))
reranker.calibrate(gf.EmbeddingPairs.open(held_out))
ranked = reranker(torch.from_numpy(np.load(texts).astype(np.float32)))
for query, (item, prob, outside) in enumerate(zip(ranked.index[:, 0], ranked.prob[:, 0], ranked.p_outside)):
    print(f"text {query}: image {item} with probability {prob:.2f}, not among the first 32 with {outside:.2f}")
