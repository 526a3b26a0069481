"""Benchmarks: a correctness gate first, then times; ratios within one run, and shares of what the machine allows."""
