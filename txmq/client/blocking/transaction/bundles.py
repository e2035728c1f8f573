"""Storing a group: its parts go out on one connection, and their answers are read when
the caller is ready for them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from uuid import UUID

from txmq.batch import read_header
from txmq.client.blocking.connections.pool import Session
from txmq.client.blocking.core import Core
from txmq.client.protocol.sender.rows import PART_ROWS
from txmq.errors import BrokerUnavailable, ConnectionLost, RequestTimeout
from txmq.wire.group import (
    NO_DIGEST,
    Description,
    GroupReceipt,
    Part,
    PartBatch,
    group_digest,
    pack_part,
    unpack_group_receipt,
)
from txmq.wire.headers import Opcode

EPOCH = 0  # a token is never used again, so no older incarnation of it can be about
PART_BYTES = 8 << 20  # of batches; one batch alone may be larger and still fit in a frame


def parts_of(
    token: UUID, description: Description, batches: Sequence[PartBatch], most: int = PART_BYTES
) -> list[Part]:
    """A whole group: as many parts as `chunks_of` makes, the last of them sealed."""
    parts: list[Part] = []
    for chunk in chunks_of(batches, most):
        described = None if parts else description
        parts.append(
            Part(token.bytes, len(parts), EPOCH, False, False, NO_DIGEST, described, chunk)
        )
    return [*parts[:-1], parts[-1]._replace(sealed=True, digest=group_digest(parts))]


def chunks_of(
    batches: Sequence[PartBatch], most: int, rows_each: int = PART_ROWS
) -> list[tuple[PartBatch, ...]]:
    """The batches in parts of at most that many bytes and rows; there is at least one
    part.
    """
    if len(batches) < 2:
        return [tuple(batches)]
    chunks: list[list[PartBatch]] = [[]]
    size = rows = 0
    for batch in batches:
        more = read_header(batch.batch).count
        if chunks[-1] and (size + len(batch.batch) > most or rows + more > rows_each):
            chunks.append([])
            size = rows = 0
        chunks[-1].append(batch)
        size += len(batch.batch)
        rows += more
    return [tuple(chunk) for chunk in chunks]


class Storing:
    """A group on its way to the broker. It does no harm to store it again: the same
    token gets the same answer.
    """

    def __init__(self, core: Core, parts: Sequence[Part], deadline: float) -> None:
        self.parts = len(parts)
        self._core = core
        self._parts = parts
        self.deadline = deadline
        self._left = core.settings.retries
        self._session: Session | None = None
        self._correlations: list[int] = []

    def send(self) -> None:
        """Sends all parts. Raises BrokerUnavailable; a connection lost on the way is
        `receipt`'s to cure.
        """
        self._session = self._core.pool.take(self.deadline)
        with suppress(ConnectionLost, RequestTimeout):
            self._write()

    def receipt(self) -> GroupReceipt:
        """Waits until the group is durable. Raises or ConnectionLost and
        RequestTimeout.
        """
        try:
            while True:
                try:
                    return self._read()
                except (ConnectionLost, RequestTimeout) as lost:
                    self._again(lost)
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Lets go of the connection; one with answers to come is of no use to
        others.
        """
        session, self._session = self._session, None
        if session is not None:
            if self._correlations:
                session.connection.close()
            self._core.pool.give(session)

    def _write(self) -> None:
        assert self._session is not None, "sent first, then read"
        self._correlations = []
        for part in self._parts:
            ends = self._attempt_ends()
            self._correlations.append(
                self._session.connection.write(Opcode.GROUP, pack_part(part), ends)
            )

    def _read(self) -> GroupReceipt:
        assert self._session is not None, "sent first, then read"
        receipt = None
        if len(self._correlations) < len(self._parts):
            raise ConnectionLost("the connection was lost while the group was being sent")
        while self._correlations:
            payload = self._session.connection.read(self._correlations.pop(0), self._attempt_ends())
            receipt = unpack_group_receipt(payload)
        assert receipt is not None, "a group has a part"
        return receipt

    def _again(self, lost: ConnectionLost | RequestTimeout) -> None:
        assert self._session is not None, "sent first, then read"
        if not self._left or time.monotonic() >= self.deadline:
            raise lost
        self._left -= 1
        try:
            self._session.connection = self._core.dial(self.deadline)
        except BrokerUnavailable as gone:
            raise lost from gone
        with suppress(ConnectionLost, RequestTimeout):
            self._write()

    def _attempt_ends(self) -> float:
        now = time.monotonic()
        return now + (self.deadline - now) / (self._left + 1)
