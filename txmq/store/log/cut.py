"""The cut of a log that is a copy of a shared one.

A replica writes its log without syncs: what lies behind the position that its tables
stand for is on disk in part, in any order, or not at all, and nothing there proves that
it counts. The node cuts it and reads it again from its peers.

Where the partition turned out to be another one, a copy may be the longest that is
left. A mark then keeps it as it is until an operator removes the mark.
"""

from __future__ import annotations

from contextlib import closing

from txmq.errors import StoreError
from txmq.store.filesystem import FileSystem
from txmq.store.log.segment import list_segments, log_directory

MARK = "diverged"
# what an operator does about a node's copy, for hints
LONGEST_COPY = (
    "find out which copy of the log is longest (txmq log verify --data DIR)"
    " before you start anything again"
)


def forbid_cut(fs: FileSystem, directory: str, why: str) -> None:
    """Let nobody cut the log in a data directory, from now on."""
    if MARK not in fs.listdir(directory):
        with closing(fs.create(f"{directory}/{MARK}")) as file:
            file.pwrite([f"{why}\n".encode()], 0)
            file.fsync()
        fs.sync_directory(directory)


def cut_log(fs: FileSystem, directory: str, position: int) -> None:
    """Remove everything from `position` on; a record or segment ends there.

    The caller holds the directory's lock. It may be interrupted and run again. Raises
    StoreError where that is forbidden.
    """
    if MARK in fs.listdir(directory):
        raise StoreError(
            f"{directory} is kept as it is: it may have what the partition has lost,"
            f" as {directory}/{MARK} says",
            hint="compare the ends of all nodes' copies (txmq log verify --data DIR); where"
            " this one is not needed, remove that file to follow the partition again",
        )
    segments = list_segments(fs, directory)
    for segment in reversed(segments):  # a crash in between leaves no gap
        if segment.first >= position:
            fs.remove(segment.path)
    fs.sync_directory(log_directory(directory))
    for segment in segments:
        if segment.first < position < segment.end:
            with closing(fs.open(segment.path, write=True)) as file:
                file.truncate(position - segment.first)
                file.fsync()
