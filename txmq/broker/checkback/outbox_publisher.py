"""Rows of a database's outbox, published: each becomes a group with the row's token,
decided as it is stored.

A row that was published before, because the process died before the row was deleted,
changes nothing: its token is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import structlog

from txmq.broker.bundle_requests import store_part
from txmq.core.state.state import Rejected
from txmq.core.topics.topics import CreateTopic, find
from txmq.core.transactions.model import get
from txmq.errors import RequestRejected, TxmqError
from txmq.tx.outbox_entry import Shape, group_of, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from txmq.broker.engine import Engine
    from txmq.broker.reactor.protocols import Clock
    from txmq.config.broker import Broker
    from txmq.tx.postgres.outbox import Queued

SLICE = 16  # rows in one turn of the reactor, which others wait for
log = structlog.get_logger()


class Publishes(Protocol):
    """Whoever publishes rows: in their order, up to the first that cannot be. `over`
    gets how many, once durable, and why the next one could not be.
    """

    def __call__(
        self, rows: Sequence[Queued], by: str, over: Callable[[int, str], None]
    ) -> None: ...


class Publisher:
    """See `Publishes`. Belongs to the reactor's thread."""

    def __init__(self, engine: Engine, settings: Broker, clock: Clock) -> None:
        self._engine, self._settings, self._clock = engine, settings, clock

    def __call__(self, rows: Sequence[Queued], by: str, over: Callable[[int, str], None]) -> None:
        self._go_on(rows, 0, by, over)

    def _go_on(
        self, rows: Sequence[Queued], done: int, by: str, over: Callable[[int, str], None]
    ) -> None:
        trouble = ""
        for row in rows[done : done + SLICE]:
            if trouble := self._trouble(row):
                log.error("outbox.stuck", by=by, seq=row.seq, token=row.token.hex, reason=trouble)
                break
            done += 1
        else:
            if done < len(rows):
                self._clock.callLater(0, self._go_on, rows, done, by, over)
                return
        self._engine.tell(lambda _: over(done, trouble), None)

    def _trouble(self, row: Queued) -> str:
        """Publishes a row; why that could not be, empty if it could. Those after it
        have to wait: they may have its keys.
        """
        try:
            self._publish(row)
        except TxmqError as error:
            return str(error)
        return ""

    def _publish(self, row: Queued) -> None:
        if get(self._engine.state, row.token.bytes) is not None:
            return
        part = store_part(group_of(row.token, row.service, unpack(row.content), self._shape))
        refused: list[Rejected] = []
        self._engine.submit(
            part, lambda reply: refused.append(reply) if isinstance(reply, Rejected) else None
        )
        if (
            get(self._engine.state, row.token.bytes) is None
        ):  # what is accepted takes effect at once
            why = refused[0].message if refused else "the group was refused"
            raise RequestRejected(
                f"transaction {row.token.hex}: {why}", hint="see: txmq outbox list"
            )

    def _shape(self, name: str) -> Shape:
        if name not in self._engine.state.topics and self._settings.create_topics:
            self._engine.submit(CreateTopic(name, self._settings.partitions), _tell_refusal)
        topic = find(self._engine.state, name)
        if isinstance(topic, Rejected):
            raise topic.error(topic.message, hint=topic.hint)
        return Shape(len(topic.ends), topic.epoch)


def _tell_refusal(reply: object) -> None:
    if isinstance(reply, Rejected):
        log.error("outbox.refused", reason=reply.message, hint=reply.hint)
