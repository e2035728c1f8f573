"""Limits of the broker's process: open files, and memory that it does not give back.

Log, tables and databases come first among the open files; connections get the others.

Replies to consumers and the frames of large batches are buffers of megabytes, used
once. By default the C library maps each of them anew and gives it back. Clearing those
pages would take most of the time of a reader of a backlog.
"""

from __future__ import annotations

import ctypes
import gc
import resource

# segments, tables, sockets of resolvers and of HTTP, and the child processes' pipes
RESERVED_FILES = 256
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
FREE_BYTES = 64 << 20  # at the end of the heap, kept for the next buffers
# Of Python's cycle collector: it looks at new objects for each so many more of them,
# and at all only after 100 million. With its defaults a join of 8,192 partitions takes
# 245 ms, with these 56 ms (2026-11-22).
COLLECTIONS = (100_000, 20, 50)
LARGE_BYTES = 32 << 20  # glibc's upper limit: larger than any buffer that is used again


def raise_file_limit() -> None:
    """Allow as many open files as the system permits; a shell's default is meant for
    people at a terminal.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connection_limit() -> int:
    """Return the number of connections that there are file handles for."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft - RESERVED_FILES


def keep_freed_memory() -> None:
    """Keep freed memory in the process, up to a bound. A C library without `mallopt`
    stays as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_TRIM_THRESHOLD, FREE_BYTES)


def collect_rarely() -> None:
    """Collect cycles among new objects only: the state has none, and is large."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)
