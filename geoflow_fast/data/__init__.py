"""Embeddings in memory and on disk: rows of one kind, and pairs of images and texts."""
