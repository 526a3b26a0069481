"""Log-densities under a velocity field."""
