"""Publication of a database's outbox: each row becomes a bundle under the row's token,
committed as it is stored.

If the process dies before it deletes a row, the row comes again. Its token is known by
then, and the repetition changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import structlog

from txmq.broker.requests.bundles import store_command
from txmq.core.topics.topics import CreateTopic, find_topic
from txmq.core.transactions.model import get
from txmq.errors import RequestRejected, TxmqError
from txmq.tx.outbox_entry import TopicPartitions, outbox_part, unpack_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock
    from txmq.config.broker import BrokerSettings
    from txmq.tx.postgres.outbox import OutboxRow, PublishedRow, SetAside

ROWS_PER_STEP = 16  # in one turn of the reactor, for which other requests wait
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Publication:
    """The work on the rows of one fetch: see `PublishRows`."""

    by: str
    aside: SetAside
    over: Callable[[list[PublishedRow], str], None]
    done: list[PublishedRow] = field(default_factory=list)


class OutboxPublisher:
    """Publishes rows in steps (see `PublishRows`). Belongs to the reactor's thread."""

    def __init__(self, engine: Engine, settings: BrokerSettings, clock: Clock) -> None:
        self._engine, self._settings, self._clock = engine, settings, clock

    def __call__(
        self,
        rows: Sequence[OutboxRow],
        by: str,
        aside: SetAside,
        over: Callable[[list[PublishedRow], str], None],
    ) -> None:
        self._step(iter(rows), _Publication(by, aside, over))

    def _step(self, rows: Iterator[OutboxRow], work: _Publication) -> None:
        step = list(islice(rows, ROWS_PER_STEP))
        trouble = ""
        for row in step:
            if not work.aside.holds(row) and (trouble := self._try_publish(row, work)):
                break
        if trouble or not step:
            self._engine.answer_when_durable(lambda _: work.over(work.done, trouble), None)
        else:
            self._clock.callLater(0, self._step, rows, work)

    def _try_publish(self, row: OutboxRow, work: _Publication) -> str:
        """Publish a row or set it aside. Return an error that stops the others, too."""
        try:
            self._publish(row)
        except TxmqError as error:
            refusal = error
        else:
            work.done.append(row.published)
            return ""
        why = str(refusal)
        log.error("outbox.stuck", by=work.by, seq=row.seq, token=row.token.hex, reason=why)
        if refusal.retriable:
            return f"row {row.seq}: {why}"
        work.aside.add(row, why)
        return ""

    def _publish(self, row: OutboxRow) -> None:
        if get(self._engine.state, row.token.bytes) is not None:
            return
        part = outbox_part(
            row.token, row.service, unpack_entries(row.content, row.token), self._shape
        )
        command = store_command(part)
        replies: list[object] = []
        self._engine.submit(command, replies.append)
        if get(self._engine.state, row.token.bytes) is not None:
            return
        # A refusal may wait for the disk. Nothing has changed, so it is the same now.
        refusal = replies[0] if replies else self._engine.decide(command, self._engine.now())
        assert isinstance(refusal, RequestRejected), "what is accepted applies at once"
        why = f"transaction {row.token.hex}: {refusal.message}"
        raise type(refusal)(why, hint="see: txmq outbox list")

    def _shape(self, name: str) -> TopicPartitions:
        if name not in self._engine.state.topics and self._settings.create_topics:
            self._engine.submit(CreateTopic(name, self._settings.partitions), _log_refusal)
            log.warning("topic.created_at_use", topics=[name])
        topic = find_topic(self._engine.state, name)
        return TopicPartitions(len(topic.end_offsets), topic.epoch)


def _log_refusal(reply: object) -> None:
    if isinstance(reply, RequestRejected):
        log.error("outbox.refused", reason=reply.message, hint=reply.hint)
