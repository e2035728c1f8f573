"""Replies that became due together go to the kernel together, without another turn of the reactor."""

from __future__ import annotations

from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport

from txmq import limits
from txmq.broker.protocol import Session, SessionFactory
from txmq.wire.frames import Frame, FrameDecoder
from txmq.wire.headers import Opcode
from txmq.wire.hello import Welcome


class Transport(StringTransport):
    """Keeps what is written until it is told to send it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Twisted's
        self.written: list[bytes] = []
        self.writes: list[bytes] = []

    def setTcpNoDelay(self, enabled: bool) -> None:  # noqa: FBT001 (Twisted's)
        del enabled

    def doWrite(self) -> None:  # noqa: N802 (Twisted's)
        self.writes.append(b"".join(self.written))
        self.written.clear()

    def write(self, data: bytes) -> None:
        self.written.append(data)


def never(version: int) -> Welcome:
    raise AssertionError(f"nobody says hello here, least of all version {version}")


def unasked(session: Session, frame: Frame) -> None:
    raise AssertionError(f"nobody asks {session} for {frame}")


def connected(factory: SessionFactory) -> tuple[Session, Transport]:
    session, transport = factory.buildProtocol(None), Transport()
    session.makeConnection(transport)  # type: ignore[no-untyped-call]  # Twisted's
    return session, transport


def reply(session: Session, *correlations: int) -> None:
    for correlation in correlations:
        session.reply(Frame(Opcode.PING, 0, correlation, b""))


def test_a_session_writes_once_however_many_replies_it_has() -> None:
    factory = SessionFactory(unasked, never, Clock())
    (one, wire), (_idle, silent) = connected(factory), connected(factory)
    reply(one, 1, 2, 3)
    assert wire.writes == []
    factory.flush()
    [sent] = wire.writes
    assert [frame.correlation for frame in FrameDecoder(limits.FRAME).feed(sent)] == [1, 2, 3]
    assert silent.writes == []
    factory.flush()
    assert len(wire.writes) == 1


def test_what_is_closing_or_gone_is_left_to_the_reactor() -> None:
    factory = SessionFactory(unasked, never, Clock())
    (closing, wire), (gone, dead) = connected(factory), connected(factory)
    reply(closing, 1)
    reply(gone, 1)
    wire.disconnecting = True
    dead.connected = False
    factory.flush()
    assert wire.writes == dead.writes == []
    assert wire.written
