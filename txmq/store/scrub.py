"""Reading what is durable again, a part at a time, to find what has rotted before
somebody needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.store.scan import Damage

if TYPE_CHECKING:
    from txmq.store.log import Log
    from txmq.store.reader import LogReader


class Span(NamedTuple):
    """A segment that begins at `first`: its records end at `end`."""

    first: int
    end: int


def spans(log: Log) -> list[Span]:
    """What of a log is durable, by segments: to be taken in the log's own thread, for
    `scrub` in another.
    """
    return [Span(segment.first, min(segment.end, log.durable)) for segment in log.segments()]


def scrub(reader: LogReader, spans: list[Span], start: int, size: int) -> tuple[int, list[Damage]]:
    """Read about so many bytes from a position, where a record begins, and say where to
    go on, and what is damaged.

    Blocks, for any thread. At the end of the spans that is the position that it gives.
    Raises StoreError, such as for a segment that is removed meanwhile.
    """
    found: list[Damage] = []
    position = start
    for first, end in spans:
        if position >= end:
            continue
        position = max(position, first)
        for item in reader.scan(first).walk(position, end):
            if isinstance(item, Damage):
                found.append(item)
            position = item.end
            if position - start >= size:
                return position, found
        position = end
    return position, found
