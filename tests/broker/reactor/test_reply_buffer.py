"""Replies that are due together go to the kernel together, in the same turn of the
reactor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport

from tests.broker.support import QuickDisk
from txmq.broker.reactor.held_sends import HeldSends
from txmq.broker.reactor.protocol import ClientSession
from txmq.broker.reactor.session_factory import SessionFactory
from txmq.errors import BadRequest
from txmq.model import limits
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame, FrameDecoder
from txmq.wire.hello import Hello, Welcome

if TYPE_CHECKING:
    from collections.abc import Iterable


class Transport(StringTransport):
    """A transport that keeps what is written. The kernel takes at most `room` bytes at
    once.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Twisted's
        self.written: list[bytes] = []
        self.writes: list[bytes] = []
        self.room = 1 << 20
        self.dataBuffer, self._tempDataBuffer = b"", self.written

    def setTcpNoDelay(self, enabled: bool) -> None:  # noqa: FBT001
        del enabled

    def writeSomeData(self, data: bytes) -> int | Exception:  # noqa: N802  # Twisted's
        if self.room < 0:
            return ConnectionResetError()
        self.writes.append(data[: self.room])
        return len(self.writes[-1])

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def writeSequence(self, data: Iterable[bytes]) -> None:  # noqa: N802  # Twisted's
        self.write(b"".join(data))


def never(hello: Hello) -> Welcome:
    raise AssertionError(f"nobody says hello here, least of all {hello.client}")


def unasked(session: ClientSession, frame: Frame) -> None:
    raise AssertionError(f"nobody asks {session} for {frame}")


def connected(factory: SessionFactory) -> tuple[ClientSession, Transport]:
    session, transport = factory.accept(), Transport()
    session.makeConnection(transport)  # type: ignore[no-untyped-call]  # Twisted's
    return session, transport


def reply(session: ClientSession, *correlations: int) -> None:
    for correlation in correlations:
        session.reply(Frame(Opcode.PING, 0, correlation, b""))


def told(data: bytes) -> list[int]:
    """Return the correlations of the replies."""
    return [frame.correlation for frame in FrameDecoder(limits.FRAME).feed(data)]


def test_a_session_writes_once_however_many_replies_it_has() -> None:
    factory = SessionFactory(unasked, never, Clock(), HeldSends(QuickDisk(), Clock()))
    (one, wire), (_idle, silent) = connected(factory), connected(factory)
    factory.buffer_replies()
    reply(one, 1, 2, 3)
    assert wire.writes == []
    factory.flush_replies()
    [sent] = wire.writes
    assert wire.written == []
    assert told(sent) == [1, 2, 3]
    assert silent.writes == []
    factory.flush_replies()
    assert len(wire.writes) == 1


def test_records_of_different_turns_are_written_separately() -> None:
    factory = SessionFactory(unasked, never, Clock(), HeldSends(QuickDisk(), Clock()))
    session, wire = connected(factory)
    reply(session, 1)
    session.refuse(Frame(Opcode.PING, 0, 2, b""), BadRequest("no"))
    assert told(b"".join(wire.written)) == [1, 2]


@pytest.mark.parametrize("room", [-1, 0, 5])
def test_the_reactor_gets_what_the_kernel_does_not_take(room: int) -> None:
    factory = SessionFactory(unasked, never, Clock(), HeldSends(QuickDisk(), Clock()))
    session, wire = connected(factory)
    wire.room = room
    factory.buffer_replies()
    reply(session, 1, 2)
    factory.flush_replies()
    assert told(b"".join(wire.writes + wire.written)) == [1, 2]
    factory.buffer_replies()
    reply(session, 3)
    session.refuse(Frame(Opcode.PING, 0, 4, b""), BadRequest("no"))
    factory.flush_replies()  # behind what the reactor has
    assert told(b"".join(wire.writes + wire.written)) == [1, 2, 3, 4]


def test_a_closing_or_lost_connection_is_left_to_the_reactor() -> None:
    factory = SessionFactory(unasked, never, Clock(), HeldSends(QuickDisk(), Clock()))
    (closing, wire), (gone, dead) = connected(factory), connected(factory)
    factory.buffer_replies()
    reply(closing, 1)
    reply(gone, 1)
    wire.disconnecting = True
    dead.connected = False
    factory.flush_replies()
    assert wire.writes == dead.writes == []
    assert wire.written
