"""What GeoFlow is compared with, and how: baselines, ablations, the paper's tables, and studies of quality."""
