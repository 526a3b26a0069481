"""Encoders that turn images and captions into embeddings."""
