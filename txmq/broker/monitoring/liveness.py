"""The broker's own client: a PING each second, on the way that all requests take.

A broker whose log is fine may still answer nobody. The health checks ask this client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame
from txmq.wire.hello import Hello

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.broker.engine.engine import Engine
    from txmq.broker.reactor.interfaces import Clock
    from txmq.broker.reactor.protocol import ClientSession
    from txmq.broker.reactor.session_factory import SessionFactory

SILENT_S = 10.0  # without an answer: the broker is not healthy
HELLO = encode_frame(Opcode.HELLO, 0, Hello(versions=(1, 1), client="liveness").encode())
PING = encode_frame(Opcode.PING, 0)


class Liveness:
    """Pings the broker. All methods belong to the reactor's thread."""

    def __init__(self, engine: Engine, sessions: SessionFactory, clock: Clock) -> None:
        self._engine, self._sessions, self._clock = engine, sessions, clock
        self._connection: _Connection | None = None
        self._asked: float | None = None  # time of the request without an answer

    def tick(self) -> None:
        """Timer: ask again, once the last answer has come."""
        if self._asked is not None:
            return
        self._asked = self._clock.seconds()
        if self._connection is None:
            self._connection = _Connection(self, self._sessions.accept(is_own=True))
            self._connection.send(HELLO)
        else:
            self._connection.send(PING)

    def answered(self) -> None:
        """Note an answer."""
        self._asked = None

    def lost(self) -> None:
        """Note that the connection was closed; the next question opens another one."""
        self._connection = self._asked = None

    @property
    def silent_s(self) -> float:
        """Seconds that the oldest request has waited for its reply."""
        asked_s = 0.0 if self._asked is None else self._clock.seconds() - self._asked
        return max(asked_s, self._engine.oldest_reply_s())

    @property
    def is_silent(self) -> bool:
        """Return whether the broker answers nobody. A full disk is another trouble: its
        replies wait for space, and a restart would not help.
        """
        return self.silent_s > SILENT_S and not self._engine.store.read_only


class _Connection:
    """A transport within the process."""

    connected, disconnecting = 1, 0
    bufferSize = 0  # noqa: N815  # this and the names below are Twisted's

    def __init__(self, liveness: Liveness, session: ClientSession) -> None:
        self._liveness, self._session = liveness, session
        session.makeConnection(self)  # type: ignore[no-untyped-call]  # Twisted's

    def send(self, data: bytes) -> None:
        self._session.dataReceived(data)

    def write(self, _data: bytes) -> None:
        self._liveness.answered()

    def writeSequence(self, _data: Iterable[bytes]) -> None:  # noqa: N802
        self._liveness.answered()

    def loseConnection(self) -> None:
        if self.connected:
            self.connected = 0
            self._session.connectionLost()
            self._liveness.lost()

    abortConnection = loseConnection

    def getPeer(self) -> str:
        return "the broker itself"

    def setTcpNoDelay(self, enabled: bool) -> None:  # noqa: FBT001  # Twisted's
        """Do nothing, like the rest of what a socket would have to do."""

    def registerProducer(self, producer: object, streaming: bool) -> None:  # noqa: FBT001  # Twisted's
        """Do nothing."""

    def pauseProducing(self) -> None:
        """Do nothing."""

    def resumeProducing(self) -> None:
        """Do nothing."""
