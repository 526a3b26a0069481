"""Long computations from files to files, which continue after a kill."""
