"""Embeddings in memory and on disk."""
