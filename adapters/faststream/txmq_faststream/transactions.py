"""The transaction into which the messages of a task go, and the delivery that is acked
with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, Unpack

from txmq.client.protocol.sender.rows import Fields
from txmq.model.message import ReceivedMessage


class Joinable(Protocol):
    """A transaction, of any face."""

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> object: ...

    def ack(self, delivered: object) -> object: ...


@dataclass(slots=True)
class Scope:
    """A transaction, and the delivered message, or batch of them, that it is to ack."""

    transaction: Joinable
    delivery: ReceivedMessage | Sequence[ReceivedMessage] | None = None
    acked: bool = False

    def require_acked(self) -> None:
        """Raise NotAckedError unless the delivery is acked."""
        if not self.acked:
            raise NotAckedError


class NotAckedError(Exception):
    """Ends a transaction whose message is nacked, rejected or left in hand."""


_scope: ContextVar[Scope | None] = ContextVar("txmq_faststream_scope", default=None)


def current() -> Scope | None:
    """Return the scope of this context."""
    return _scope.get()


@contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """Have messages of the block go into the transaction."""
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)
