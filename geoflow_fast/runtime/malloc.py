"""What the allocator of the C library does with freed memory."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Options of `mallopt`: how much freed memory it keeps, and from which size on a block comes from the system and goes
back there at once."""
LARGE_BLOCK, MOST_KEPT = 1 << 30, 2**31 - 1
ADAPTED_BLOCK = 32 << 20
"""The largest value of the second option before glibc 2.35."""
USER_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next allocation, for the rest of this process: its own adaptive thresholds
    cannot be restored. Otherwise each training step asks the system for the memory that the last one has given back.

    For commands only: a library does not decide this for the process that imports it. Nothing changes under another C
    library, or if the user has set one of glibc's variables.
    """
    if os.name != "posix" or any(name in os.environ for name in USER_VARIABLES):
        return
    library = ctypes.CDLL(None)
    if not all(hasattr(library, name) for name in ("mallopt", "gnu_get_libc_version")):
        return
    if not library.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK):
        library.mallopt(M_MMAP_THRESHOLD, ADAPTED_BLOCK)
    library.mallopt(M_TRIM_THRESHOLD, MOST_KEPT)
