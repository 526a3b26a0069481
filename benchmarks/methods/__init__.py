"""Trained baselines, ablations, the paper's tables and studies of quality: what is compared with, and how."""
