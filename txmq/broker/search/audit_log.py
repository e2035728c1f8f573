"""Entries of the audit topic, read back from the log."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Any

from txmq.broker.engine.log_reader import PublishedBatch, visible_end
from txmq.broker.search.message_view import read_view
from txmq.errors import CorruptRecord
from txmq.model.own_topics import AUDIT
from txmq.store.tables import ENTRY_KEY, BatchEntry
from txmq.wire.calls.audit import AuditList

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.broker.engine.engine import Engine
    from txmq.core.state.state import State
    from txmq.core.steps import Steps

FIELDS = {"at", "operator", "call", "about", "reason", "arguments", "result"}
LOOKED_THROUGH = 1_000  # of the newest entries, for those about one thing
SHOWN = 20  # of them
ENTRIES_PER_STEP = 32


def about(engine: Engine, wanted: AuditList) -> Steps[list[dict[str, Any]]]:
    """Return the newest entries about one thing, oldest first, as far as they are among
    the newest of all.
    """
    topic, found = engine.state.topics[AUDIT], list[dict[str, Any]]()
    before: int | None = None
    for _number in range(0, LOOKED_THROUGH, ENTRIES_PER_STEP):
        # anew in each step: the table changes between them
        batches = newest_first(engine.state, topic.topic_id, before, engine.store.durable)
        some = list(islice(batches, ENTRIES_PER_STEP))
        for batch in some:
            found += (one for one in matching(engine, batch, wanted) if "damaged" not in one)
            if len(found) >= SHOWN:
                return found[::-1]
        if len(some) < ENTRIES_PER_STEP:
            break
        before = some[-1].base
        yield
    return found[::-1]


def with_operations(
    engine: Engine, fields: dict[str, Any], *wanted: AuditList
) -> Steps[dict[str, Any]]:
    """Return the view of a thing, with what operators did to it, and to what has it."""
    found: dict[int, dict[str, Any]] = {}
    for one in wanted:
        entries = yield from about(engine, one)
        found |= {entry["offset"]: entry for entry in entries}
    operations = [found[offset] for offset in sorted(found)]
    return fields | {"operations": operations[-SHOWN:]}


def matching(engine: Engine, batch: PublishedBatch, wanted: AuditList) -> Iterator[dict[str, Any]]:
    """Yield the entries of a batch that are asked for. One that cannot be read is
    yielded as damaged.
    """
    if not wanted.has_time(batch.entry.stored_at):
        return
    try:
        view = read_view(engine.store, batch.entry.position, batch.entry.length)
    except CorruptRecord as error:
        yield {"offset": batch.base, "at": batch.entry.stored_at, "damaged": error.message}
        return
    for row, body in enumerate(view.bodies):
        entry = parse_entry(body)
        if entry is not None and wanted.matches(entry):
            yield {"offset": batch.base + row, **entry}


def parse_entry(body: bytes) -> dict[str, Any] | None:
    """Return the entry of a message; None = it is none of the broker's."""
    try:
        entry = json.loads(body)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and entry.keys() >= FIELDS else None


def newest_first(
    state: State, topic_id: int, before: int | None, durable: int
) -> Iterator[PublishedBatch]:
    """Yield the visible batches below an offset, the newest first, within one turn of
    the reactor.
    """
    end = visible_end(state, topic_id, 0, durable)
    stop = ENTRY_KEY.pack(topic_id, 0, end if before is None else min(before, end))
    for key, row in state.entries.range(ENTRY_KEY.pack(topic_id, 0, 0), stop, reverse=True):
        entry = BatchEntry._make(row)
        if entry.length:  # not lost
            yield PublishedBatch(ENTRY_KEY.unpack(key)[2], entry)
