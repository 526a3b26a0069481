"""Training of flows and baselines."""
