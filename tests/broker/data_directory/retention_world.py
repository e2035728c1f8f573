"""A broker on a simulated disk with small segments: the real storage service and rounds
of retention, power cuts at will.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, cast

import msgpack
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from tests.broker.support import BEGAN, NoResolvers
from tests.simulation.simulated_broker import SEGMENT, recover
from tests.store.simfs import SimFS
from txmq.batch import BatchView, encode, verify
from txmq.broker.assembly import Assembly
from txmq.broker.data_directory.storage import StorageService
from txmq.broker.engine.engine import Engine
from txmq.config.broker import BrokerSettings, SettingsFile, load_broker
from txmq.core import machine
from txmq.core.retention import log_floor
from txmq.core.state.failed_rows import FailedMessage
from txmq.core.state.state import State
from txmq.core.topics import delayed
from txmq.core.topics.sends import StoreBatch
from txmq.errors import TxmqError
from txmq.model.message import Message
from txmq.model.units import SECOND
from txmq.store import tables as t
from txmq.store.index.lmdb_tables import LmdbTables
from txmq.store.log.log import Log

DATA, ARCHIVE = "/data", "/cold"


class MemoryIndex:
    """A stand-in for LMDB: rows in memory, and the rows that stand for a position."""

    def __init__(self, state: State, position: int) -> None:
        self._state, self.position = state, position
        self._written: list[tuple[str, bytes, bytes]] = []

    def freeze(self, position: int) -> Any:
        rows = [
            (name, key, msgpack.packb(row))
            for name in t.NAMES
            for key, row in self._state.tables[name].range(b"")
        ]
        return _Frozen(position, rows)

    def commit(self, frozen: Any, *, durable: int) -> None:
        assert frozen.position <= durable
        self.position, self._written = frozen.position, frozen.rows
        frozen.committed = True

    def release(self, frozen: Any) -> None:
        assert frozen.committed

    @contextmanager
    def dump(self) -> Iterator[tuple[int, Iterator[tuple[str, bytes, bytes]]]]:
        yield self.position, iter(self._written)


class _Frozen:
    def __init__(self, position: int, rows: list[tuple[str, bytes, bytes]]) -> None:
        self.position, self.rows, self.committed = position, rows, False

    def clear(self) -> None:
        """Clear all rows."""


class RetentionWorld:
    """One life of a broker. Topic `t` keeps messages for an hour, which is a third of a
    segment.
    """

    def __init__(
        self, fs: SimFS, *, now: int = BEGAN, data: str = DATA, **retention_settings: Any
    ) -> None:
        self.fs, self.clock, self._began = fs, Clock(), now
        settings = load_broker(None, {"data": data})
        kept = settings.retention.model_copy(
            update={"hours": 1.0, "archive": Path(ARCHIVE)} | retention_settings
        )
        self.settings: SettingsFile = settings.model_copy(update={"retention": kept})
        self.own: BrokerSettings = settings.broker.model_copy(update=self.broker_settings())
        self.log, self.state, self.tables = self.opened(now)
        self.engine = Engine(
            self.log, self.state, clock=self.clock, now=self.now, in_thread=self._at_once
        )
        self.engine.on_failure = Failure.raiseException
        self.engine.boot("test")
        self.assembly = Assembly(self.engine, self.settings, self.clock, NoResolvers(), Random(1))
        self.storage = StorageService(fs, self.engine, self.tables, self.own, self._at_once)
        self.storage.remove_segments(self.assembly.retention, ARCHIVE)
        self.sequence = 0

    def broker_settings(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults."""
        return {"snapshot_bytes": 1 << 40, "segment_bytes": SEGMENT}

    def opened(self, now: int) -> tuple[Log, State, LmdbTables]:
        """Recover the directory on the disk."""
        log, state = recover(self.fs, now)
        return log, state, cast("LmdbTables", MemoryIndex(state, log.first))

    def now(self) -> int:
        return self._began + round(self.clock.seconds() * SECOND)

    def _at_once(self, function: Callable[..., Any], *args: object) -> Deferred[Any]:
        try:
            return succeed(function(*args))
        except TxmqError:
            return fail()

    def protocol(self) -> object:
        return self.assembly.sessions.accept()

    def turn(self, seconds: float = 0) -> None:
        self.clock.advance(seconds)
        for _ in range(60):
            self.clock.advance(0)

    def do(self, command: object) -> Any:
        replies: list[Any] = []
        self.engine.submit(command, replies.append)
        self.turn()
        [reply] = replies
        return reply

    def send(
        self, body: bytes, topic: str = "t", key: str | None = None, delay: float | None = None
    ) -> Any:
        return self.do(self.sending(body, topic, key, delay))

    def sending(
        self, body: bytes, topic: str = "t", key: str | None = None, delay: float | None = None
    ) -> StoreBatch:
        """The producer of this life."""
        data = encode(
            [Message(body, key, delay=delay)],
            producer_id=b"p" * 8 + self.engine.state.boot_epoch.to_bytes(8),
            epoch=0,
            sequence=self.sequence,
            born_at=1,
        )
        self.sequence += 1
        return StoreBatch(topic, 0, 0, data, verify(data))

    def retain(self) -> None:
        """Run a round of retention, and the work of the storage service that
        follows.
        """
        self.assembly.retention.tick()
        self.turn()
        for _ in range(12):
            self.storage.tick()
            self.turn()

    def ask(self, name: str, /, **args: object) -> Any:
        replies: list[Any] = []
        self.assembly.calls.ask(name, args, replies.append)
        self.turn()
        [reply] = replies
        return reply

    def bodies(self, topic: str = "t") -> dict[int, bytes]:
        return bodies(self.log.read, self.state, topic)

    def segments(self) -> list[int]:
        return [segment.first for segment in self.log.segments()]

    def close(self) -> None:
        self.log.close()


