"""The control call of the audit topic: what operators did, by who, what and when.

A reply looks through a bounded number of entries, in steps, and says where the next one
goes on.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from txmq.broker.calls.dispatcher import CallContext, Handler
from txmq.broker.engine.log_reader import PublishedBatch, published_batches, visible_end
from txmq.broker.search.audit_log import ENTRIES_PER_STEP, matching, newest_first
from txmq.broker.search.message_view import fit_entries
from txmq.model.own_topics import AUDIT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.broker.engine.engine import Engine
    from txmq.core.steps import Steps
    from txmq.wire.calls import audit as wire

MAX_SCANNED = 4_000  # entries of one reply


class AuditCalls:
    """Calls about what operators did."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.handlers: dict[str, Handler] = {"audit.list": self.list_entries}

    def list_entries(self, call: CallContext, args: wire.AuditList) -> Steps[dict[str, Any]]:
        topic = self._engine.state.topics[AUDIT]
        found: list[dict[str, Any]] = []
        scanned, following = 0, args.after
        ended = False
        while not ended and scanned < MAX_SCANNED and len(found) < args.limit:
            # anew in each step: the table changes between them
            batches = self._batches(topic.topic_id, args, following)
            some = list(islice(batches, ENTRIES_PER_STEP))
            ended = len(some) < ENTRIES_PER_STEP
            for batch in some:
                if len(found) == args.limit:
                    ended = False
                    break
                scanned += 1
                following = batch.base if args.newest else batch.base + batch.entry.count
                found += matching(self._engine, batch, args)
            yield
        shown = list(fit_entries(iter(found)))
        if len(shown) < len(found):
            last = shown[-1]["offset"]
            following, ended = (last if args.newest else last + 1), False
        end = visible_end(self._engine.state, topic.topic_id, 0, self._engine.store.durable)
        return {
            "entries": shown,
            "next": None if ended else following,
            "scanned": scanned,
            "end": end,
        }

    def _batches(
        self, topic_id: int, args: wire.AuditList, after: int | None
    ) -> Iterator[PublishedBatch]:
        state, durable = self._engine.state, self._engine.store.durable
        if not args.newest:
            return published_batches(state, topic_id, 0, after or 0, durable)
        return newest_first(state, topic_id, after, durable)
