"""The real broker in a process of its own, to be killed and started again, and what can
be read from it.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from txmq.batch import BatchView
from txmq.client.blocking.connections.connection import Connection, open_connection
from txmq.client.protocol.address import parse_url
from txmq.client.protocol.conversation import Conversation, LogIdentity
from txmq.crashpoints import VARIABLE
from txmq.errors import UnknownTopic
from txmq.testing.processes import ENVIRONMENT, Running
from txmq.testing.wait import PATIENCE_S
from txmq.wire.chunks import unpack_chunks
from txmq.wire.data_requests import Opcode, Read, pack_read

ROOT = Path(__file__).parents[2]
SETTINGS = """
[broker]
data = "{data}"
listen = "{listen}"
[checks]
first_s = 0.2
then_s = 0.2
longest_s = 0.5
{resolvers}
"""
RESOLVER = """
[[resolver]]
name = "db{number}"
dsn = "{dsn}"
"""


class Found(NamedTuple):
    """A published message."""

    topic: str
    partition: int
    offset: int
    message_id: str
    key: str | None
    body: bytes


class RealBroker:
    """A broker on `directory`; `dsns` are the databases that it may ask. Started at
    once.
    """

    def __init__(self, directory: Path, dsns: Sequence[str] = ()) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)
        self.dsns = dsns
        self._process: Running | None = None
        self.url = ""
        self.start()

    def start(self, crash_at: str = "") -> None:
        """Starts it, on the same port as before if it ran before; to die where
        `crash_at` says, if it does.
        """
        if self._process is not None:
            self.kill()  # it has died by itself
        listen = self.url.removeprefix("txmq://") or "127.0.0.1:0"
        resolvers = "".join(RESOLVER.format(number=n, dsn=dsn) for n, dsn in enumerate(self.dsns))
        settings = self._directory / "broker.toml"
        settings.write_text(
            SETTINGS.format(data=self._directory / "data", listen=listen, resolvers=resolvers)
        )
        environment = {**ENVIRONMENT, VARIABLE: crash_at} if crash_at else ENVIRONMENT
        arguments = ("broker", "--create-topics", "--config", str(settings))
        self._process = Running(self._directory, *arguments, environment=environment)
        word, _, self.url = self._process.first_line().partition(" ")
        assert word == "ready", self.log

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not help."""
        self._end(signal.SIGTERM)

    @property
    def pid(self) -> int:
        """Its process, while it runs."""
        assert self._process is not None
        return self._process.process.pid

    @property
    def log(self) -> str:
        """What it has logged in all its lives."""
        return (self._directory / "err").read_text()

    def runs(self) -> bool:
        """Whether it has neither been ended nor died."""
        return self._process is not None and self._process.process.poll() is None

    def died(self) -> bool:
        """Whether it has been killed, by itself."""
        return self._process is not None and self._process.process.poll() == -signal.SIGKILL

    def _end(self, number: signal.Signals) -> None:
        running, self._process = self._process, None
        if running is None:
            return
        process = running.process
        process.send_signal(number)
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def read(self, topic: str) -> list[Found]:
        """Return the published messages of a topic by partition and offset: none where
        there is no such topic.

        A list of all topics would be long: each test has some of its own.
        """
        connection = self.connection()
        try:
            ends = connection.call("topic.show", {"name": topic}, timeout=PATIENCE_S)["ends"]
            return [
                found
                for partition, end in enumerate(ends)
                for found in _read(connection, topic, partition, end)
            ]
        except UnknownTopic:
            return []
        finally:
            connection.close()

    def connection(self) -> Connection:
        """A bare connection."""
        pin = LogIdentity()
        return open_connection(
            parse_url(self.url),
            pin,
            lambda: Conversation(None, pin),
            time.monotonic() + PATIENCE_S,
        )


def bodies(broker: RealBroker, topic: str) -> list[bytes]:
    """Of every published message, by partition and offset."""
    return [found.body for found in broker.read(topic)]


def _read(connection: Connection, topic: str, partition: int, end: int) -> list[Found]:
    found: list[Found] = []
    while len(found) < end:
        request = pack_read(Read(partition, len(found), 0, 1 << 20, topic))
        for chunk in unpack_chunks(
            connection.request(Opcode.READ, request, timeout=PATIENCE_S)
        ).chunks:
            view = BatchView(chunk.batch)
            rows = zip(view.message_ids, view.keys, view.bodies, strict=True)
            found += [
                Found(topic, partition, chunk.base_offset + n, *row) for n, row in enumerate(rows)
            ]
    return found
