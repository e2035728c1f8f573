"""What the parts of a blocking client share: its connections, what it knows of topics,
its pipeline.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from threading import Lock
from typing import Any
from uuid import UUID
from weakref import WeakSet

from txmq.client.blocking.connections.connection import Connection, dial
from txmq.client.blocking.connections.pool import Pool, closed
from txmq.client.blocking.sender.sender import Pipeline
from txmq.client.blocking.transaction.decision_pipeline import Teller
from txmq.client.protocol.address import parse_url
from txmq.client.protocol.conversation import Conversation, LogPin, Payload, returned
from txmq.client.protocol.incarnation import Incarnation
from txmq.client.protocol.sender.stats import Stats
from txmq.client.protocol.sender.topics import Topics
from txmq.client.protocol.settings import Settings
from txmq.errors import BrokerUnavailable, ConnectionLost, RequestTimeout
from txmq.wire.calls import encode_call
from txmq.wire.headers import Opcode


class Core:
    """One client's share of the world. For any number of threads; after a fork each
    process has its own connections.
    """

    def __init__(
        self, url: str, settings: Settings, incarnation: Incarnation | None = None
    ) -> None:
        """`incarnation` None = a new one, where the settings name an instance."""
        self._addresses = parse_url(url)
        self._pin = LogPin(settings.log_id)
        self._incarnation = incarnation or settings.incarnation()
        self._lock = Lock()
        self._pipeline: Pipeline | None = None
        self.settings = settings
        self.closed = False
        self.pool = Pool(self.dial, settings.connections)
        self.topics = Topics(self._describe, settings.partitioner, settings.packing)
        self.teller = Teller(
            self.pool,
            lambda decide: self.pipeline.submit(Opcode.DECIDE, decide),
            patience=settings.timeout,
        )
        _cores.add(self)

    @property
    def log_id(self) -> UUID:
        """The log of the broker. Raises as a call does, if that is to be found out
        first.
        """
        if self._pin.log_id is None:
            self.request(Opcode.PING)
        assert self._pin.log_id is not None, "the welcome told it"
        return self._pin.log_id

    @property
    def stats(self) -> Stats:
        """What the pipeline has done so far."""
        return Stats() if self._pipeline is None else replace(self._pipeline.stats)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of this process, made at its first use."""
        return self._pipeline or self._new_pipeline()

    def forked(self) -> None:
        """In a child process: the pipeline's thread is the parent's, and may have held
        the lock.
        """
        self._lock = Lock()
        if self._pipeline is not None:
            self._pipeline.abandon()
        self._pipeline = None

    def dial(self, deadline: float) -> Connection:
        """A connection of the caller's own. Raises BrokerUnavailable, LogChanged, or
        why the broker refuses it.
        """
        if self.closed:
            raise closed()
        return self._dial(deadline)

    def _dial(self, deadline: float) -> Connection:
        """As `dial`, for a pipeline that has things to finish."""
        return dial(
            self._addresses,
            lambda: Conversation(self.settings.service, self._pin, self._incarnation),
            deadline,
        )

    def call(
        self, name: str, args: dict[str, Any], *, timeout: float | None = None, repeat: bool = False
    ) -> dict[str, Any]:
        """What a control call returns. Raises as `request` does."""
        return returned(
            self.request(Opcode.CALL, encode_call(name, args), timeout=timeout, repeat=repeat)
        )

    def request(
        self,
        opcode: int,
        payload: Payload = b"",
        *,
        timeout: float | None = None,
        repeat: bool = False,
    ) -> bytes:
        """The payload of the reply, within `timeout` seconds; `repeat` = it does no
        harm to ask again.

        Raises BrokerUnavailable, RequestRejected, ClientClosed; ConnectionLost or
        RequestTimeout: outcome unknown.
        """
        deadline = time.monotonic() + (self.settings.timeout if timeout is None else timeout)
        left = self.settings.retries if repeat else 0
        lost: ConnectionLost | RequestTimeout | None = None
        while True:
            try:
                session = self.pool.take(deadline)
            except BrokerUnavailable as gone:
                if lost is None:
                    raise
                raise lost from gone
            try:
                share = (deadline - time.monotonic()) / (left + 1)
                return session.connection.request(opcode, payload, timeout=share)
            except (ConnectionLost, RequestTimeout) as error:
                if not left:
                    raise
                left, lost = left - 1, error
            finally:
                self.pool.give(session)

    def close(self, timeout: float) -> None:
        """Lets decisions and the pipeline finish for up to `timeout` seconds, then
        closes every connection.
        """
        deadline = time.monotonic() + timeout
        self.teller.close(timeout)
        with self._lock:
            already, self.closed = self.closed, True
        if not already and self._pipeline is not None:
            self._pipeline.close(max(0.0, deadline - time.monotonic()))
        self.pool.close()

    def _describe(self, topic: str) -> dict[str, Any]:
        return self.call("topic.describe", {"names": [topic], "create": True}, repeat=True)

    def _new_pipeline(self) -> Pipeline:
        with self._lock:
            if self.closed:
                raise closed()
            if self._pipeline is None:
                self._pipeline = self._made()
            return self._pipeline

    def _made(self) -> Pipeline:
        settings = self.settings
        return Pipeline(
            self._dial,
            self.topics,
            window=settings.window,
            window_bytes=settings.window_bytes,
            timeout=settings.timeout,
            patience=settings.delivery_timeout,
        )


_cores = WeakSet[Core]()  # of this process


def _forked() -> None:
    for core in list(_cores):
        core.forked()


if (
    sys.platform != "win32"
):  # to ask at every send which process it is would cost a system call each time
    os.register_at_fork(after_in_child=_forked)
