"""How a node of a cluster ends, and what it does not start with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.error import CannotListenError
from twisted.internet.testing import MemoryReactorClock
from twisted.python.failure import Failure

from tests.broker.support import at_once
from txmq.broker.cluster import kafka_genesis, own_node
from txmq.broker.cluster.kafka_client import KafkaAddress
from txmq.broker.cluster.kafka_partition import LOST
from txmq.broker.cluster.own_node import OwnNode
from txmq.broker.cluster.replica import Replica
from txmq.broker.data_directory.backup_source import StoppedLog
from txmq.broker.data_directory.restore import restore_log, shared_genesis
from txmq.broker.data_directory.storage import OpenedDirectory, open_directory, write_tables
from txmq.broker.engine.engine import Engine
from txmq.broker.service import BrokerService, Lifecycle
from txmq.config.broker import BrokerSettings, ClusterSettings, SettingsFile
from txmq.core import machine
from txmq.errors import (
    ConfigError,
    DiskFull,
    LogUnavailable,
    NodeEnded,
    RestoreUnfinished,
    StoreError,
)
from txmq.model.cluster import ClusterView
from txmq.model.decider import DatabaseId
from txmq.store.backup import back_up
from txmq.store.filesystem import RealFileSystem
from txmq.store.log.segment import HEADER_SIZE, list_segments
from txmq.store.log.writer import Flush
from txmq.store.log_copy import CopyNeeded
from txmq.store.shared.known_nodes import KnownNodes
from txmq.store.shared.node import End
from txmq.store.shared.records import Genesis, Slice, checksum_of, encode
from txmq.store.shared.rules import Place, fold
from txmq.store.shared.slices import segment_bytes
from txmq.store.shared.stored_place import load_place, save_place
from txmq.store.snapshot import newest_snapshot, write_snapshot
from txmq.testing.wait import PATIENCE_S

GENESIS = Genesis(UUID(int=1), 0, HEADER_SIZE, 1_000)
FS = RealFileSystem()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (data := tmp_path / "data").mkdir(mode=0o700)
    return data


class Begins:
    """A partition with a log that begins; `known` is told of places."""

    def __init__(self, known: Callable[[Place], None] = lambda _place: None) -> None:
        self.require_known = known

    def genesis(self) -> Genesis:
        return GENESIS


class Unwatched:
    """An observer of a backup that sees nothing."""

    def begin(self, total: int) -> None: ...

    def passed(self, read: int) -> None: ...


class Threads(MemoryReactorClock):
    """A reactor that makes the calls of threads at once."""

    running = True

    def callFromThread(self, function: Any, *args: object) -> None:  # noqa: N802
        function(*args)


class OneNode:
    """The node of a process whose claim counts at once, and its boot never."""

    def __init__(self) -> None:
        self.flushes: list[Deferred[None]] = []

    def copy_to(self, engine: Engine, _tables: object) -> Any:
        engine.replicate = self._replicate
        return lambda: Place(0, 0, GENESIS.log_id, 0, bytes(16), HEADER_SIZE, HEADER_SIZE)

    def _replicate(self, _flush: Flush) -> Deferred[None]:
        self.flushes.append(Deferred())
        return self.flushes[-1]

    async def follow(self) -> None: ...

    def view(self) -> ClusterView:
        return ClusterView(str(GENESIS.log_id), 0, "n", ())

    def addresses(self) -> tuple[str, ...]:
        return ()

    def forget_before(self, place: Place) -> None: ...

    async def lead(self) -> Place:
        return Place(1, 0, GENESIS.log_id, 1, bytes(16), HEADER_SIZE, HEADER_SIZE)

    async def leave(self) -> None:
        """As where Kafka does not answer."""


def test_a_node_ends_without_an_error_while_its_boot_may_not_count(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, reactor = OneNode(), Threads()  # type: ignore[no-untyped-call]  # Twisted's
    settings = SettingsFile(broker=BrokerSettings(data=data), cluster=ClusterSettings(kafka="k:1"))
    service = BrokerService(settings, reactor)

    def join() -> Any:
        service._cluster = node  # type: ignore[assignment]
        return Begins()

    monkeypatch.setattr(service, "_join_cluster", join)
    service.open()
    Deferred.fromCoroutine(service.start())
    reactor.advance(0)  # the flush of the boot
    assert len(node.flushes) == 1
    service.stop()
    assert (service.life, service.failure) == (Lifecycle.CLOSED, None)
    service._opened.tables.close()
    again = open_directory(FS, settings.broker, 1, Begins())
    assert again.log.end == HEADER_SIZE
    assert again.state.boot_epoch == 0
    again.tables.close()
    again.log.close()


ENDED = """
import os, signal, sys
from twisted.internet.defer import Deferred
import txmq.broker.process as process
from txmq.errors import NodeEnded

