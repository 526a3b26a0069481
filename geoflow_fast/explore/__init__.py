"""One offline page to look at what a search found, how far to trust it, and where it goes wrong."""
