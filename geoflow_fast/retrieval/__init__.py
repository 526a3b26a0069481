"""Retrieval with uncertainty: galleries, posteriors over them, re-ranking."""
