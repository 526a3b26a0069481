"""Training: one loop for flows and heads. `objective` says what is trained, `loop` runs it, and `ranks` holds what
several processes add."""
