"""Messages that wait in the database while their broker is away:
`on_unavailable="outbox"`.

They are written to `txmq_outbox` in the business transaction itself, with a token of
their own; the broker, or `txmq resolver`, publishes each transaction as one group of
that token, in the order of `seq`, and deletes the row after that. Messages of a key
come out in the order of their rows' locks, for these reasons:

- Two transactions on a key are one after the other, because the second waits for the first one's row lock, and all that
  is written here is written at the end of the block, under those locks. So the second looks at the outbox after the
  first has committed, and in a statement with a snapshot of its own: it sees the first one's row, unless that was
  published and deleted. If it sees a row it queues as well, and its `seq` is larger. (An older snapshot would hide the
  row: isolation levels above READ COMMITTED are refused.)
- Rows are fetched by `seq`. A smaller `seq` may become visible later, but then it is of a transaction that was still
  open, which no committed one had waited for: its keys are others.
- A row is deleted only when its messages are published, or have their place in the order of their keys at the broker.
  A transaction that finds the outbox empty sends its group after that, and is behind them. One that comes between
  publication and deletion queues without need, which does no harm.
- If the outbox was empty and the broker failed to answer, the group may be there, undecided. The outbox's row gets
  another token, and the first one is fenced in the same transaction (state R), so that it can only be rolled back.
  Until then it holds its keys, and what comes after it waits.

It holds among transactions that use the outbox: one that fails without its broker does
not look here, and may overtake.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from uuid import UUID

from txmq.client.blocking.transaction.broker_part import Share
from txmq.client.log import get_logger
from txmq.client.protocol.transaction.outbox_entries import entries_of
from txmq.errors import BrokerUnavailable, ConnectionLost, ReadOnly, RequestTimeout, TxmqError
from txmq.tx.outbox_entry import pack
from txmq.tx.postgres.outbox import Entering, Queue, enqueue, look
from txmq.tx.postgres.session import Connection

AWAY = (BrokerUnavailable, ConnectionLost, RequestTimeout, ReadOnly)
NOBODY = Queue(fetched=False, waiting=False)
NO_OTHER_WAY = nullcontext()
log = get_logger()


@dataclass(slots=True)
class Fallback:
    """Which shares of a transaction go to the outbox. Where it is not `allowed`, none
    does.
    """

    connection: Connection
    allowed: bool
    _queues: dict[UUID, Queue] = field(default_factory=dict)
    _entering: dict[Share, UUID | None] = field(
        default_factory=dict
    )  # with the token that was replaced

    def look(self, shares: Sequence[Share]) -> None:
        """Finds out whose broker has transactions waiting already: these have to queue
        behind them.

        Raises BrokerUnavailable where that cannot be known or cannot be done,
        LocalProtocolError, DatabaseError.
        """
        if not self.allowed:
            return
        self._queues = look(self.connection, [_log_of(share) for share in shares])
        for share in shares:
            if self._queues[share.core.log_id].waiting:
                self._enter(share, BrokerUnavailable("earlier transactions wait for the broker"))

    def sent(self, shares: list[Share]) -> list[Share]:
        """Those that are not in the outbox."""
        return (
            [share for share in shares if share not in self._entering] if self._entering else shares
        )

    def reaching(self, share: Share) -> AbstractContextManager[None]:
        """Around what the broker has to do: a share whose broker is away goes to the
        outbox instead.
        """
        return self._entering_it(share) if self.allowed else NO_OTHER_WAY

    @contextmanager
    def _entering_it(self, share: Share) -> Iterator[None]:
        try:
            yield
        except AWAY as error:
            share.give_up()
            self._enter(share, error)

    def write(self) -> None:
        """Writes what goes to the outbox. Raises MessageTooLarge, DatabaseError."""
        if not self._entering:
            return
        rows = []
        for share, replaced in self._entering.items():
            entries, messages = entries_of(share.buffer.items, share.core.topics, share.token)
            service = share.core.settings.service or ""
            rows.append(
                Entering(share.core.log_id, share.token, replaced, service, messages, pack(entries))
            )
        enqueue(self.connection, rows)

    def _enter(self, share: Share, error: TxmqError) -> None:
        if not self._queues.get(share.core.log_id, NOBODY).fetched:
            hint = "no broker of that log reports to this database: name it under [[resolver]] in its settings"
            raise BrokerUnavailable(
                f"{error.message}; the outbox will not do: nobody would fetch it", hint=hint
            )
        if share.buffer.actions:
            hint = (
                "a message is delivered again if its ack does not come: run the transaction again"
            )
            raise BrokerUnavailable(f"{error.message}; acks cannot wait in the outbox", hint=hint)
        self._entering[share] = share.token if share.sent else None
        share.queue()
        log.warning(
            "transaction.queued",
            token=str(share.token),
            log_id=str(share.core.log_id),
            reason=error.message,
        )


def _log_of(share: Share) -> UUID:
    try:
        return share.core.log_id
    except AWAY as error:
        hint = "a client that never met its broker has to be told its log: txmq.connect(url, log_id=...)"
        raise BrokerUnavailable(
            f"{error.message}; whose outbox it would be is not known", hint=hint
        ) from error
