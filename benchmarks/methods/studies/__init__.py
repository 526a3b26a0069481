"""Studies of quality: how good scores, probabilities and certificates are, where the truth is known and on real data.

Each module has `run`, which writes its tables to `benchmarks/results`, fails if a claim of the documentation does not
hold, and returns the tables as Markdown.
"""
