"""A client that sends what it likes to a real broker, for tests of hostile input."""

from __future__ import annotations

import json
import os
import socket
import struct
from base64 import b64encode
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import txmq
from tests.bench.harness import rss_anon
from txmq.batch import encode
from txmq.config.listen import listen_address
from txmq.errors import TxmqError
from txmq.model.decider import ByChecker, Decider
from txmq.model.message import Message
from txmq.testing.own_broker import OwnBroker
from txmq.testing.ports import free_port
from txmq.testing.wait import PATIENCE_S
from txmq.wire.bundle import BundleDescription, BundlePart, PartBatch, bundle_digest, pack_part
from txmq.wire.calls.encoding import encode_call
from txmq.wire.calls.users import VerifierArgs
from txmq.wire.data_requests import Opcode, send_header
from txmq.wire.frames import Frame, FrameDecoder, encode_frame
from txmq.wire.hello import Hello
from txmq.wire.json import parse
from txmq.wire.scram import make_verifier
from txmq.wire.status import to_error

LARGEST = 1 << 26
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close sends RST
MAX_RSS = 250e6
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CHECKED = ByChecker("c")


def hello(**more: Any) -> bytes:  # fields of a hello
    return Hello(versions=(1, 1), client="stranger", service="s", **more).encode()


HELLO = encode_frame(Opcode.HELLO, 1, hello())
PING = encode_frame(Opcode.PING, 2)


class Stranger:
    """One connection. `answers` are those that have come, in their order."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._decoder = FrameDecoder(LARGEST)
        self.answers: list[Frame] = []

    def greet(self) -> Stranger:
        self.send(HELLO)
        assert self.next().status == 0
        return self

    def send(self, data: bytes) -> None:
        """Send what the broker takes; a connection that it has cut takes no more."""
        with suppress(ConnectionError):
            self.socket.sendall(data)

    def next(self) -> Frame:
        """Return the next answer. Raises EOFError where the broker has hung up."""
        while not self.answers:
            try:
                data = self.socket.recv(1 << 20)
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError
            self.answers += self._decoder.feed(data)
        return self.answers.pop(0)

    def rest(self) -> list[Frame]:
        """Return all answers up to the broker's end of the connection."""
        found: list[Frame] = []
        while True:
            try:
                found.append(self.next())
            except EOFError:
                return found

    def ask(self, opcode: int, payload: bytes) -> Any:  # JSON, bytes, or an error
        """Return the answer to a request, or the error that it is."""
        self.send(encode_frame(opcode, 7, payload))
        answer = self.next()
        if answer.status:
            return to_error(answer.status, answer.payload)
        return parse(answer.payload) if opcode == Opcode.CALL else answer.payload

    def call(self, name: str, /, **args: object) -> Any:
        return self.ask(Opcode.CALL, encode_call(name, args))

    def refused(self, name: str, /, **args: object) -> str:
        """Make a call that must be refused; return the error's name."""
        return refusal(self.call(name, **args))

    def reset(self) -> None:
        """End the connection by RST."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.socket.close()


def refusal(answer: object) -> str:
    """Return the name of the error that an answer is."""
    assert isinstance(answer, TxmqError), answer
    assert answer.message
    return type(answer).__name__


class AttackedBroker:
    """A real broker, and a witness that is another client of it."""

    def __init__(self, directory: Path) -> None:
        self.http = ("127.0.0.1", free_port())
        self.broker = OwnBroker(directory, f'[broker]\nhttp = "127.0.0.1:{self.http[1]}"\n')
        self.broker.start()
        self.pid = self.broker.process.process.pid
        host, port = listen_address(self.broker.url.removeprefix("txmq://"))[:2]
        self.address = (str(host), int(port))
        self.witness = txmq.connect(self.broker.url, service="witness", timeout=PATIENCE_S)
        for name in ("witness", "t"):
            self.witness.call("topic.create", name=name, partitions=1)
        self.epoch = self.witness.call("broker.show")["boot_epoch"]
        self.served = 0
        self.open: list[socket.socket] = []

    def log_in_as(self, user: str, password: str) -> None:
        """Make an admin of the broker, its first user, and the witness."""
        verifier = VerifierArgs.of(make_verifier(password))
        self.witness.call("user.set", name=user, roles=["admin"], new=True, password=verifier)
        self.witness.close()
        url = self.broker.url.replace("//", f"//{user}:{password}@")
        self.witness = txmq.connect(url, service="witness", timeout=PATIENCE_S)

    def connect(self) -> Stranger:
        """Return a connection, which stays until `witness_is_served` has been."""
        stranger = Stranger(self.address)
        self.open.append(stranger.socket)
        return stranger

    def greeted(self) -> Stranger:
        return self.connect().greet()

    def get(self, data: bytes) -> bytes:
        """Return what comes by HTTP to `data` until the end of the connection."""
        with closing(socket.create_connection(self.http, PATIENCE_S)) as one:
            try:
                one.sendall(data)
                return b"".join(iter(lambda: one.recv(1 << 16), b""))
            except ConnectionError:
                return b""

    def get_as(self, user: str, password: str, path: str) -> bytes:
        """Return what comes by HTTP to a GET of a user."""
        word = b64encode(f"{user}:{password}".encode()).decode()
        return self.get(
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic {word}\r\n"
            "Connection: close\r\n\r\n".encode()
        )

    @property
    def cpu_s(self) -> float:
        """The processor time of the broker."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S

    def witness_is_served(self) -> None:
        """Let the witness send, call, and ask by HTTP: all have their answers."""
        sends = [self.witness.send_async("witness", b"%d" % n) for n in range(10)]
        offsets = [one.result(PATIENCE_S).offset for one in sends]
        assert offsets == list(range(self.served, self.served + 10))
        self.served += 10
        assert self.witness.call("broker.show")["boot_epoch"] == self.epoch
        health = self.get(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert health.endswith(b"ok\n")

    @contextmanager
    def unharmed(self, cpu_s: float) -> Iterator[None]:
        """Attack within the block: the witness is served while the connections are
        open, and the broker's memory and processor time have bounds.
        """
        before = self.cpu_s
        try:
            yield
            self.witness_is_served()
            assert rss_anon(self.pid) <= MAX_RSS
            assert self.cpu_s - before <= cpu_s
        finally:
            for one in self.open:
                one.close()
            self.open.clear()

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the log, each of which is one JSON object."""
        return [json.loads(line) for line in self.broker.log.splitlines()]

    def close(self) -> None:
        self.witness.close()
        self.broker.stop()


def batch(body: bytes = b"m", *, sequence: int = 0, producer: bytes = b"p" * 16) -> bytes:
    return encode([Message(body)], producer_id=producer, epoch=0, sequence=sequence, born_at=1)


def send_of(data: bytes, topic: str = "t", partition: int = 0) -> bytes:
    return send_header(topic, partition, 0) + data


def half(token: bytes, body: bytes = b"m", decider: Decider = CHECKED, epoch: int = 0) -> bytes:
    """Return the payload of a half message in topic t."""
    data = PartBatch("t", 0, 0, batch(body, producer=token))
    described = BundleDescription(decider, "s")
    part = BundlePart(token, 0, epoch, True, False, bytes(32), described, (data,))
    return b"".join(pack_part(part._replace(digest=bundle_digest([part]))))
