"""Three brokers that share a log, with engines, logs and tables on disks of their own.

`shared_nodes` has the node alone. Here processes crash and stand still, disks are slow,
full, damaged and lost, and the partition is as hostile as there. Retention removes
segments everywhere, and the leader has the partition forget what nobody needs.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch
from uuid import UUID

from twisted.internet.defer import Deferred, execute
from twisted.python.failure import Failure

from tests.simulation.clock import SimulatedClock
from tests.simulation.history import InvariantBroken
from tests.simulation.shared_partition import SimulatedPartition, Topic
from txmq.batch import encode_one, verify
from txmq.broker.cluster.replica import Replica
from txmq.broker.data_directory.retention_service import RetentionService
from txmq.broker.data_directory.storage import StorageService, open_directory
from txmq.broker.engine.engine import Engine
from txmq.config.broker import BrokerSettings, RetentionSettings
from txmq.core.retention.log_floor import topic_floor
from txmq.core.state import log_pins
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic
from txmq.errors import (
    BrokerUnavailable,
    DiskFull,
    NodeEnded,
    ReadOnly,
    RequestRejected,
    StoreClosed,
)
from txmq.model.message import Message
from txmq.store.backup import LogExtent
from txmq.store.filesystem import ReadableFile, RealFileSystem
from txmq.store.log.log import lock_directory
from txmq.store.log.segment import HEADER_SIZE, list_segments
from txmq.store.log_copy import CopyNeeded, ForeignCopy, copy_log
from txmq.store.shared import node as node_module
from txmq.store.shared.known_nodes import KnownNodes
from txmq.store.shared.node import End, Node, State
from txmq.store.shared.records import Genesis, checksum_of, encode
from txmq.store.shared.rules import Place
from txmq.store.shared.stored_place import load_place
from txmq.store.snapshot import snapshot_positions
from txmq.wire.data_requests import SendReceipt

GENESIS = Genesis(UUID(int=1), 0, HEADER_SIZE, 1_000)
FAULTS_S, SETTLE_S = 20.0, 12.0
FAULT_S = 1.2  # from one fault to the next, on average
SLICE = 100  # most bytes of a slice here, so that a flush takes several
SEGMENT = 6_000
KEPT = 2 * SEGMENT  # bytes of messages
SLACK = 500  # bytes of log that are new
TICK_S, STORE_S, SEND_S, RETENTION_S = 0.07, 0.3, 0.15, 1.0
DISK_S, SLOW_S = 0.002, 1.0  # of a call that blocks
AGAIN_S = 0.5  # until a process that ended by an error is started again
FS = RealFileSystem()


class ReplicaMachine:
    """A machine with its disk, and at most one process of a broker."""

    def __init__(self, cluster: Replicas, name: str, data: Path) -> None:
        self.name, self._cluster = name, cluster
        settings = BrokerSettings(data=data, preallocate_bytes=4_096)
        # less than anybody may set, so that a run has many segments and snapshots
        small = {"segment_bytes": SEGMENT, "snapshot_bytes": 3 * SEGMENT}
        self._settings = settings.model_copy(update=small)
        self.data = data
        self._process = 0
        self._calls: list[Callable[[], None]] = []
        self.stands_still = self.is_cut_off = self.is_full = self.is_slow = False
        self.replica: Replica | None = None

    # as the clock and the machine of its process

    def seconds(self) -> float:
        return self._cluster.clock.seconds()

    def callLater(self, delay: float, function: Callable[..., Any], *args: object) -> Any:
        process = self._process

        def call() -> None:
            if process == self._process and self.replica is not None:
                function(*args)

        return self._cluster.clock.callLater(delay, self.when_awake, call)

    def when_awake(self, call: Callable[[], None]) -> None:
        if self.stands_still:
            self._calls.append(call)
        else:
            call()

    def stand_still(self, seconds: float) -> None:
        self.stands_still = True
        self._cluster.clock.callLater(seconds, self._wake)

    def _wake(self) -> None:
        self.stands_still = False
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    def in_thread(self, function: Callable[..., Any], *args: object) -> Deferred[Any]:
        """Run what a thread would."""
        if not self._cluster.topic.trouble:
            return execute(function, *args)
        done: Deferred[Any] = Deferred()
        slow_s = SLOW_S if self.is_slow else DISK_S
        delay = self._cluster.rng.expovariate(1 / slow_s)
        self.callLater(delay, lambda: execute(function, *args).chainDeferred(done))
        return done

    # as the partition, to the start of a node

    def genesis(self) -> Genesis:
        if self._cluster.topic.first:
            raise CopyNeeded("the beginning was forgotten")
        return GENESIS

    def require_known(self, place: Place) -> None:
        if place.offset < self._cluster.topic.first:
            raise CopyNeeded("what comes next was forgotten", keep=place.whole)
        for offset, data in self._cluster.topic.records:
            if offset == place.offset:
                assert checksum_of(data) == place.checksum

    def start(self) -> None:
        if self.replica is not None:
            return
        self._process += 1
        try:
            opened = open_directory(FS, self._settings, 1, self)
        except CopyNeeded as needed:
            if not self._copy(needed.keep):
                self._cluster.clock.callLater(AGAIN_S, self.start)
                return
            opened = open_directory(FS, self._settings, 1, self)
        self.log, self.tables, self.state = opened[:3]
        self._fill_disk()
        self.engine = Engine(
            self.log, self.state, clock=self, now=self._cluster.now, in_thread=self.in_thread
        )
        self.engine.on_failure = self._engine_failed
        known = KnownNodes(self.name, self.name, "1", b"of nobody's claim")
        self.replica = Replica(self.engine, self.seconds, known)
        self.replica.on_end = self._ended
        self.replica.leading.addCallback(self._lead).addErrback(self._cluster.failed.append)
        self.engine.replicate = self.replica.replicate
        self._storage = StorageService(FS, self.engine, self.tables, self._settings, self.in_thread)
        self._storage.place = lambda: self.place
        self.partition = SimulatedPartition(self._cluster.topic, self)
        rng = self._cluster.rng
        node = Node(
            self.partition,
            self.replica,
            load_place(self.tables) or Place(),
            name=self.name,
            nonce=rng.randbytes(16),
            rng=rng,
            now=self.seconds(),
        )
        self.replica.follow(node)
        for seconds, work in (
            (TICK_S, self.replica.tick),
            (STORE_S, self._storage.tick),
            (RETENTION_S, self._find_needless),
        ):
            self._again(seconds, work)
        self._retain(decides=False)

    def _copy(self, keep: int) -> bool:
        """Copy the log of a node that leads; return False where the copy ends early."""
        leaders = [one for one in self._cluster.machines if one.is_leading]
        if not leaders:
            return False
        source = LeadersLog(max(leaders, key=lambda one: one.place.epoch), self._cluster.rng)
        lock = lock_directory(FS, str(self.data))
        try:
            copy_log(FS, source, str(self.data), source, keep)
        except BrokerUnavailable:
            self._cluster.counts["copies interrupted"] += 1
            return False
        except ForeignCopy:  # of a leader that does not know yet that it was deposed
            return False
        finally:
            lock.release()
        self._cluster.counts["copied" if keep else "copied from nothing"] += 1
        return True

    def _find_needless(self) -> None:
        self._retention.tick()

    def _retain(self, *, decides: bool) -> None:
        settings = RetentionSettings(hours=0, bytes=KEPT)
        self._retention = RetentionService(self.engine, settings, self, decides=decides)
        self._storage.remove_segments(self._retention, "")

    @property
    def is_leading(self) -> bool:
        node = None if self.replica is None else self.replica.node
        return node is not None and node.state is State.LEADING

    @property
    def place(self) -> Place:
        assert self.replica is not None
        return self.replica.place

    def _fill_disk(self) -> None:
        """Have the log find no space while the disk is full."""
        writer, process = self.log._writer, self._process
        extend = writer._extend

        def extend_unless_full(size: int) -> None:
            if self.is_full and process == self._process:
                writer._making_room = True
                raise DiskFull("no space")
            extend(size)

        writer._extend = extend_unless_full  # type: ignore[method-assign]

    def fill_disk(self, seconds: float) -> None:
        self.is_full = True
        self._cluster.clock.callLater(seconds, setattr, self, "is_full", False)

    def refuse_writes(self, _seconds: float) -> None:
        """Have little space, until the process has ended."""
        self.engine.disk.refusing = True

    def slow_disk(self, seconds: float) -> None:
        self.is_slow = True
        self._cluster.clock.callLater(seconds, setattr, self, "is_slow", False)

    def lose_index(self) -> None:
        """Lose the tables, of which there may be a snapshot."""
        shutil.rmtree(self.data / "index")

    def cut_power(self) -> None:
        """Lose what was written without a sync, in part."""
        rng = self._cluster.rng
        for segment in list_segments(FS, str(self.data)):
            path, begin = Path(segment.path), max(self.tables.position - segment.first, HEADER_SIZE)
            if begin < (size := path.stat().st_size):
                at = rng.randrange(begin, size)
                lost = rng.randrange(size - at)
                path.write_bytes(path.read_bytes()[:at] + bytes(lost))

    def damage_disk(self) -> None:
        """Change a byte of what the tables stand for."""
        segments = list_segments(FS, str(self.data))
        position = max(self.tables.position - self._cluster.rng.randrange(1, 200), HEADER_SIZE)
        for segment in segments:
            path, at = Path(segment.path), position - segment.first
            if 0 <= at < path.stat().st_size:
                data = bytearray(path.read_bytes())
                data[at] ^= 1
                path.write_bytes(data)

    def lose_disk(self) -> None:
        """Begin with an empty directory."""
        shutil.rmtree(self.data)
        self.data.mkdir(mode=0o700)

    def end(self, _seconds: float) -> None:
        """End the process as SIGTERM does."""
        assert self.replica is not None
        assert self.replica.node is not None
        self.replica.node.step_down(self.seconds())
        self.callLater(0.5, self._end)

    def _end(self) -> None:
        is_idle = self.log.end == self.log.durable and not self._storage.busy
        if self.engine.failed is None and is_idle:
            self._cluster.counts["ended in order"] += 1
            self._storage.close()
        self.stop()
        self._cluster.clock.callLater(0.3, self.start)

    def stop(self) -> None:
        """End the process as SIGKILL does."""
        self.partition.close()
        self.replica = None
        self.log.close()
        self.tables.close()

    def digest(self) -> dict[str, object]:
        """Return all rows, but for the places in the partition."""
        for _ in range(10):  # what is frozen, and then the rest
            self._storage.tick()
        assert self.tables.position == self.log.end
        with self.tables.dump() as (_position, rows):
            return {f"{table} {key!r}": row for table, key, row in rows if key != b"place"}

    def _again(self, seconds: float, work: Callable[[], None]) -> None:
        def again() -> None:
            work()
            self._again(seconds, work)

        self.callLater(seconds, again)

    def _ended(self, error: object) -> None:
        assert self.replica is not None
        if str(End.DIVERGED) in str(error) or str(End.FORGOTTEN) in str(error):
            raise InvariantBroken(str(error))
        self._cluster.counts["ended"] += 1
        again_s = 0.0 if isinstance(error, NodeEnded) and error.may_follow else AGAIN_S
        self._cluster.clock.callLater(again_s, self._restart, self._process)

    def _engine_failed(self, failure: Failure) -> None:
        if failure.check(DiskFull):
            self._ended(failure.value)
            assert self.replica is not None
            assert self.replica.node is not None
            self.replica.node.step_down(self.seconds())
        elif not failure.check(NodeEnded, StoreClosed):  # else the node has ended
            self._cluster.failed.append(failure)

    def _restart(self, process: int) -> None:
        if process == self._process and self.replica is not None:
            self.stop()
            self.start()

    def _lead(self, place: Place) -> None:
        self._cluster.counts["leaders"] += 1
        self.state.boot_epoch = place.epoch - 1
        self.engine.boot(self.name)
        self.engine.submit(CreateTopic("t", 1), lambda _reply: None)
        self._again(SEND_S, self._send)
        self._retain(decides=True)
        self._storage.forget_before = self._forget_before

    def _forget_before(self, place: Place) -> None:
        self._cluster.counts["partition forgot"] += 1
        if self._cluster.counts["partition forgot"] == 1:
            self._cluster.clock.callLater(AGAIN_S, self._cluster.lose_a_disk)
        self.partition.forget_before(place.offset)

    def _send(self) -> None:
        number = self._cluster.next_number()
        batch = encode_one(
            Message(bytes(self._cluster.rng.randrange(900))),
            producer_id=number.to_bytes(16, "big"),  # an earlier leader's message may be away
            epoch=0,
            sequence=0,
            born_at=1,
        )
        topic_epoch = self.state.topics["t"].epoch
        command = StoreBatch("t", topic_epoch, 0, batch, verify(batch))
        self.engine.submit(command, partial(self._cluster.note, number))


class LeadersLog:
    """The log of a machine that leads, read by another one; it may end meanwhile."""

    def __init__(self, machine_: ReplicaMachine, rng: Random) -> None:
        self._log, self._data = machine_.log, str(machine_.data)
        self._left = rng.choice([1, 3, 1_000_000])  # reads

    def hold(self, position: int) -> LogExtent:
        del position
        log = self._log
        firsts = tuple(segment.first for segment in log.segments())
        snapshots = [at for at in snapshot_positions(FS, self._data) if at <= log.durable]
        return LogExtent(GENESIS.log_id, None, firsts, log.durable, tuple(snapshots), 1)

    def keep_holding(self, position: int) -> None:
        del position
        self._left -= 1
        if not self._left:
            raise BrokerUnavailable("it has ended")

    def open(self, name: str) -> ReadableFile:
        return FS.open(f"{self._data}/{name}")

    def begin(self, total: int) -> None: ...

    def passed(self, read: int) -> None: ...


# What happens to the disk of a process that was killed.
ON_DISK: dict[str, Callable[[ReplicaMachine], None]] = {
    "crashes": lambda _machine: None,
    "power cuts": ReplicaMachine.cut_power,
    "lost indexes": ReplicaMachine.lose_index,
    "damage": ReplicaMachine.damage_disk,
    "lost disks": ReplicaMachine.lose_disk,
}
WHILE_IT_RUNS: dict[str, Callable[[ReplicaMachine, float], None]] = {
    "stood still": ReplicaMachine.stand_still,
    "full disks": ReplicaMachine.fill_disk,
    "little space": ReplicaMachine.refuse_writes,
    "slow disks": ReplicaMachine.slow_disk,
    "ends": ReplicaMachine.end,
}
FAULTS = (*("stood still", "crashes") * 3, *ON_DISK, *WHILE_IT_RUNS)


class Replicas:
    """The run of one seed."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng, self.clock = Random(seed), SimulatedClock()
        self.topic = Topic(self.clock, self.rng)
        self.counts: Counter[str] = self.topic.counts
        self.receipts: dict[int, int] = {}  # offsets, by the number of the message
        self.failed: list[Failure] = []
        self._numbers = 0
        self.machines = []
        for number in range(3):
            (data := directory / f"n{number}").mkdir(mode=0o700)
            self.machines.append(ReplicaMachine(self, f"n{number}", data))

    def now(self) -> int:
        return 1_000 + int(self.clock.seconds() * 1_000_000)

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def note(self, number: int, reply: object) -> None:
        if isinstance(reply, SendReceipt):
            self.receipts[number] = reply.offset
        elif not isinstance(reply, RequestRejected) or type(reply) is not ReadOnly:
            self.failed.append(Failure(InvariantBroken(f"the reply to {number} is {reply!r}")))

    def run(self) -> Counter[str]:
        """Run the seed to its end and return its counts. Raises InvariantBroken."""
        slices = patch.object(node_module, "MOST_DATA", SLICE)
        with slices, patch.object(log_pins, "SLACK_BYTES", SLACK):
            return self._run()

    def _run(self) -> Counter[str]:
        self.topic.append(encode(GENESIS))
        for machine_ in self.machines:
            self.clock.callLater(self.rng.uniform(0, 1), machine_.start)
        self._fault_later()
        self.clock.callLater(FAULTS_S, self._end_faults)
        while self.clock.seconds() < FAULTS_S + SETTLE_S:
            self.clock.next()
            for failure in self.failed:
                failure.raiseException()
        # One that needed a copy may not have had the time for it.
        self.machines = [one for one in self.machines if one.replica is not None]
        self._check()
        for machine_ in self.machines:
            machine_.stop()
        return self.counts

    def _fault_later(self) -> None:
        self.clock.callLater(self.rng.expovariate(1 / FAULT_S), self._fault)

    def _fault(self) -> None:
        if not self.topic.trouble:
            return
        self._fault_later()
        leaders = [one for one in self.machines if one.is_leading]
        found = self.rng.choice(leaders if leaders and self.rng.random() < 0.5 else self.machines)
        if found.replica is None or found.stands_still:
            return
        fault = self.rng.choice(FAULTS)
        self.counts[fault] += 1
        seconds = self.rng.choice([0.1, 0.6, 1.5, 4.0])
        if fault in ON_DISK:
            found.stop()
            ON_DISK[fault](found)
            self.clock.callLater(seconds, found.start)
        else:
            WHILE_IT_RUNS[fault](found, seconds)

    def lose_a_disk(self) -> None:
        """Have a node that follows need a copy."""
        found = next((one for one in self.machines if one.replica and not one.is_leading), None)
        if found is not None and not found.stands_still:
            found.stop()
            found.lose_disk()
            self.clock.callLater(AGAIN_S, found.start)

    def _end_faults(self) -> None:
        self.topic.trouble = 0.0
        for machine_ in self.machines:
            machine_.engine.disk.refusing = False
        self.settled_at = len(self.receipts)

    def _check(self) -> None:
        if len(self.receipts) == self.settled_at:
            raise InvariantBroken(f"no send was answered in {SETTLE_S} s without faults")
        leader = max(self.machines, key=lambda one: one.log.end)
        bodies = leader.state.topics["t"].end_offsets[0]
        if sorted(self.receipts.values()) != sorted(set(self.receipts.values())):
            raise InvariantBroken("two messages have one offset")
        if max(self.receipts.values()) >= bodies:
            raise InvariantBroken("a message that was answered is away")
        for machine_ in self.machines:
            needed = topic_floor(machine_.state, machine_.state.topics["t"])
            if machine_.log.first > needed:
                raise InvariantBroken(f"{machine_.name} has removed what it needs from {needed} on")
        settled = [one for one in self.machines if one.log.durable == one.log.end]
        [(end, number)] = Counter(one.log.end for one in settled).most_common(1)
        self.counts["compared"] += number
        same = [one for one in settled if one.log.end == end]
        if any(one.digest() != same[0].digest() for one in same[1:]):
            raise InvariantBroken("two nodes at one place have other rows")
