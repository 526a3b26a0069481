"""The velocity field: its network, its solvers and its samples."""
