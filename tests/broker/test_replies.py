"""Replies that became due together go to the kernel together, without another turn of
the reactor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport

from txmq.broker.protocol import Session, SessionFactory
from txmq.errors import BadRequest
from txmq.model import limits
from txmq.wire.frames import Frame, FrameDecoder
from txmq.wire.headers import Opcode
from txmq.wire.hello import Welcome

if TYPE_CHECKING:
    from collections.abc import Iterable


class Transport(StringTransport):
    """Keeps what is written. The kernel takes at most `room` bytes of what is sent at
    once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Twisted's
        self.written: list[bytes] = []
        self.writes: list[bytes] = []
        self.room = 1 << 20
        self.dataBuffer, self._tempDataBuffer = b"", self.written

    def setTcpNoDelay(self, enabled: bool) -> None:
        del enabled

    def writeSomeData(self, data: bytes) -> int | Exception:
        if self.room < 0:
            return ConnectionResetError()
        self.writes.append(data[: self.room])
        return len(self.writes[-1])

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def writeSequence(self, data: Iterable[bytes]) -> None:
        self.write(b"".join(data))


def never(version: int) -> Welcome:
    raise AssertionError(f"nobody says hello here, least of all version {version}")


def unasked(session: Session, frame: Frame) -> None:
    raise AssertionError(f"nobody asks {session} for {frame}")


def connected(factory: SessionFactory) -> tuple[Session, Transport]:
    session, transport = factory.accept(), Transport()
    session.makeConnection(transport)  # type: ignore[no-untyped-call]  # Twisted's
    return session, transport


def reply(session: Session, *correlations: int) -> None:
    for correlation in correlations:
        session.reply(Frame(Opcode.PING, 0, correlation, b""))


def told(data: bytes) -> list[int]:
    """The correlations of the replies."""
    return [frame.correlation for frame in FrameDecoder(limits.FRAME).feed(data)]


def test_a_session_writes_once_however_many_replies_it_has() -> None:
    factory = SessionFactory(unasked, never, Clock())
    (one, wire), (_idle, silent) = connected(factory), connected(factory)
    factory.gather()
    reply(one, 1, 2, 3)
    assert wire.writes == []
    factory.flush()
    [sent] = wire.writes
    assert wire.written == []
    assert told(sent) == [1, 2, 3]
    assert silent.writes == []
    factory.flush()
    assert len(wire.writes) == 1


def test_what_comes_at_other_times_is_written_as_it_comes() -> None:
    factory = SessionFactory(unasked, never, Clock())
    session, wire = connected(factory)
    reply(session, 1)
    session.refuse(Frame(Opcode.PING, 0, 2, b""), BadRequest("no"))
    assert told(b"".join(wire.written)) == [1, 2]


@pytest.mark.parametrize("room", [-1, 0, 5])
def test_the_reactor_gets_what_the_kernel_does_not_take(room: int) -> None:
    factory = SessionFactory(unasked, never, Clock())
    session, wire = connected(factory)
    wire.room = room
    factory.gather()
    reply(session, 1, 2)
    factory.flush()
    assert told(b"".join(wire.writes + wire.written)) == [1, 2]
    factory.gather()
    reply(session, 3)
    session.refuse(Frame(Opcode.PING, 0, 4, b""), BadRequest("no"))
    factory.flush()  # behind what the reactor has
    assert told(b"".join(wire.writes + wire.written)) == [1, 2, 3, 4]


def test_what_is_closing_or_gone_is_left_to_the_reactor() -> None:
    factory = SessionFactory(unasked, never, Clock())
    (closing, wire), (gone, dead) = connected(factory), connected(factory)
    factory.gather()
    reply(closing, 1)
    reply(gone, 1)
    wire.disconnecting = True
    dead.connected = False
    factory.flush()
    assert wire.writes == dead.writes == []
    assert wire.written
