"""Data directories filled without a network: what a broker has to start with, at the
speed of its core.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twisted.internet.defer import Deferred, execute
from twisted.internet.task import Clock

from tests.bench.harness import BenchError
from txmq.batch import encode_columns, encode_one, verify
from txmq.broker.data_directory.storage import Keeper, open_directory
from txmq.broker.engine import Engine
from txmq.client.protocol.transaction.tokens import new_token
from txmq.config.broker import Broker
from txmq.core.state.state import Rejected
from txmq.core.topics.sends import Send
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions.half_storage import GroupBatch, StorePart
from txmq.model.message import Message
from txmq.store.fs import RealFileSystem

AT_ONCE = 2_000  # commands to a flush, and flushes of that many to a commit of the tables
KEEP_EVERY = 10
PRODUCER = b"p" * 16
CHECK_AFTER_US = 3_600 * 1_000_000  # nothing is asked about while it is measured


class Filler:
    """A broker without a reactor."""

    def __init__(self, data: Path) -> None:
        settings, fs = Broker(data=data), RealFileSystem()
        opened = open_directory(fs, settings, _now())
        self._log, self._clock = opened.log, Clock()
        self.engine = Engine(
            opened.log, opened.state, clock=self._clock, now=_now, in_thread=_at_once
        )
        self._keeper = Keeper(fs, self.engine, opened.tables, settings, _at_once)
        self.engine.boot("bench")

    def do(self, commands: Iterable[object], at_once: int = AT_ONCE) -> None:
        """Carries out all of them, so many in a flush. Raises BenchError where one is
        refused.
        """
        for number, command in enumerate(commands, 1):
            self.engine.submit(command, _accepted)
            if number % at_once == 0:
                self._clock.advance(0)
            if number % (at_once * KEEP_EVERY) == 0:
                self.keep()
        self.keep()

    def keep(self) -> None:
        """Bring everything to disk, as the broker's timers do."""
        for _ in range(4):
            self._clock.advance(0)
            self._keeper.tend()

    def close(self) -> None:
        self._keeper.close()
        self._log.close()


@contextmanager
def filling(data: Path) -> Iterator[Filler]:
    """A data directory to be filled in the block; it is left as a broker that is
    stopped leaves it.
    """
    filler = Filler(data)
    yield filler
    filler.close()


def topics(count: int, partitions: int) -> Iterator[CreateTopic]:
    """They are called bench-0, bench-1 and so on."""
    return (CreateTopic(f"bench-{number}", partitions) for number in range(count))


def volumes(size: int, topic: str, partitions: int) -> Iterator[Send]:
    """Batches of 1,000 messages of 1 KiB, about `size` bytes in all, to the partitions
    in turn.
    """
    bodies = [bytes(1_024)] * 1_000
    for number in range(size // (1_024 * len(bodies))):
        data = encode_columns(
            bodies, producer_id=PRODUCER, epoch=0, sequence=number * len(bodies), born_at=1
        )
        yield Send(topic, 0, number % partitions, data, verify(data))


def halves(count: int, topic: str) -> Iterator[StorePart]:
    """Half messages of 100 B whose checker nobody asks, each of a key of its own."""
    for number in range(count):
        token = new_token().bytes
        message = Message(b"x" * 100, f"key-{number}")
        data = encode_one(message, producer_id=token, epoch=0, sequence=0, born_at=1)
        batch = GroupBatch(topic, 0, 0, data, verify(data))
        yield StorePart(
            token,
            0,
            (batch,),
            True,
            False,
            b"d" * 32,
            0,
            ("checker", "bench"),
            "bench",
            (),
            CHECK_AFTER_US,
        )


def _now() -> int:
    return time.time_ns() // 1_000


def _at_once(function: Any, *args: object) -> Deferred[Any]:
    return execute(function, *args)


def _accepted(reply: object) -> None:
    if isinstance(reply, Rejected):
        raise BenchError(f"refused: {reply.message}")
