"""The state that all parts of a blocking client share: connections, topics, sender."""

from __future__ import annotations

import atexit
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Protocol
from uuid import UUID
from weakref import WeakSet

from txmq.client.blocking.after_fork import tell_after_fork
from txmq.client.blocking.connections.connection import Connection, open_connection
from txmq.client.blocking.connections.pool import ConnectionPool
from txmq.client.blocking.decision_pipeline import DecisionPipeline
from txmq.client.blocking.sender.sender import Sender
from txmq.client.protocol.address import Addresses, parse_url
from txmq.client.protocol.conversation import (
    Conversation,
    LogIdentity,
    MeetsLog,
    Payload,
    client_closed,
    pause_before_repeat,
)
from txmq.client.protocol.identity import ProducerInstance
from txmq.client.protocol.sender.accumulator import SideRequest
from txmq.client.protocol.sender.multi_send import SenderStats, warn_of_unsent
from txmq.client.protocol.sender.topics import TopicCache
from txmq.client.protocol.settings import EXIT_S, ClientSettings
from txmq.client.protocol.transaction.outbox_stamp import KnownStamp
from txmq.errors import ConnectionLost, RequestTimeout, Throttled
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.json import parse_result


class HasCore(Protocol):
    """A blocking client."""

    _core: BlockingCore


def core_of(client: HasCore) -> BlockingCore:
    """Return the core of a client, for parts of txmq outside the client."""
    return client._core  # noqa: SLF001  # the one place that passes it on


