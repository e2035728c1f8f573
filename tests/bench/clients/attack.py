"""A client that misuses a broker, until it is ended.

    python -m tests.bench.clients.attack NAME URL HTTP_PORT TOPIC

Prints `ready NAME` once the attack is under way. Its topics are there by then; TOPIC
is the one that others use. `ATTACKS` has the names.
"""

from __future__ import annotations

import re
import select
import socket
import struct
import sys
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, cycle, islice

import txmq
from txmq.config.listen import listen_address
from txmq.model import limits
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode, Read, pack_read
from txmq.wire.frames import encode_frame
from txmq.wire.hello import Hello, LoginStep
from txmq.wire.scram import MECHANISM, ScramClient

HELLO = encode_frame(
    Opcode.HELLO, 1, Hello(versions=(1, 1), client="attack", service="attack").encode()
)
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"
PIPELINED_BYTES = 50_000
LARGE_BODY = 4 << 20
HALF_OPEN = 1_000


class Target:
    """The addresses of the broker under attack."""

    def __init__(self, url: str, http_port: int, topic: str) -> None:
        self.url, self.topic = url, topic
        self._address = listen_address(url.removeprefix("txmq://"))
        self._http = ("127.0.0.1", http_port)

    def connect(self) -> socket.socket:
        """Return a connection that has greeted."""
        connection = socket.create_connection(self._address)
        connection.sendall(HELLO)
        connection.recv(65_536)
        return connection

    def begin_login(self, user: str) -> tuple[socket.socket, str]:
        """Return a connection with a challenge, and its nonce."""
        first = ScramClient(user, "wrong")
        login = {"mechanism": MECHANISM, "message": first.first()}
        hello = Hello(versions=(1, 1), client="attack", login=login).encode()
        connection = socket.create_connection(self._address)
        connection.sendall(encode_frame(Opcode.HELLO, 1, hello))
        match = re.search(rb"r=([^,]+),s=", connection.recv(65_536))
        if match is None:
            connection.close()
            raise ConnectionError("the login was refused")
        return connection, match[1].decode()

    def http(self) -> socket.socket:
        return socket.create_connection(self._http)


def call(name: str, **args: object) -> bytes:
    return encode_frame(Opcode.CALL, 7, encode_call(name, args))


def read_frame(topic: str, *, wait_ms: int = 0, size: int = 2**32 - 1) -> bytes:
    return encode_frame(Opcode.READ, 7, pack_read(Read(0, 0, wait_ms, size, topic)))


def feed(streams: dict[socket.socket, Iterator[bytes]], *, reading: bool) -> None:
    """Send each connection's stream as fast as the broker takes it, for ever. `reading`
    clients read the replies. A connection that the broker closes is not replaced.
    """
    unsent: dict[socket.socket, bytes] = dict.fromkeys(streams, b"")
    for connection in streams:
        connection.setblocking(False)
    while True:
        readers = list(streams) if reading else []
        ready, writable, _ = select.select(readers, list(streams), [], 1.0)
        for connection in dict.fromkeys(ready + writable):
            try:
                if connection in ready and not connection.recv(1 << 20):
                    raise ConnectionResetError
                if connection in writable:
                    data = unsent[connection] or next(streams[connection], b"")
                    unsent[connection] = data[connection.send(data) :]
            except BlockingIOError:
                continue
            except ConnectionError:
                del streams[connection], unsent[connection]
        if not reading:
            time.sleep(0.001)
        if not streams:
            ready_to_end()


def ready_to_end() -> None:
    """Wait to be ended: the broker has cut all connections."""
    while True:
        time.sleep(1)


@contextmanager
def administrator(target: Target) -> Iterator[txmq.Client]:
    with txmq.connect(target.url, timeout=60.0) as client:
        yield client


def topics(target: Target, count: int, partitions: int) -> None:
    with administrator(target) as client:
        for number in range(count):
            client.call("topic.create", name=f"a-{number}", partitions=partitions)


def large_messages(target: Target, count: int) -> None:
    topics(target, 1, 1)
    with administrator(target) as client:
        for _ in range(count):
            client.send("a-0", bytes(LARGE_BODY))


