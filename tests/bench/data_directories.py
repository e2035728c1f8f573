"""Data directories filled by the broker's core, without a network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, execute
from twisted.internet.task import Clock

from tests.bench.harness import BenchError
from txmq.batch import encode_columns, encode_one, verify
from txmq.broker.data_directory.storage import StorageService, open_directory
from txmq.broker.engine.engine import Engine
from txmq.client.protocol.transaction.tokens import new_token
from txmq.config.broker import BrokerSettings
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions.half_storage import BundleBatch, StorePart
from txmq.errors import RequestRejected
from txmq.model.decider import ByChecker
from txmq.model.message import Message
from txmq.model.units import HOUR
from txmq.store.filesystem import RealFileSystem

FLUSH_COMMANDS = 2_000  # commands per flush
FLUSHES_PER_COMMIT = 10  # flushes per commit of the tables
PRODUCER = b"p" * 16
CHECK_AFTER_US = HOUR  # no check-backs during the measurement


def current_time() -> int:
    """Return the machine's time in microseconds."""
    return time.time_ns() // 1_000


class Filler:
    """A broker without a reactor, whose time is `now` in microseconds."""

    def __init__(self, data: Path, now: Callable[[], int]) -> None:
        settings, fs = BrokerSettings(data=data), RealFileSystem()
        opened = open_directory(fs, settings, now())
        self._log, self._clock = opened.log, Clock()
        self.engine = Engine(
            opened.log, opened.state, clock=self._clock, now=now, in_thread=_run_now
        )
        self._storage = StorageService(fs, self.engine, opened.tables, settings, _run_now)
        self.engine.boot("bench")

    def submit(self, commands: Iterable[object], at_once: int = FLUSH_COMMANDS) -> None:
        """Submit all commands, `at_once` per flush.

        Raises BenchError where a command is rejected.
        """
        for number, command in enumerate(commands, 1):
            self.engine.submit(command, _accepted)
            if number % at_once == 0:
                self._clock.advance(0)
            if number % (at_once * FLUSHES_PER_COMMIT) == 0:
                self.commit_tables()
        self.commit_tables()

    def commit_tables(self) -> None:
        """Write everything to disk, as the broker's timers do."""
        for _ in range(4):
            self._clock.advance(0)
            self._storage.tick()

    def close(self) -> None:
        self._storage.close()
        self._log.close()


@contextmanager
def filling(data: Path, now: Callable[[], int] = current_time) -> Iterator[Filler]:
    """Yield a filler of the data directory, and close it as a stopping broker does."""
    filler = Filler(data, now)
    yield filler
    filler.close()


def topics(count: int, partitions: int) -> Iterator[CreateTopic]:
    """Return commands that create topics named bench-0, bench-1 and so on."""
    return (CreateTopic(f"bench-{number}", partitions) for number in range(count))


def volumes(size: int, topic: str, partitions: int) -> Iterator[StoreBatch]:
    """Yield batches of 1,000 messages of 1 KiB, about `size` bytes in total.

    The partitions take turns.
    """
    bodies = [bytes(1_024)] * 1_000
    for number in range(size // (1_024 * len(bodies))):
        data = encode_columns(
            bodies, producer_id=PRODUCER, epoch=0, sequence=number * len(bodies), born_at=1
        )
        yield StoreBatch(topic, 0, number % partitions, data, verify(data))


def halves(count: int, topic: str) -> Iterator[StorePart]:
    """Yield half messages of 100 B with different keys and no running checker."""
    for number in range(count):
        token = new_token().bytes
        message = Message(b"x" * 100, f"key-{number}")
        data = encode_one(message, producer_id=token, epoch=0, sequence=0, born_at=1)
        batch = BundleBatch(topic, 0, 0, data, verify(data))
        yield StorePart(
            token,
            0,
            (batch,),
            True,
            False,
            b"d" * 32,
            0,
            ByChecker("bench"),
            "bench",
            (),
            CHECK_AFTER_US,
        )


def _run_now(function: Any, *args: object) -> Deferred[Any]:
    return execute(function, *args)


def _accepted(reply: object) -> None:
    if isinstance(reply, RequestRejected):
        raise BenchError(f"command rejected: {reply.message}")
