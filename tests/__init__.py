"""The tests, as a package of their own: others install one of that name, which would be found instead."""
