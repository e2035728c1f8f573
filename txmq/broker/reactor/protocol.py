"""The broker's side of a connection: bytes to requests, replies to bytes. `requests`
and `calls` carry the requests out.
"""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import structlog
from twisted.internet.interfaces import IPushProducer
from twisted.internet.protocol import Protocol, connectionDone
from zope.interface import implementer

from txmq.broker.reactor.connection_limits import network_of, peer_name
from txmq.broker.reactor.handshake import Handshake
from txmq.broker.reactor.held_sends import JUDGED, WRITES
from txmq.errors import NotLeader, ProtocolError, RequestRejected, TxmqError
from txmq.model import limits
from txmq.model.access import Need
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import Frame, FrameDecoder, encode_frame, frame_buffers
from txmq.wire.hello import Challenge
from txmq.wire.lost_peers import notice_lost_peer
from txmq.wire.status import error_reply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twisted.python.failure import Failure

    from txmq.broker.reactor.bounded_log import BoundedLog
    from txmq.broker.reactor.connection_limits import ConnectionLimits
    from txmq.broker.reactor.frame_memory import FrameMemory
    from txmq.broker.reactor.held_sends import HeldSends
    from txmq.broker.reactor.interfaces import Clock, LoginGuard, Timer, Transport, UserRights
    from txmq.wire.hello import Hello, Welcome

    Handle = Callable[["ClientSession", Frame], None]
    Encode = Callable[[Any], Sequence[bytes] | bytes]

HELLO_SECONDS = 10  # for a connection to send its hello
# a connection that does not read its replies for so long is cut
STUCK_SECONDS = 30
# Twisted's 64 KiB are not enough for 64 messages of 1 KiB; malloc maps 128 KiB each
# time
RECEIVE_BYTES = 120 << 10
TURN_S = 0.002  # of a turn of the reactor, for the requests of one connection
UNSENT_BYTES = 1 << 20  # of replies that a flush will send; no request is begun beyond
MAX_OUTSTANDING = 4_096  # requests of a connection without a reply, long polls included
REQUEST_BYTES = 64 << 20  # of all requests without a reply, unless a connection has none
URGENT_BYTES = 16 << 10  # of decisions, acks and calls that begin nevertheless
log = structlog.get_logger()


@dataclass(slots=True)
class SharedState:
    """State that all sessions share.

    While `buffering`, sessions keep their replies. The flush that ends it sends each
    session's `unsent` replies at once. `request_bytes` are those of requests without a
    reply; `stalled` sessions wait until there are fewer, or for the `lease`: whether a
    node of a cluster may answer from its state. None = it is alone.
    """

    frames: FrameMemory
    sends: HeldSends
    connections: ConnectionLimits
    warnings: BoundedLog
    buffering: bool = False
    unsent: dict[ClientSession, None] = field(default_factory=dict)
    request_bytes: int = 0
    guard: LoginGuard | None = None  # None = no users, in tests of sessions alone
    stalled: dict[ClientSession, None] = field(default_factory=dict)
    lease: Callable[[], bool] | None = None

    def go_on(self) -> None:
        """Let the stalled sessions go on."""
        stalled, self.stalled = self.stalled, {}
        for session in stalled:
            session.go_on()


