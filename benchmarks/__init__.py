"""Benchmarks of every operation next to its peers: `pytest benchmarks --benchmark-only`."""