class BlockingCore(MeetsLog):
    """The shared state of one client. For any number of threads.

    After a fork each process has its own connections and its own sender.
    """

    def __init__(
        self,
        url: str | Addresses,
        settings: ClientSettings,
        instance: ProducerInstance | None = None,
        log: LogIdentity | None = None,
    ) -> None:
        """Without an `instance`, create one if the settings name it.

        `log` is that of another core with the same broker.
        """
        self._addresses = parse_url(url)
        self._log = log or LogIdentity(settings.log_id)
        self._instance = instance or settings.producer_instance()
        self._lock = Lock()
        self._sender: Sender | None = None
        self.settings = settings
        self.closed = False
        # Of the databases, by system identifier and oid: see awaited/outbox.py.
        self.outbox_stamps = defaultdict[tuple[int, int], KnownStamp](KnownStamp)
        self.pool = ConnectionPool(self.open_connection, settings.connections)
        self.topics = self._new_topics()
        self.decision_pipeline = DecisionPipeline(
            self.pool,
            lambda decide: self.sender.request(SideRequest(Opcode.DECIDE, decide)),
            patience=settings.timeout,
        )
        # Answers the broker's questions about half messages from now on. A core without
        # a client is asked nothing.
        self.answer_checks: Callable[[], None] = lambda: None
        _cores.add(self)
        tell_after_fork(self)

    def seconds(self) -> float:
        """Return the time of the clock of deadlines."""
        return time.monotonic()

    def require_reachable(self, timeout: float | None = None) -> None:
        """Ask for the id of the broker's log, unless it is known. Raises as a call."""
        if self._log.log_id is None:
            self.request(Opcode.PING, timeout=timeout)

    @property
    def log_id(self) -> UUID:
        """The id of the broker's log. Raises as a call, unless it is known already."""
        self.require_reachable()
        assert self._log.log_id is not None, "the welcome has it"
        return self._log.log_id

    @property
    def stats(self) -> SenderStats:
        """The counters of the sender."""
        return SenderStats() if self._sender is None else replace(self._sender.stats)

    @property
    def sender(self) -> Sender:
        """The sender of this process, created at its first use."""
        return self._sender or self._create_sender()

    def after_fork(self) -> None:
        """Start anew in a child process.

        The sender's thread stays with the parent, and may have held the lock.
        """
        self._lock = Lock()
        if self._sender is not None:
            self._sender.discard_after_fork()
        self._sender = None

    def open_connection(self, deadline: float) -> Connection:
        """Return a new connection for the caller's own use.

        Raises BrokerUnavailable, LogChanged, or the error of a refused hello.
        """
        if self.closed:
            raise client_closed()
        return self._connect(deadline)

    def _connect(self, deadline: float) -> Connection:
        """Return a new connection, even for the sender of a closed client."""
        return open_connection(
            self._addresses,
            self._log,
            partial(Conversation, self.settings.service, self._log, self._instance),
            deadline,
        )

    def ask_any_node(self, name: str, args: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Return the result of a control call that each node of a cluster answers."""
        if self.closed:
            raise client_closed()
        conversation = partial(Conversation, None, self._log, any_node=True)
        with closing(
            open_connection(self._addresses, self._log, conversation, deadline)
        ) as connection:
            return connection.call(name, args, timeout=deadline - time.monotonic())

    def call(
        self, name: str, args: dict[str, Any], *, timeout: float | None = None, repeat: bool = False
    ) -> dict[str, Any]:
        """Return the result of a control call. Raises as `request`."""
        return parse_result(
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
        """Return the payload of the reply, within `timeout` seconds. A request that was
        refused with a pause is sent again after it.

        `repeat`: send the request again after a lost connection; this must do no harm.
        Raises BrokerUnavailable, RequestRejected, ClientClosed, and ConnectionLost or
        RequestTimeout with an unknown outcome.
        """
        deadline = time.monotonic() + (self.settings.timeout if timeout is None else timeout)
        while True:
            try:
                return self._request(opcode, payload, deadline, repeat=repeat)
            except Throttled as refused:
                time.sleep(pause_before_repeat(refused, deadline - time.monotonic()))

    def _request(self, opcode: int, payload: Payload, deadline: float, *, repeat: bool) -> bytes:
        left = self.settings.retries if repeat else 0
        session = self.pool.acquire(deadline)
        try:
            while True:
                share = (deadline - time.monotonic()) / (left + 1)
                try:
                    return session.connection.request(opcode, payload, timeout=share)
                except (ConnectionLost, RequestTimeout) as lost:
                    if not left:
                        raise
                    left -= 1
                    self.pool.reconnect(session, deadline, lost)
        finally:
            self.pool.release(session)

    def close(self, timeout: float) -> None:
        """Let decisions and sends finish for up to `timeout` seconds, then close all
        connections.
        """
        deadline = time.monotonic() + timeout
        self.decision_pipeline.close(timeout)
        with self._lock:
            was_closed, self.closed = self.closed, True
        if not was_closed and self._sender is not None:
            self._sender.close(max(0.0, deadline - time.monotonic()))
        self.pool.close()

    def finish_at_exit(self, deadline: float) -> None:
        """Send what waits until that moment, because the process ends without `close`.
        Warn of messages without a receipt.
        """
        sender = self._sender
        if self.closed or sender is None or sender.idle:
            return
        sender.close(max(0.0, deadline - time.monotonic()))
        warn_of_unsent(sender.failed_at_end)

    def _describe(self, topic: str, within: float | None) -> dict[str, Any]:
        wanted = {"names": [topic], "create": True}
        return self.call("topic.describe", wanted, timeout=within, repeat=True)

    def _create_sender(self) -> Sender:
        with self._lock:
            if self.closed:
                raise client_closed()
            if self._sender is None:
                _finish_in_child()
                self._sender = self._new_sender()
            return self._sender

    def _new_topics(self) -> TopicCache:
        settings = self.settings
        return TopicCache(
            self._describe, settings.partitioner, settings.body_compression, settings.telemetry
        )

    def _new_sender(self) -> Sender:
        settings = self.settings
        return Sender(
            self._connect,
            self.topics,
            window=settings.window,
            window_bytes=settings.window_bytes,
            attempt=settings.attempt_s,
            timeout=settings.timeout,
            delivery_timeout=settings.delivery_timeout,
        )


_cores = WeakSet[BlockingCore]()  # of this process


def _finish_at_exit() -> None:
    deadline = time.monotonic() + EXIT_S
    for core in list(_cores):
        core.finish_at_exit(deadline)


def _finish_in_child() -> None:
    """Have a child process of multiprocessing, which ends without atexit, finish its
    sends.
    """
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None:
        from multiprocessing.util import Finalize  # noqa: PLC0415  # loaded already

        Finalize(None, _finish_at_exit, exitpriority=0)


atexit.register(_finish_at_exit)