class ClientSession(Protocol):
    """One client connection. `reply`, `refuse` and `answer` answer a request
    by its frame; answers to a lost connection are dropped.
    """

    transport: Any  # Twisted's, without types

    def __init__(
        self, handle: Handle, welcome: Callable[[Hello], Welcome], clock: Clock, shared: SharedState
    ) -> None:
        self._handle, self._welcome, self._clock, self._shared = handle, welcome, clock, shared
        self._unsent: list[bytes] = []
        self._unsent_bytes = 0
        self._requests: deque[Frame] = deque()  # received, not begun
        self._outstanding = self._outstanding_bytes = 0  # requests without a reply
        # reading stops while the client does not read, or a frame waits for memory
        self._paused = self._no_memory = False
        self._reading = True
        self._turn: Timer | None = None
        self._decoder = FrameDecoder(limits.FRAME_BEFORE_HELLO)
        self._deadline: Timer | None = None
        self._ignoring = False
        self.hello: Hello | None = None
        # service and name, where the client is an instance's process
        self.instance: tuple[str, str] | None = None
        self.incarnation = 0
        self.origin = b""  # the client's process, if its hello names one
        self.rights: UserRights | None = None  # of the user, where the broker has users
        self.user_deleted = False  # perhaps there is another one of this name by now
        self.is_own = False  # of the broker itself, which does not log in
        # called when the connection is gone, by the key of their owner
        self.on_lost: dict[object, Callable[[], None]] = {}
        self.lost = False  # once it is, nothing calls what is added to `on_lost`
        self.log = log.bind()

    def connectionMade(self) -> None:
        self._wire: Transport = self.transport
        # not all can
        self._send: Callable[[bytes], object] | None = getattr(
            self.transport, "writeSomeData", None
        )
        self._wire.setTcpNoDelay(True)
        if (handle := getattr(self.transport, "getHandle", None)) is not None:  # a socket's
            notice_lost_peer(handle(), socket)
        self.transport.bufferSize = RECEIVE_BYTES
        # No requests are read from a client that does not read its replies.
        self._wire.registerProducer(_Backpressure(self), streaming=True)
        self.log = log.bind(peer=peer_name(self._wire.getPeer()))
        guard = None if self.is_own else self._shared.guard
        self._handshake = Handshake(guard, self.transport, self.peer_host)
        self._deadline = self._clock.callLater(HELLO_SECONDS, self.cut, "no hello")
        self._shared.connections.begin(self)

    def dataReceived(self, data: bytes) -> None:
        if self._ignoring:
            return
        decoder, memory = self._decoder, self._shared.frames
        was_unfinished = decoder.pending
        try:
            frames = decoder.feed(data)
            self._requests += frames
            if was_unfinished and frames:  # of which it is the first
                memory.finish(self)
                self._no_memory = False
            if decoder.pending:
                self._no_memory = not memory.update(self, decoder.pending, decoder.expected)
            self._work()
        except (ProtocolError, RequestRejected) as error:
            self._end_conversation(error)

    def admit_frame(self) -> None:
        """Read on: there is memory for the unfinished frame."""
        self._no_memory = False
        self._read_or_pause()

    def _work(self) -> None:
        """Carry out requests while the turn's time lasts, their replies can go out and
        few enough are outstanding; the others wait.
        """
        requests, until = self._requests, self._clock.seconds() + TURN_S
        while requests and self._may_begin():
            frame = requests.popleft()
            size = len(frame.payload)
            self._outstanding += 1
            self._outstanding_bytes += size
            self._shared.request_bytes += size
            if self.hello is None:
                self._handle_hello(frame)
            elif frame.opcode not in JUDGED or not self._shared.sends.takes(
                self, frame, full=self._is_full
            ):
                self._handle(self, frame)
            if requests and self._clock.seconds() >= until:
                self._work_later()
                break
        if self._reading is not self._may_read():
            self._read_or_pause()

    def _may_read(self) -> bool:
        """Return whether more requests may be read: while some wait, the kernel makes
        the client wait.
        """
        return not (self._requests or self._paused or self._no_memory)

    def _may_begin(self) -> bool:
        if (
            self._paused
            or self._unsent_bytes >= UNSENT_BYTES
            or self._outstanding >= MAX_OUTSTANDING
        ):
            return False
        first, sends, lease = self._requests[0], self._shared.sends, self._shared.lease
        if lease is not None and not lease():
            self._shared.stalled[self] = None
            return False
        if first.opcode in WRITES:
            # held or refused: what comes behind need not wait, unless they are many
            return sends.since is None or not sends.is_crowded_by(self)
        if self._outstanding and self._is_full and len(first.payload) > URGENT_BYTES:
            self._shared.stalled[self] = None
            return False
        return True

    @property
    def _is_full(self) -> bool:
        """True if requests under way take all the memory that there is for them. Those
        that wait for the disk have their own.
        """
        return self._shared.request_bytes - self._shared.sends.bytes >= REQUEST_BYTES

    def drop_payload(self, frame: Frame) -> Frame:
        """Return what is left of a request that will be refused."""
        size = len(frame.payload)
        self._outstanding_bytes -= size
        self._shared.request_bytes -= size
        if self._shared.stalled:
            self._go_on_with_stalled()
        return frame._replace(payload=b"")

    def begin(self, frame: Frame) -> None:
        """Carry out a request that has waited for the disk."""
        self._handle(self, frame)

    def _work_later(self) -> None:
        if self._turn is None and self._requests:
            self._turn = self._clock.callLater(0, self._next_turn)

    def _next_turn(self) -> None:
        self._turn = None
        if self._ignoring or not self._wire.connected:
            return
        try:
            self._work()
        except (ProtocolError, RequestRejected) as error:
            self._end_conversation(error)

    def _read_or_pause(self) -> None:
        reading = self._may_read()
        if reading is not self._reading:
            self._reading = reading
            if reading:
                self._wire.resumeProducing()
            else:
                self._wire.pauseProducing()

    def _end_conversation(self, error: TxmqError) -> None:
        if not isinstance(error, NotLeader):  # which clients cannot know
            self._shared.warnings.warn(self.log, "session.protocol_error", error=error.message)
        self._ignoring = True  # and its bytes would only say so again
        self._drop_input()
        status, payload = error_reply(error)
        self._wire.write(encode_frame(Opcode.HELLO, 0, payload, status=status))
        self._wire.loseConnection()

    def _handle_hello(self, frame: Frame) -> None:
        reply = self._handshake.receive(frame)
        if isinstance(reply, Challenge):
            self.reply(frame, reply.encode())
            return
        if reply.rights is not None:
            self._admit(reply.rights, reply.hello)
        self._greet(frame, reply.hello, reply.proof)

    def _admit(self, rights: UserRights, hello: Hello) -> None:
        """Take the rights of a user. Raises AccessDenied for an instance of a service
        that is not the user's.
        """
        if hello.instance is not None and hello.service is not None:
            rights.require((Need("write", "service", hello.service),))
        if not self._shared.connections.log_in(self, rights.user, rights.most_connections):
            raise rights.refused_connection()
        self.rights = rights
        self.log = self.log.bind(user=rights.user)

    @cached_property
    def owner(self) -> str:
        """The user, or else the host, who shares with others what there is."""
        return self.rights.user if self.rights is not None else network_of(self.peer_host)

    @property
    def peer_host(self) -> str:
        """The host of the client, without its port."""
        peer = self._wire.getPeer()
        return str(getattr(peer, "host", peer))

    def tell(self, welcome: Callable[[Hello], Welcome]) -> None:
        """Send the welcome again, as it is now, to a client that has had one."""
        if self.hello is not None and self._wire.connected:
            self._wire.write(encode_frame(Opcode.HELLO, 0, welcome(self.hello).encode()))

    def renew_rights(self) -> bool:
        """Take the user's rights as they are now: users have changed. A session whose
        user is gone, or that began before there were users, ends. Return whether the
        user may do something else than before.
        """
        guard = self._shared.guard
        if guard is None or self.is_own or self.hello is None:
            return False
        before = self.rights
        is_gone = before is None or self.user_deleted
        current = None if before is None or is_gone else guard.rights_of(before.user)
        if current is not None or not guard.has_users:
            self.rights = current if guard.has_users else None
            return _permissions(before) != _permissions(current)
        self.log.info("session.ended", reason="its user was deleted, or it has none")
        self.ignore_requests()
        self._clock.callLater(0, self._wire.loseConnection)
        # a client that neither reads nor ends its side of TLS would keep it for ever
        self._cancel_deadline()
        self._deadline = self._clock.callLater(STUCK_SECONDS, self.cut, "does not end")
        return True

    def _greet(self, frame: Frame, hello: Hello, proof: str | None) -> None:
        welcome = self._welcome(hello)
        if proof is not None:
            welcome = welcome.model_copy(update={"login": {"message": proof}})
        self._cancel_deadline()
        self._shared.connections.end(self)
        self.__dict__.pop("owner", None)  # that of before the login was the host
        self.hello = hello
        if hello.instance is not None and hello.service is not None:
            self.instance, self.incarnation = (hello.service, hello.instance), hello.incarnation
        self.origin = bytes.fromhex(hello.process or "")
        self._decoder.limit = limits.FRAME
        self.log = self.log.bind(service=hello.service)
        self.reply(frame, welcome.encode())

    def reply(self, frame: Frame, payload: Sequence[bytes] | bytes = b"") -> None:
        """Answer a request."""
        if self._wire.connected:
            self._put(frame, frame_buffers(frame.opcode, frame.correlation, payload))

    def _put(self, frame: Frame, pieces: Sequence[bytes]) -> None:
        self._outstanding -= 1
        shared, size = self._shared, len(frame.payload)
        self._outstanding_bytes -= size
        shared.request_bytes -= size
        if shared.stalled:
            self._go_on_with_stalled()
        if shared.buffering:
            self._unsent += pieces
            # header and fields of a frame are small
            self._unsent_bytes += len(pieces[2]) if len(pieces) == 3 else sum(map(len, pieces))
            shared.unsent[self] = None
        else:
            self._wire.writeSequence(pieces)
        if self._requests:
            self._work_later()

    def _go_on_with_stalled(self) -> None:
        """Let sessions go on that waited for the bytes of requests."""
        if not self._is_full:
            self._shared.go_on()

    def go_on(self) -> None:
        """Begin requests that have waited."""
        self._work_later()

    def flush_replies(self) -> None:
        """Write the buffered replies to the socket at once; the reactor sends what the
        socket does not take.

        This saves two system calls, which switch the reactor's interest in the socket
        on and off. A connection that is closing, or has unsent data, is left to the
        reactor, which handles its errors.
        """
        data, self._unsent, self._unsent_bytes = b"".join(self._unsent), [], 0
        sent = None
        if (
            self._send is not None
            and self._wire.connected
            and not self._wire.disconnecting
            and self._is_drained()
        ):
            sent = self._send(data)
        if sent != len(data):
            self._wire.write(data[sent:] if isinstance(sent, int) else data)
        self._work_later()

    def _is_drained(self) -> bool:
        unsent = self.transport.dataBuffer or self.transport._tempDataBuffer  # noqa: SLF001  # it has no other word
        return not unsent

    @property
    def is_choked(self) -> bool:
        """Return whether the client has to read replies before it gets more of them."""
        return self._paused or self._unsent_bytes >= UNSENT_BYTES

    def refuse(self, frame: Frame, error: TxmqError) -> None:
        """Answer a request with an error."""
        status, payload = error_reply(error)
        if self._wire.connected:
            self._put(frame, frame_buffers(frame.opcode, frame.correlation, payload, status=status))

    def answer(self, frame: Frame, encode: Encode, reply: Any) -> None:  # noqa: ANN401  # the core's
        """Answer a request with a reply of the core: encoded, or its refusal."""
        if isinstance(reply, RequestRejected):
            self.refuse(frame, reply)
        else:
            self.reply(frame, encode(reply))

    def pause(self) -> None:
        """Stop reading from a client that does not read its replies; cut its connection
        if that lasts.
        """
        self._paused = True
        self._read_or_pause()
        if self._deadline is None:
            self._deadline = self._clock.callLater(
                STUCK_SECONDS, self.cut, "does not read its replies"
            )

    def resume(self) -> None:
        """Read requests again: the client has read its replies."""
        if not self._ignoring:
            self._cancel_deadline()
        self._paused = False
        self._read_or_pause()
        self._work_later()

    def ignore_requests(self) -> None:
        """Read further requests without processing them.

        Unread bytes would make the kernel reset the connection, and replies under way
        would be lost.
        """
        self._ignoring = True
        self._drop_input()
        self._read_or_pause()

    def _drop_input(self) -> None:
        """Forget requests that were not begun, and an unfinished frame."""
        self._requests.clear()
        self._shared.sends.forget(self)
        self._shared.frames.finish(self)
        self._no_memory = False

    def _cancel_deadline(self) -> None:
        if self._deadline is not None and self._deadline.active():  # not the one that calls this
            self._deadline.cancel()
        self._deadline = None

    def cut(self, why: str) -> None:
        """Close the connection at once."""
        self._cancel_deadline()
        self._shared.warnings.warn(self.log, "session.cut", reason=why)
        self._ignoring = True
        self._drop_input()
        self._wire.abortConnection()

    def connectionLost(self, _reason: Failure = connectionDone) -> None:
        self._cancel_deadline()
        self._shared.connections.end(self)
        self._drop_input()
        self._shared.stalled.pop(self, None)
        self._shared.request_bytes -= self._outstanding_bytes
        self._outstanding_bytes = 0
        self._go_on_with_stalled()
        self.lost = True
        lost, self.on_lost = self.on_lost, {}
        for listener in lost.values():
            listener()


def _permissions(rights: UserRights | None) -> object:
    return None if rights is None else (rights.roles, rights.grants)


@implementer(IPushProducer)
class _Backpressure:
    """The producer that the transport pauses when its send buffer is full."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    def pauseProducing(self) -> None:
        self._session.pause()

    def resumeProducing(self) -> None:
        self._session.resume()

    def stopProducing(self) -> None:
        """Do nothing: `connectionLost` is called as well."""
