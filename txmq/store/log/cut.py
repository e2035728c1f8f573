"""The cut of a log that is a copy of a shared one.

A replica writes its log without syncs: what lies behind the position that its tables
stand for is on disk in part, in any order, or not at all, and nothing there proves that
it counts. The node cuts it and reads it again from its peers.
"""

from __future__ import annotations

from contextlib import closing

from txmq.store.filesystem import FileSystem
from txmq.store.log.segment import list_segments, log_directory


def cut_log(fs: FileSystem, directory: str, position: int) -> None:
    """Remove everything from `position` on; a record or segment ends there.

    The caller holds the directory's lock. It may be interrupted and run again.
    """
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