def unfinished_frames(target: Target, ready: Callable[[], None]) -> None:
    """200 connections, each one byte short of the largest frame."""
    head = struct.pack("<I", limits.FRAME)

    def short() -> Iterator[bytes]:
        yield head
        for _ in range(limits.FRAME // 65_536 - 1):
            yield bytes(65_536)

    ready()
    feed({target.connect(): short() for _ in range(200)}, reading=False)


def huge_read(target: Target, ready: Callable[[], None]) -> None:
    """READs of 2**32 - 1 bytes, one after the other."""
    large_messages(target, 40)
    ready()
    feed({target.connect(): cycle([read_frame("a-0")])}, reading=True)


def pipelined_reads(target: Target, ready: Callable[[], None]) -> None:
    """4 KB of READs on each of ten connections, whose replies nobody reads."""
    large_messages(target, 10)
    one = read_frame("a-0")
    ready()
    feed({target.connect(): iter([one * (4_096 // len(one))]) for _ in range(10)}, reading=False)


def long_polls(target: Target, ready: Callable[[], None]) -> None:
    """100,000 long polls: READs at the end of a topic, and calls of checkers."""
    waiting = call("checks.wait", service="attack", wait_ms=60_000, max=1)
    topics(target, 1, 1)
    polls = read_frame("a-0", wait_ms=60_000) * 500 + waiting * 500
    ready()
    feed({target.connect(): islice(cycle([polls]), 100)}, reading=True)


def topic_lists(target: Target, ready: Callable[[], None]) -> None:
    """50 KB of topic.list at a time, over 1,000 topics of 8 partitions."""
    topics(target, 1_000, 8)
    one = call("topic.list")
    ready()
    feed({target.connect(): cycle([one * (PIPELINED_BYTES // len(one))])}, reading=True)


def wide_joins(target: Target, ready: Callable[[], None]) -> None:
    """Joins over as many partitions as a broker has, and as a member may read."""
    topics(target, 200, 4_096)
    names = [f"a-{number}" for number in range(200)]
    joins = [
        call("consumer.join", group=f"g{group}", topics=chosen, member="m", instance="i")
        for group in range(8)
        for chosen in (names, names[2 * group : 2 * group + 2])
    ]
    ready()
    feed({target.connect(): cycle(joins)}, reading=True)


def pipelined_metrics(target: Target, ready: Callable[[], None]) -> None:
    """One HTTP connection after the other, with pipelined /metrics of 500 topics."""
    topics(target, 500, 8)
    data = GET % b"/metrics" * 1_000
    ready()
    while True:
        with target.http() as connection, suppress(ConnectionError):
            connection.sendall(data)
            while connection.recv(1 << 20):
                pass


def slow_http(target: Target, ready: Callable[[], None]) -> None:
    """64 HTTP connections that never end their request; lost ones are made again."""
    ready()
    slow = [target.http() for _ in range(64)]
    while True:
        time.sleep(0.1)
        for number, connection in enumerate(slow):
            try:
                connection.send(b"G")
            except ConnectionError:
                connection.close()
                slow[number] = target.http()


def console(target: Target, ready: Callable[[], None]) -> None:
    """An open console: its requests, without a pause."""
    pages = cycle([b"broker", b"topics", b"groups", b"transactions?state=undecided", b"alarms"])
    ready()
    with target.http() as connection:
        for page in pages:
            connection.sendall(GET % (b"/api/v1/" + page))
            connection.recv(1 << 20)


def connections(target: Target, ready: Callable[[], None]) -> None:
    """Connections that are opened and closed."""
    ready()
    while True:
        target.connect().close()


def small_requests(target: Target, ready: Callable[[], None]) -> None:
    """PINGs and refused calls, as fast as they are taken."""
    data = (encode_frame(Opcode.PING, 7) + call("group.show", group="none")) * 500
    ready()
    feed({target.connect(): cycle([data])}, reading=True)


def half_open_logins(target: Target, ready: Callable[[], None]) -> None:
    """A thousand logins that begin and do not end, again and again."""
    hanging: deque[socket.socket] = deque()
    for number in cycle(range(HALF_OPEN)):
        if len(hanging) == HALF_OPEN:
            hanging.popleft().close()
        try:
            hanging.append(target.begin_login(f"half-{number}")[0])
        except OSError:
            time.sleep(0.001)
        if number == HALF_OPEN - 1:
            ready()


def wrong_passwords(target: Target, ready: Callable[[], None]) -> None:
    """Logins with wrong proofs, as fast as one process can, each of another user."""
    for number in count():
        try:
            connection, nonce = target.begin_login(f"guess-{number}")
            with connection:
                final = LoginStep(message=f"c=biws,r={nonce},p={'A' * 43}=").encode()
                connection.sendall(encode_frame(Opcode.LOGIN, 2, final))
                while connection.recv(65_536):
                    pass
        except OSError:
            time.sleep(0.001)
        if number == 100:
            ready()


def wrong_passwords_by_http(target: Target, ready: Callable[[], None]) -> None:
    """Wrong passwords by HTTP on ten connections, each of another user."""
    ready()
    requests = (
        GET[:-2] % b"/" + b"Authorization: Basic " + b64encode(b"u%d:wrong" % number) + b"\r\n\r\n"
        for number in count()
    )
    while True:
        with suppress(OSError):
            feed({target.http(): islice(requests, 1_000) for _ in range(10)}, reading=True)


# at a broker with users
LOGIN_ATTACKS: dict[str, Callable[[Target, Callable[[], None]], None]] = {
    attack.__name__: attack
    for attack in (half_open_logins, wrong_passwords, wrong_passwords_by_http)
}
ATTACKS: dict[str, Callable[[Target, Callable[[], None]], None]] = {
    attack.__name__: attack
    for attack in (
        unfinished_frames,
        huge_read,
        pipelined_reads,
        long_polls,
        topic_lists,
        wide_joins,
        pipelined_metrics,
        slow_http,
        console,
        connections,
        small_requests,
    )
}


def main(name: str, url: str, http_port: int, topic: str) -> None:
    """Attack until this process is ended."""
    (ATTACKS | LOGIN_ATTACKS)[name](
        Target(url, http_port, topic), lambda: print("ready", name, flush=True)
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
