"""A broker that follows a script, on a real socket. It shares only the wire format with
the real one.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self
from uuid import UUID

from txmq.batch import BatchView
from txmq.errors import RemoteProtocolError, RequestRejected
from txmq.model import limits
from txmq.wire.batched import BatchedReply, pack_replies, unpack_requests
from txmq.wire.calls.registry import decode_call
from txmq.wire.data_requests import Opcode, Send, SendReceipt, pack_send_receipt, unpack_send
from txmq.wire.frames import Frame, FrameDecoder, encode_frame
from txmq.wire.hello import BrokerLimits, Welcome
from txmq.wire.json import dump
from txmq.wire.status import error_reply

LOG = UUID("11111111-1111-4111-8111-111111111111")


class Silent:
    """No reply; the connection stays open."""


class HangUp:
    """The end of the connection instead of a reply."""


class Raw(bytes):
    """Bytes that are sent unchanged."""

    __slots__ = ()


Reaction = bytes | RequestRejected | type[Silent] | type[HangUp] | Raw
Script = Callable[[Frame], Reaction | None]  # None = the ordinary reply


class FakeBroker:
    """Listens from the start, with a thread for each connection.

    `frames` and `sends` are the received ones, in order.
    """

    def __init__(
        self,
        *,
        partitions: int = 1,
        log_id: UUID = LOG,
        message: int = limits.MESSAGE,
        port: int = 0,
    ) -> None:
        self.partitions, self.epoch, self.log_id, self.message = partitions, 1, log_id, message
        self.frames: list[Frame] = []
        self.sends: list[Send] = []
        # Reactions to SENDs; at its end, receipts.
        self.script: deque[Reaction | Script | None] = deque()
        self.answers: dict[str, Any] = {}  # of control calls, by name
        self.refusals: deque[RequestRejected] = deque()  # of the next calls, of any name
        self.others: Script = lambda _frame: b""  # requests that are neither calls nor sends
        self.takes_sends = False  # `others` gets frames of several sends
        self.greeting: bytes | None = None  # instead of the welcome
        self.boot_epoch = 1
        self.nodes: list[str] = []  # of its cluster
        self.accepted = 0
        self._ends: Counter[int] = Counter()
        self._peers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", port))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def url(self) -> str:
        return f"txmq://127.0.0.1:{self.port}"

    def hang_up(self) -> None:
        """Close all connections."""
        with self._lock:
            peers, self._peers = self._peers, set()
        for peer in peers:
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening and close all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def refuse_hello(self, error: RequestRejected) -> None:
        """Refuse clients from now on."""
        status, payload = error_reply(error)
        self.greeting = encode_frame(Opcode.HELLO, 0, payload, status=status)

    def welcome_again(self) -> None:
        """Send all clients the welcome as it is now."""
        welcome = self._welcome()
        assert isinstance(welcome, bytes)
        with self._lock:
            for peer in self._peers:
                with suppress(OSError):  # closed before
                    peer.sendall(encode_frame(Opcode.HELLO, 0, welcome))

    def bodies(self) -> list[list[bytes]]:
        """Return the bodies of each send."""
        return [BatchView(send.batch).bodies for send in self.sends]

    def origins(self) -> list[tuple[bytes, int]]:
        """Return producer id and sequence of each send."""
        headers = [BatchView(send.batch).header for send in self.sends]
        return [(header.producer_id, header.sequence) for header in headers]

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(peer,), daemon=True)
            with self._lock:
                self.accepted += 1
                self._peers.add(peer)
                self._threads.append(thread)
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        decoder = FrameDecoder(limits.FRAME)
        # RemoteProtocolError: a stranger, which looks for who had this port before
        with peer, suppress(OSError, RemoteProtocolError):
            while data := peer.recv(1 << 16):
                for frame in decoder.feed(data):
                    with self._lock:
                        reaction = self._react(frame)
                    if reaction is HangUp:
                        return
                    self._answer(peer, frame, reaction)

    def _react(self, frame: Frame) -> Reaction:
        self.frames.append(frame)
        match frame.opcode:
            case Opcode.HELLO:
                return self._welcome()
            case Opcode.CALL:
                return self._call(frame)
            case Opcode.SEND:
                return self._send(frame)
            case Opcode.SENDS if not self.takes_sends:
                return self._send_each(frame)
        return self.others(frame) or b""

    def _welcome(self) -> Reaction:
        sizes = BrokerLimits(frame=limits.FRAME, message=self.message)
        welcome = Welcome(
            version=1,
            broker="fake",
            log_id=self.log_id,
            boot_epoch=self.boot_epoch,
            limits=sizes,
            nodes=tuple(self.nodes),
        )
        return welcome.encode() if self.greeting is None else Raw(self.greeting)

    def _call(self, frame: Frame) -> Reaction:
        name, args = decode_call(frame.payload)
        if self.refusals:
            return self.refusals.popleft()
        if name == "topic.describe":
            names = args.model_dump()["names"]
            shapes = [
                {"name": name, "partitions": self.partitions, "epoch": self.epoch, "topic_id": 7}
                for name in names
            ]
            return dump({"topics": shapes})
        answer = self.answers.get(name, {})
        return answer if isinstance(answer, RequestRejected) else dump(answer)

    def _send(self, frame: Frame) -> Reaction:
        send = unpack_send(frame.payload)
        self.sends.append(send)
        step = self.script.popleft() if self.script else None
        reaction = step(frame) if callable(step) and not isinstance(step, type) else step
        if reaction is not None:
            return reaction
        base = self._ends[send.partition]
        self._ends[send.partition] += len(BatchView(send.batch))
        return receipt(base)

    def _send_each(self, frame: Frame) -> Reaction:
        """Answer each send of a frame by the script. What is no reply to one of them
        goes for the frame.
        """
        replies: list[BatchedReply] = []
        for payload in unpack_requests(frame.payload):
            reaction = self._send(frame._replace(opcode=Opcode.SEND, payload=payload))
            if isinstance(reaction, RequestRejected):
                replies.append(BatchedReply(*error_reply(reaction)))
            elif isinstance(reaction, bytes) and not isinstance(reaction, Raw):
                replies.append(BatchedReply(0, reaction))
            else:
                return reaction
        return b"".join(pack_replies(replies))

    def _answer(self, peer: socket.socket, frame: Frame, reaction: Reaction) -> None:
        if isinstance(reaction, Raw):
            peer.sendall(reaction)
        elif isinstance(reaction, RequestRejected):
            status, payload = error_reply(reaction)
            peer.sendall(encode_frame(frame.opcode, frame.correlation, payload, status=status))
        elif isinstance(reaction, bytes):
            peer.sendall(encode_frame(frame.opcode, frame.correlation, reaction))


def receipt(offset: int, *, duplicate: bool = False) -> bytes:
    """Return the reply to a stored send."""
    return pack_send_receipt(SendReceipt(offset, 1_700_000_000_000_000, duplicate))
