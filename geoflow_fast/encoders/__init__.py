"""Encoders, which turn images and captions into embeddings, and the sources that images are read from."""