ended = NodeEnded("another node leads")
ended.may_follow = True

class Service:
    failure, drained = None, True

    def __init__(self, _settings, reactor, *_given, **_named):
        self.reactor = reactor

    def open(self):
        pass

    async def start(self):
        if {signal_at!r} == "before":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.failure = ended
            self.reactor.stop()
        await Deferred()

    def stop(self):
        if {signal_at!r} == "while it ends":
            os.kill(os.getpid(), signal.SIGTERM)
        self.failure = ended

process.BrokerService = Service
process.os.execv = lambda *_given: sys.exit(3)
process.run(None, ready=print)
"""


@pytest.mark.parametrize(
    ("signal_at", "status"), [("never", 3), ("before", 0), ("while it ends", 0)]
)
def test_a_deposed_node_follows_again_unless_it_was_told_to_end(
    signal_at: str, status: int
) -> None:
    program = ENDED.format(signal_at=signal_at)
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert ended.returncode == status, ended.stderr


def engine_of(opened: OpenedDirectory) -> Engine:
    clock: Any = MemoryReactorClock()
    return Engine(opened.log, opened.state, clock=clock, now=lambda: 5, in_thread=at_once)


class Copy:
    """A node's engine and replica over an empty copy, and what would reach it."""

    def __init__(self, data: Path, directory: Path) -> None:
        self.settings, self._data = BrokerSettings(data=data), str(data)
        opened = open_directory(FS, self.settings, 1, Begins())
        self.log, self.tables = opened.log, opened.tables
        self.engine = engine_of(opened)
        self.failures: list[Failure] = []
        self.engine.on_failure = self.failures.append
        known = KnownNodes("n", "n:1", "1", bytes(16))
        self.replica = Replica(self.engine, lambda: 0.0, known)
        self._leader = directory

    def store(self, place: Place) -> None:
        """Bring tables to disk that stand for the end of the log."""
        save_place(self.tables, place)
        machine.save(self.engine.state)
        write_tables(self.tables, self.log.end, durable=self.log.end)

    def lead(self) -> None:
        """Lead, without anybody who takes what it writes."""
        node: Any = SimpleNamespace(is_resigning=False, append=lambda *_given, **_named: None)
        self.replica.node = node
        self.engine.replicate = self.replica.replicate
        self.replica.leads(Place(2, 0, GENESIS.log_id, 1, bytes(16), HEADER_SIZE, HEADER_SIZE))

    def bytes(self) -> list[bytes]:
        return [Path(found.path).read_bytes() for found in list_segments(FS, self._data)]

    def slice(self) -> Slice:
        """Return what another node wrote first."""
        (data := self._leader / "leader").mkdir(mode=0o700)
        opened = open_directory(FS, BrokerSettings(data=data), 1, Begins())
        engine = engine_of(opened)
        engine.replicate = lambda _flush: Deferred()
        engine.boot("n")
        flush = opened.log.cut()
        assert flush is not None
        [(bytes_, begins)] = segment_bytes(flush, GENESIS.log_id, HEADER_SIZE)
        opened.tables.close()
        opened.log.close()
        end = HEADER_SIZE + len(bytes_)
        return Slice(GENESIS.log_id, 1, b"n" * 16, HEADER_SIZE, end, bytes_, begins)

    def back_up(self, part: Slice, directory: Path) -> Path:
        """Take over a slice, write a snapshot, end, and make a backup."""
        place = Place(2, 5, GENESIS.log_id, 1, part.nonce, part.end, part.end)
        self.replica.counted(part, place)
        self.store(place)
        with self.tables.dump() as (position, rows):
            write_snapshot(FS, self._data, self.log.log_id, position, rows)
        self.close()
        (backup := directory / "backup").mkdir(mode=0o700)
        with closing(StoppedLog(FS, self._data)) as log:
            back_up(FS, log, str(backup), Unwatched())
        return backup

    def close(self) -> None:
        self.tables.close()
        self.log.close()


