"""How the broker's process deals with memory that it has used.

Replies to consumers and the frames of large batches are buffers of megabytes, used
once. The C library would ask the kernel for each of them and give it back, and most of
the time of a reader of a backlog would go into clearing pages.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 64 << 20  # free memory at the end of the heap, for the next buffers
LARGE_BYTES = 32 << 20  # glibc takes no more: larger buffers than any that is kept


def keep_freed() -> None:
    """Lets the process keep what it frees, up to a bound. Not every C library knows
    how; then all stays as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
