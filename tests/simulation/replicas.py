"""Three brokers that share a log, with engines, logs and tables on disks of their own.

`shared_nodes` has the node alone, and more faults. Here processes crash and stand
still, and the partition is as hostile as there.
"""

from __future__ import annotations

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
from txmq.broker.data_directory.storage import StorageService, open_directory
from txmq.broker.engine.engine import Engine
from txmq.config.broker import BrokerSettings
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic
from txmq.errors import NodeEnded, StoreClosed
from txmq.model.message import Message
from txmq.store.filesystem import RealFileSystem
from txmq.store.log.segment import HEADER_SIZE
from txmq.store.shared import node as node_module
from txmq.store.shared.members import Members
from txmq.store.shared.node import End, Node, State
from txmq.store.shared.records import Genesis, encode
from txmq.store.shared.rules import Place
from txmq.store.shared.stored_place import load_place
from txmq.wire.data_requests import SendReceipt

GENESIS = Genesis(UUID(int=1), 0, HEADER_SIZE, 1_000)
FAULTS_S, SETTLE_S = 20.0, 12.0
FAULT_S = 1.2  # from one fault to the next, on average
SLICE = 100  # most bytes of a slice here, so that a flush takes several
SEGMENT = 6_000
TICK_S, STORE_S, SEND_S = 0.07, 0.3, 0.15


def at_once(function: Callable[..., Any], *args: object) -> Deferred[Any]:
    """Run what a thread would."""
    return execute(function, *args)


class ReplicaMachine:
    """A machine with its disk, and at most one process of a broker."""

    def __init__(self, cluster: Replicas, name: str, data: Path) -> None:
        self.name, self._cluster = name, cluster
        settings = BrokerSettings(data=data, preallocate_bytes=4_096)
        # less than anybody may set, so that a run has many segments and snapshots
        small = {"segment_bytes": SEGMENT, "snapshot_bytes": 3 * SEGMENT}
        self._settings = settings.model_copy(update=small)
        self._process = 0
        self._calls: list[Callable[[], None]] = []
        self.stands_still = self.is_cut_off = False
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

    def start(self) -> None:
        if self.replica is not None:
            return
        self._process += 1
        opened = open_directory(RealFileSystem(), self._settings, 1, lambda: GENESIS)
        self.log, self.tables, self.state = opened[:3]
        self.engine = Engine(
            self.log, self.state, clock=self, now=self._cluster.now, in_thread=at_once
        )
        self.engine.on_failure = self._engine_failed
        members = Members(self.name, self.name, "1", b"of nobody's claim")
        self.replica = Replica(self.engine, self.seconds, members)
        self.replica.on_end = self._ended
        self.replica.leading.addCallback(self._lead).addErrback(self._cluster.failed.append)
        self.engine.replicate = self.replica.replicate
        self._storage = StorageService(
            RealFileSystem(), self.engine, self.tables, self._settings, at_once
        )
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
        for seconds, work in ((TICK_S, self.replica.tick), (STORE_S, self._storage.tick)):
            self._again(seconds, work)

    @property
    def is_leading(self) -> bool:
        node = None if self.replica is None else self.replica.node
        return node is not None and node.state is State.LEADING

    @property
    def place(self) -> Place:
        assert self.replica is not None
        return self.replica.place

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
        if error.args and str(End.DIVERGED) in str(error):  # type: ignore[attr-defined]
            raise InvariantBroken(str(error))
        self._cluster.counts["ended"] += 1
        self._cluster.clock.callLater(0.0, self._restart, self._process)

    def _engine_failed(self, failure: Failure) -> None:
        if not failure.check(NodeEnded, StoreClosed):  # else the node has ended
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
        else:
            self.failed.append(Failure(InvariantBroken(f"the reply to {number} is {reply!r}")))

    def run(self) -> Counter[str]:
        """Run the seed to its end and return its counts. Raises InvariantBroken."""
        with patch.object(node_module, "MOST_DATA", SLICE):
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
        if self.rng.random() < 0.5:
            self.counts["stood still"] += 1
            found.stand_still(self.rng.choice([0.1, 0.6, 1.5, 4.0]))
        else:
            self.counts["crashes"] += 1
            found.stop()
            self.clock.callLater(self.rng.choice([0.01, 0.5, 3.0]), found.start)

    def _end_faults(self) -> None:
        self.topic.trouble = 0.0
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
        settled = [one for one in self.machines if one.log.durable == one.log.end]
        [(end, number)] = Counter(one.log.end for one in settled).most_common(1)
        self.counts["compared"] += number
        same = [one for one in settled if one.log.end == end]
        if any(one.digest() != same[0].digest() for one in same[1:]):
            raise InvariantBroken("two nodes at one place have other rows")