def test_a_copy_without_space_for_a_record_ends(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Copy(data, tmp_path)
    part = copy.slice()

    def full(*_given: object, **_named: object) -> None:
        raise DiskFull("no space")

    monkeypatch.setattr(copy.log, "write", full)
    place = Place(2, 0, GENESIS.log_id, 1, part.nonce, part.end, part.end)
    copy.replica.counted(part, place)
    copy.replica.counted(part._replace(start=part.end, whole=2 * part.end), place)  # not taken
    assert [failure.type for failure in copy.failures] == [DiskFull]
    copy.close()


def test_a_leader_writes_here_beside_the_reactor(data: Path, tmp_path: Path) -> None:
    copy = Copy(data, tmp_path)
    began: list[Callable[[], object]] = []

    def in_thread(function: Callable[..., Any], *args: object) -> Deferred[Any]:
        began.append(partial(function, *args))
        return Deferred()

    copy.engine._in_thread = in_thread
    copy.lead()
    copy.engine.boot("n")
    copy.engine._flush()
    assert copy.log._writer.end == HEADER_SIZE
    [write] = began
    write()
    assert copy.log._writer.end == copy.log.end > HEADER_SIZE
    copy.close()


def test_a_leader_without_space_for_a_flush_ends(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Copy(data, tmp_path)
    copy.lead()

    def full(*_given: object, **_named: object) -> None:
        copy.log._writer.read_only = True
        raise DiskFull("no space")

    monkeypatch.setattr(copy.log, "write", full)
    copy.engine.boot("n")
    copy.engine._flush()
    assert [failure.type for failure in copy.failures] == [DiskFull]
    copy.close()


def test_a_flush_while_the_leader_resigns_fails_with_its_end(data: Path, tmp_path: Path) -> None:
    copy = Copy(data, tmp_path)
    copy.lead()
    assert copy.replica.node is not None
    copy.replica.node.is_resigning = True
    copy.engine.boot("n")
    copy.engine._flush()
    assert copy.failures == []
    copy.replica.ended(End.RESIGNED, "at offset 3")
    assert [failure.type for failure in copy.failures] == [NodeEnded]
    copy.close()


def test_a_copy_of_another_partition_is_kept_until_an_operator_says_so(
    data: Path, tmp_path: Path
) -> None:
    copy = Copy(data, tmp_path)
    part = copy.slice()
    copy.replica.counted(part, Place(2, 0, GENESIS.log_id, 1, part.nonce, part.end, part.end))
    copy.replica.ended(End.DIVERGED, "it has another record at 2")
    copy.close()
    before = copy.bytes()
    for _ in range(2):
        with pytest.raises(StoreError, match="kept as it is"):
            open_directory(FS, copy.settings, 1, Begins())
    assert copy.bytes() == before
    (data / "diverged").unlink()
    again = open_directory(FS, copy.settings, 1, Begins())
    assert again.log.end == HEADER_SIZE
    again.tables.close()
    again.log.close()


def test_a_copy_is_cut_only_if_the_partition_is_the_one_that_was_read(
    data: Path, tmp_path: Path
) -> None:
    copy = Copy(data, tmp_path)
    part = copy.slice()
    place = Place(2, 7, GENESIS.log_id, 1, part.nonce, part.end, part.end)
    copy.store(place._replace(end=HEADER_SIZE, whole=HEADER_SIZE))
    copy.replica.counted(part, place)
    copy.close()
    before, asked = copy.bytes(), list[Place]()

    def is_another(place: Place) -> None:
        asked.append(place)
        raise StoreError("another topic")

    with pytest.raises(StoreError, match="another topic"):
        open_directory(FS, copy.settings, 1, Begins(is_another))
    assert [(one.offset, one.checksum) for one in asked] == [(2, 7)]
    assert copy.bytes() == before


def flip(data: Path, position: int) -> None:
    """Change a byte of a log of one segment."""
    [segment] = list_segments(FS, str(data))
    changed = bytearray(Path(segment.path).read_bytes())
    changed[position - segment.first] ^= 1
    Path(segment.path).write_bytes(changed)


def test_a_damaged_copy_goes_back_to_its_snapshot(data: Path, tmp_path: Path) -> None:
    copy = Copy(data, tmp_path)
    part = copy.slice()
    copy.store(Place(1, 0, GENESIS.log_id, 0, bytes(16), HEADER_SIZE, HEADER_SIZE))
    with copy.tables.dump() as (position, rows):
        write_snapshot(FS, str(data), copy.log.log_id, position, rows)
    place = Place(2, 0, GENESIS.log_id, 1, part.nonce, part.end, part.end)
    copy.replica.counted(part, place)
    copy.store(place)
    copy.close()
    flip(data, part.end - 1)
    known: list[Place] = []
    again = open_directory(FS, copy.settings, 1, Begins(known.append))
    assert again.log.end == again.tables.position == HEADER_SIZE
    assert [one.offset for one in known] == [2, 1]
    again.tables.close()
    again.log.close()


class Nowhere(Begins):
    """A partition that has forgotten how its log begins, or what a node would read."""

    def __init__(self) -> None:
        def forgotten(place: Place) -> None:
            raise CopyNeeded("it begins later", keep=place.whole)

        super().__init__(forgotten)

    def genesis(self) -> Genesis:
        raise CopyNeeded("its beginning was removed")


def test_a_node_that_lacks_what_the_partition_has_forgotten_needs_a_copy(
    data: Path, tmp_path: Path
) -> None:
    (empty := tmp_path / "empty").mkdir(mode=0o700)
    copy = Copy(data, tmp_path)
    part = copy.slice()
    place = Place(2, 5, GENESIS.log_id, 1, part.nonce, part.end, part.end)
    copy.back_up(part, tmp_path)
    before = copy.bytes()
    for directory, keep in ((data, place.whole), (empty, 0)):
        with pytest.raises(CopyNeeded) as needed:
            open_directory(FS, BrokerSettings(data=directory), 1, Nowhere())
        assert needed.value.keep == keep
    assert copy.bytes() == before


def test_a_copy_that_has_not_finished_goes_on(data: Path) -> None:
    (data / "copying").touch()
    with pytest.raises(CopyNeeded, match="has not finished"):
        open_directory(FS, BrokerSettings(data=data), 1, Begins())
    with pytest.raises(RestoreUnfinished):
        open_directory(FS, BrokerSettings(data=data), 1)


def test_a_restored_log_goes_on_in_a_partition_of_its_own(data: Path, tmp_path: Path) -> None:
    copy = Copy(data, tmp_path)
    backup = copy.back_up(copy.slice(), tmp_path)
    (new := tmp_path / "new").mkdir(mode=0o700)
    settings = BrokerSettings(data=new)
    restore_log(FS, backup, settings, Unwatched(), is_shared=True)
    genesis = shared_genesis(FS, new)
    assert genesis is not None
    assert genesis.log_id == GENESIS.log_id
    assert genesis == shared_genesis(FS, new)
    known: list[Place] = []
    begun = open_directory(FS, settings, 1, Begins(known.append))
    assert known == [load_place(begun.tables)]
    assert known[0] == fold(Place(), 0, checksum_of(encode(genesis)), genesis)[0]
    assert (begun.log.end, begun.state.boot_epoch) == (genesis.start, genesis.epoch)
    assert len(begun.state.restores) == 1
    assert newest_snapshot(FS, str(new), GENESIS.log_id) is not None
    begun.tables.close()
    begun.log.close()
    with pytest.raises(StoreError, match="a copy of a cluster's log"):
        open_directory(FS, settings, 1)
    assert shared_genesis(FS, data) is None  # a node's that has read more

    (empty := tmp_path / "empty").mkdir(mode=0o700)
    begins: Any = SimpleNamespace(genesis=lambda: genesis)
    with pytest.raises(CopyNeeded, match="restored from a backup"):
        open_directory(FS, BrokerSettings(data=empty), 1, begins)


def test_databases_wait_for_an_operator_where_the_log_of_a_cluster_was_restored(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Copy(data, tmp_path)
    backup = copy.back_up(copy.slice(), tmp_path)
    (new := tmp_path / "new").mkdir(mode=0o700)
    restored = restore_log(FS, backup, BrokerSettings(data=new), Unwatched(), is_shared=True)
    leases = []
    for directory in (data, new):
        broker, cluster = BrokerSettings(data=directory), ClusterSettings(kafka="k:1")
        service = BrokerService(SettingsFile(broker=broker, cluster=cluster), Threads())  # type: ignore[no-untyped-call]

        def join(service: Any = service) -> Any:
            service._cluster = OneNode()
            return Begins()

        monkeypatch.setattr(service, "_join_cluster", join)
        service.open()
        leases.append(service._make_resolvers().lease_of(DatabaseId(1, 1)).directory)
        service.stop()
        service._opened.tables.close()
    # the database knows the first one, and takes another from nobody but an operator
    assert leases == [GENESIS.log_id, restored.incarnation]


def test_the_longest_copy_of_a_lost_cluster_is_restored_as_a_broker_alone(
    data: Path, tmp_path: Path
) -> None:
    copy = Copy(data, tmp_path)
    part = copy.slice()
    backup = copy.back_up(part, tmp_path)
    (new := tmp_path / "new").mkdir(mode=0o700)
    settings = BrokerSettings(data=new)
    restore_log(FS, backup, settings, Unwatched())
    alone = open_directory(FS, settings, 1)
    assert len(alone.state.restores) == 1
    assert alone.log.end > part.end
    assert load_place(alone.tables) is None
    alone.tables.close()
    alone.log.close()


def test_a_damaged_copy_without_a_snapshot_begins_anew_or_needs_another_one(
    data: Path, tmp_path: Path
) -> None:
    copy = Copy(data, tmp_path)
    part = copy.slice()
    place = Place(2, 0, GENESIS.log_id, 1, part.nonce, part.end, part.end)
    copy.replica.counted(part, place)
    copy.store(place)
    copy.close()
    flip(data, part.end - 1)
    known: Any = SimpleNamespace(require_known=lambda _place: None, genesis=Nowhere().genesis)
    with pytest.raises(CopyNeeded, match="damaged at position") as needed:
        open_directory(FS, copy.settings, 1, known)
    assert needed.value.keep == part.end
    # Nobody need lead for that: all copies may be damaged.
    again = open_directory(FS, copy.settings, 1, Begins())
    assert (again.log.end, again.tables.position) == (HEADER_SIZE, 0)
    assert again.log.log_id == GENESIS.log_id
    again.tables.close()
    again.log.close()


def test_a_copy_that_is_not_what_counts_leads_nothing(data: Path, tmp_path: Path) -> None:
    copy = Copy(data, tmp_path)
    copy.replica.leads(Place(2, 0, GENESIS.log_id, 1, bytes(16), 500, 500))
    assert not copy.replica.leading.called
    assert [failure.type for failure in copy.failures] == [StoreError]
    copy.close()


def test_the_log_of_a_broker_alone_is_not_cut(data: Path) -> None:
    settings = BrokerSettings(data=data)
    alone = open_directory(FS, settings, 1)
    engine = engine_of(alone)
    engine.boot("n")
    alone.tables.close()
    alone.log.close()
    before = [Path(found.path).read_bytes() for found in list_segments(FS, str(data))]
    with pytest.raises(StoreError, match="not the cluster's"):
        open_directory(FS, settings, 1, Begins())
    assert [Path(found.path).read_bytes() for found in list_segments(FS, str(data))] == before


class Taken(Threads):
    """A reactor on a machine whose addresses are all in use."""

    def listenTCP(self, port: int, *_given: object, **_named: object) -> Any:  # noqa: N802
        raise CannotListenError("127.0.0.1", port, OSError("in use"))


@pytest.mark.parametrize(
    ("listen", "reactor", "error"),
    [("0.0.0.0:0", Threads, ConfigError), ("127.0.0.1:7", Taken, CannotListenError)],
)
def test_a_follower_that_could_not_serve_says_so_before_it_leads(
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    listen: str,
    reactor: type[Threads],
    error: type[Exception],
) -> None:
    broker = BrokerSettings(data=data, listen=listen)
    cluster = ClusterSettings(kafka="k:1", advertise="n:1")
    service = BrokerService(SettingsFile(broker=broker, cluster=cluster), reactor())
    node = OneNode()

    def join() -> Any:
        service._cluster = node  # type: ignore[assignment]
        return Begins()

    monkeypatch.setattr(service, "_join_cluster", join)
    service.open()
    failures: list[Failure] = []
    Deferred.fromCoroutine(service.start()).addErrback(failures.append)
    assert [failure.type for failure in failures] == [error]
    assert node.flushes == []  # it has not booted
    service.stop()


def test_a_node_waits_for_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Exception | None] = [LogUnavailable("away"), LogUnavailable("away"), None]

    def check(*_given: object) -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    monkeypatch.setattr(own_node, "check", check)
    monkeypatch.setattr(own_node, "RETRY_S", 0.0)
    settings, reactor = ClusterSettings(kafka="k:1"), MemoryReactorClock()
    OwnNode(settings, "n", "n:1", reactor, lambda _failure: None)
    assert not answers


def test_a_partition_whose_beginning_was_removed_needs_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Removed:
        def code(self) -> int:
            return LOST[0]

    class Reader:
        def assign(self, _places: object) -> None: ...
        def close(self) -> None: ...
        def error(self) -> Removed:
            return Removed()

        def poll(self, _seconds: float) -> Reader:
            return self

        def get_watermark_offsets(self, _place: object, timeout: float) -> tuple[int, int]:
            del timeout
            return 5, 9

    monkeypatch.setattr(KafkaAddress, "client", lambda *_given: Reader())
    monkeypatch.setattr(kafka_genesis, "WITHIN_S", 0.5)
    with pytest.raises(CopyNeeded, match="whose beginning was removed"):
        kafka_genesis.read_genesis(KafkaAddress("k:1"), "log")
    with pytest.raises(CopyNeeded, match="begins behind offset 3") as needed:
        kafka_genesis.require_known(KafkaAddress("k:1"), "log", Place(3, whole=128))
    assert needed.value.keep == 128