def bodies(read: Callable[[int, int], bytes], state: State, topic: str) -> dict[int, bytes]:
    """Return the bodies of a partition by offset; every batch is read and checked."""
    topic_id = state.topics[topic].topic_id
    found: dict[int, bytes] = {}
    for key, row in state.entries.range(
        t.ENTRY_KEY.pack(topic_id, 0, 0), t.ENTRY_KEY.pack(topic_id, 1, 0)
    ):
        entry = t.BatchEntry._make(row)
        data = read(entry.position, entry.length)
        verify(data)
        base = t.ENTRY_KEY.unpack(key)[2]
        found |= {base + number: body for number, body in enumerate(BatchView(data).bodies)}
    return found


def letters(read: Callable[[int, int], bytes], state: State) -> dict[int, bytes]:
    """Return the bodies of failed messages by offset."""
    found = {}
    rows: Any = state.tables[t.FAILED].range(b"")
    for key, raw in rows:
        row = FailedMessage(*raw)
        data = read(row.position, row.length)
        verify(data)
        found[t.FAILED_KEY.unpack(key)[3]] = BatchView(data).bodies[row.row]
    return found


def waiting(read: Callable[[int, int], bytes], state: State) -> list[bytes]:
    """Return the delayed messages."""
    found = []
    for one in delayed.scan(state):
        data = read(one.log_position, one.message.length)
        verify(data)
        found += BatchView(data).bodies
    return found


def recount(state: State) -> None:
    """Check that the counters of the state agree with its rows."""
    machine.save(state)
    for topic in state.topics_by_id.values():
        for partition in range(len(topic.end_offsets)):
            low, high = (
                t.ENTRY_KEY.pack(topic.topic_id, number, 0) for number in (partition, partition + 1)
            )
            entries = [t.BatchEntry._make(row) for _key, row in state.entries.range(low, high)]
            assert topic.partition_bytes[partition] == sum(entry.length for entry in entries)
            assert topic.end_offsets[partition] - topic.start_offsets[partition] == sum(
                entry.count for entry in entries
            )
            lowest = log_floor.topic_floor(state, topic)
            assert all(
                e.position >= lowest or state.tables[t.LOG_PINS].get(t.PIN_KEY.pack(e.position))
                for e in entries
            )
