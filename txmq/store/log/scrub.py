"""Scrubbing: regular reads of the durable log that find latent damage early."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.store.log.decoder import Damage

if TYPE_CHECKING:
    from txmq.store.log.log import Log
    from txmq.store.log.reader import LogReader


class DurableSpan(NamedTuple):
    """A segment that begins at `first`, with records up to `end`."""

    first: int
    end: int


def durable_spans(log: Log) -> list[DurableSpan]:
    """Return the durable part of a log by segments.

    To be called in the log's thread, for a `scrub` in another.
    """
    return [DurableSpan(segment.first, min(segment.end, log.durable)) for segment in log.segments()]


def scrub(
    reader: LogReader, spans: list[DurableSpan], start: int, size: int
) -> tuple[int, list[Damage]]:
    """Read about `size` bytes from `start`, where a record begins; any thread.

    Returns where to continue (at the end, the end of the spans) and the damage. Blocks.
    Raises StoreError, for example for a segment that is removed meanwhile.
    """
    damages: list[Damage] = []
    position = start
    for first, end in spans:
        if position >= end:
            continue
        position = max(position, first)
        for item in reader.decoder(first).scan(position, end):
            if isinstance(item, Damage):
                damages.append(item)
            position = item.end
            if position - start >= size:
                return position, damages
        position = end
    return position, damages
