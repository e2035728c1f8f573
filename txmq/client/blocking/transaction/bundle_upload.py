"""The upload of a bundle: one connection for all parts, whose answers come later."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from txmq.client.blocking.connections.pool import ProducerSession
from txmq.client.blocking.core import BlockingCore
from txmq.errors import ConnectionLost, RequestRejected, RequestTimeout
from txmq.model.bundle import BundleReceipt
from txmq.wire.bundle import BundlePart, pack_part, unpack_bundle_receipt
from txmq.wire.data_requests import Opcode


class BundleUpload:
    """One bundle on its way to the broker.

    Sending it again is harmless: the broker gives the same answer for the same token.
    `stored_parts` counts the parts that the broker had when it refused one. None: parts
    that were sent before may still arrive, so that none may be changed.
    """

    def __init__(
        self,
        core: BlockingCore,
        parts: Sequence[BundlePart],
        deadline: float,
        stored_parts: int = 0,
    ) -> None:
        """`stored_parts`: so many parts are at the broker already."""
        self.part_count = len(parts)
        self.stored_parts: int | None = stored_parts
        self._first = stored_parts
        self._core = core
        self.parts = parts
        self.deadline = deadline
        self._retries_left = core.settings.retries
        self._session: ProducerSession | None = None
        self._correlations: list[int] = []

    def send(self) -> None:
        """Send all parts. Raises BrokerUnavailable.

        If the connection is lost meanwhile, `await_receipt` sends them again.
        """
        self._session = self._core.pool.acquire(self.deadline)
        with suppress(ConnectionLost, RequestTimeout):
            self._write()

    def await_receipt(self) -> BundleReceipt:
        """Wait until the broker has made the bundle durable.

        Raises the broker's refusal, ConnectionLost or RequestTimeout.
        """
        try:
            while True:
                try:
                    return self._read()
                except (ConnectionLost, RequestTimeout) as lost:
                    self._retry(lost)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Release the connection, closed if answers are still to come on it."""
        session, self._session = self._session, None
        if session is not None:
            if self._correlations:
                session.connection.close()
            self._core.pool.release(session)

    def _write(self) -> None:
        assert self._session is not None, "send() comes first"
        self._correlations = []
        for part in self.parts[self._first :]:
            ends = self._attempt_deadline()
            self._correlations.append(
                self._session.connection.write(Opcode.GROUP, pack_part(part), ends)
            )

    def _read(self) -> BundleReceipt:
        assert self._session is not None, "send() comes first"
        receipt = None
        if len(self._correlations) < len(self.parts) - self._first:
            raise ConnectionLost("The connection was lost while the bundle was being sent")
        while self._correlations:
            try:
                payload = self._session.connection.read(
                    self._correlations.pop(0), self._attempt_deadline()
                )
            except RequestRejected:
                self._read_refusals()
                raise
            receipt = unpack_bundle_receipt(payload)
            if self.stored_parts is not None:
                self.stored_parts += 1
        assert receipt is not None, "a bundle has at least one part"
        return receipt

    def _read_refusals(self) -> None:
        """Read the answers to the parts behind a refused one: no part may arrive when
        others are on their way in its place.
        """
        assert self._session is not None, "send() comes first"
        try:
            while self._correlations:
                with suppress(RequestRejected):
                    self._session.connection.read(
                        self._correlations.pop(0), self._attempt_deadline()
                    )
        except (ConnectionLost, RequestTimeout):
            self.stored_parts = None

    def _retry(self, lost: ConnectionLost | RequestTimeout) -> None:
        assert self._session is not None, "send() comes first"
        if not self._retries_left or time.monotonic() >= self.deadline:
            raise lost
        self._retries_left -= 1
        self._first = 0
        if self.part_count > 1:
            self.stored_parts = None
        self._core.pool.reconnect(self._session, self.deadline, lost)
        with suppress(ConnectionLost, RequestTimeout):
            self._write()

    def _attempt_deadline(self) -> float:
        now = time.monotonic()
        return now + (self.deadline - now) / (self._retries_left + 1)
