"""The simulation of one seed of a shared log: three nodes, each with a copy of it.

Machines stand still, crash and lose what their copy had not stored; their clocks go at
rates of their own; operators order claims and step-downs. `check` has what must hold.
With `says` nodes say what they are, between all of that, and know one another at
the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import NamedTuple
from unittest.mock import patch
from uuid import UUID

from tests.simulation.clock import SimulatedClock
from tests.simulation.history import InvariantBroken
from tests.simulation.shared_partition import SimulatedPartition, Topic
from txmq.store.shared import known_nodes, rules
from txmq.store.shared import node as node_module
from txmq.store.shared.known_nodes import KnownNodes
from txmq.store.shared.node import End, Node, State
from txmq.store.shared.records import (
    Claim,
    Genesis,
    NodeStatus,
    PartitionRecord,
    Slice,
    checksum_of,
    decode,
    encode,
)
from txmq.store.shared.rules import Place

NODES = 3
LOG_ID = UUID(int=1)
START = 1_000
FAULTS_S, SETTLE_S = 20.0, 12.0
FAULT_S = 3.0  # from one fault of each kind to the next, on average
TICK_S = 0.07
SLOWEST, FASTEST = 0.92, 1.08  # what chrony makes of a clock
SLICE = 16  # most bytes of a slice here, so that an append takes several
SAYS_EVERY_S = 1.2  # less than the silence after which nodes claim
STEPS = 100_000
# A leader that is cut off ends after the longest patience, by the slowest clock.
ALONE_S = 1.6 * 1.5 / SLOWEST + 2 * TICK_S * 1.2


class Copy(NamedTuple):
    """What a machine's disk has of the log: its bytes from START to `place.end`."""

    place: Place = Place()
    data: bytes = b""


class SimulatedMachine:
    """A machine with its clock, its disk, and at most one process with a node."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        rng = cluster.rng
        self.name, self._cluster = name, cluster
        self._rate, self._offset = rng.uniform(SLOWEST, FASTEST), rng.uniform(0, 1e6)
        self._stored = Copy()
        self._calls: list[Callable[[], None]] = []
        self._process = 0
        self.stands_still = self.is_cut_off = self.resigns = False
        self.is_alone_since = 0.0  # awake, and cut off from the partition
        self.node: Node | None = None
        self.partition: SimulatedPartition | None = None
        self.log = bytearray()
        self.confirmed_to = START

    def now(self) -> float:
        return self._offset + self._rate * self._cluster.clock.seconds()

    def when_awake(self, call: Callable[[], None]) -> None:
        if self.stands_still:
            self._calls.append(call)
        else:
            call()

    def start(self) -> None:
        cluster = self._cluster
        self._process += 1
        self.resigns = False
        if self._stored.place.offset < 0 and cluster.topic.first:
            self._stored = cluster.a_copy()
        place, data = self._stored
        self.log, self.confirmed_to = bytearray(data), START
        self.partition = SimulatedPartition(cluster.topic, self)
        nonce = cluster.rng.randbytes(16)
        self.known = KnownNodes(self.name, f"{self.name}:1", "1", nonce)
        self.node = Node(
            self.partition,
            self,
            place,
            name=self.name,
            nonce=nonce,
            rng=cluster.rng,
            now=self.now(),
        )
        self.node.start()
        for work in (self._tick, self._store, self._append):
            self._go_on(work, self._process)

    def stop(self) -> None:
        """End the process: what it had not stored is away."""
        if self.partition is not None:
            self.partition.close()
        self.node = self.partition = None

    def stand_still(self, seconds: float) -> None:
        self.stands_still = True
        self._cluster.clock.callLater(seconds, self._wake)

    def cut_off(self, *, is_cut_off: bool) -> None:
        self.is_cut_off = is_cut_off
        self.is_alone_since = self._cluster.clock.seconds()

    def _wake(self) -> None:
        self.stands_still = False
        self.is_alone_since = self._cluster.clock.seconds()
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    def _go_on(self, work: Callable[[Node], float], process: int) -> None:
        """Do work of the process now, and again after the seconds that it returns."""

        def at_work() -> None:
            if process == self._process and self.node is not None:
                delay = work(self.node)
                self._cluster.clock.callLater(delay, self._go_on, work, process)

        self.when_awake(at_work)

    def _tick(self, node: Node) -> float:
        node.tick(self.now())
        is_in = self._cluster.says and node.has_caught_up and node.state is not State.ENDED
        if is_in and self.known.is_due(self.now()):
            self._say(node)
        return TICK_S * self._cluster.rng.uniform(0.8, 1.2)

    def _say(self, node: Node) -> None:
        assert self.partition is not None
        known = self.known

        def reported(error: Exception | None, _offset: int | None) -> None:
            if error is not None:
                known.note_lost()

        said = known.say(node.place, self.now())
        self._cluster.counts["said"] += 1
        self.partition.produce(encode(said), reported)

    def _store(self, node: Node) -> float:
        data = bytes(self.log[: node.place.end - START])
        self._stored = Copy(node.place, data)
        return self._cluster.rng.uniform(0.0, 2.0)

    def _append(self, node: Node) -> float:
        rng = self._cluster.rng
        if node.state is State.LEADING and not self.resigns:
            self._write(node, rng.randbytes(rng.choice([1, 7, 15, 40])))
        return rng.choice([0.0, 0.01, 0.1, 0.6])

    def _write(self, node: Node, data: bytes) -> None:
        self.log += data
        node.append(data, self.now(), begins_segment=self._cluster.rng.random() < 0.1)

    # what the node tells

    def counted(self, record: PartitionRecord, place: Place) -> None:
        if isinstance(record, Slice):
            self.log += record.data
        elif isinstance(record, Claim):
            del self.log[place.end - START :]
        self._cluster.check_copy(place, bytes(self.log))

    def heard(self, said: NodeStatus, place: Place, *, is_history: bool) -> None:
        self.known.hear(said, place, self.now(), is_history=is_history)

    def leads(self, place: Place) -> None:
        self._cluster.counts["leaders"] += 1
        self._cluster.check_copy(place, bytes(self.log))
        self.confirmed_to = place.end
        assert self.node is not None
        self._write(self.node, f"<booted {place.epoch}>".encode())

    def confirmed(self, position: int) -> None:
        self.confirmed_to = position
        self._cluster.note_confirmed(bytes(self.log[: position - START]))

    def ended(self, end: End, detail: str) -> None:
        cluster = self._cluster
        cluster.counts[end.name.lower()] += 1
        if end in (End.DIVERGED, End.UNSUPPORTED):
            raise InvariantBroken(f"{self.name} {end}: {detail}")
        self.stop()
        if end is End.FORGOTTEN:
            self._stored = cluster.a_copy()
        cluster.clock.callLater(cluster.rng.uniform(0.0, 0.5), self.restart)

    def restart(self) -> None:
        if self.node is None:
            self.start()


class Cluster:
    """The run of one seed; `plant` may add a fault that no rule survives."""

    def __init__(
        self, seed: int, plant: Callable[[Cluster], None] | None = None, *, says: bool = False
    ) -> None:
        self.says = says
        self.rng, self.clock = Random(seed), SimulatedClock()
        self.topic = Topic(self.clock, self.rng)
        self.counts: Counter[str] = self.topic.counts
        self.machines = [SimulatedMachine(self, f"n{number}") for number in range(NODES)]
        self._confirmed = b""
        self._places: dict[int, tuple[Place, int]] = {-1: (Place(), 0)}
        self._log = bytearray()
        self._place, self._folded = Place(), 0
        self._versions: list[bytes] = [b""]
        self._settled_at = 0
        self.order_s = FAULT_S
        if plant is not None:
            plant(self)

    def run(self) -> Counter[str]:
        """Run the seed to its end and return its counts. Raises InvariantBroken."""
        with (
            patch.object(node_module, "MOST_DATA", SLICE),
            patch.object(known_nodes, "SAYS_EVERY_S", SAYS_EVERY_S),
            patch.object(known_nodes, "SILENT_AFTER_S", 3 * SAYS_EVERY_S),
        ):
            return self._run()

    def _run(self) -> Counter[str]:
        rng, clock = self.rng, self.clock
        self.topic.append(encode(Genesis(LOG_ID, 0, START, 0)))
        for machine in self.machines:
            clock.callLater(rng.uniform(0, 1), machine.start)
        for fault in (self._stand_still, self._crash, self._go_away, self._cut_off, self._forget):
            self._again(fault, FAULT_S)
        self._again(self._order, self.order_s)
        clock.callLater(FAULTS_S, self._end_faults)
        for _ in range(STEPS):
            if clock.seconds() > FAULTS_S + SETTLE_S:
                break
            clock.next()
            self._check_lease()
        self._check_end()
        return self.counts

    # faults

    def _again(self, fault: Callable[[], None], seconds: float) -> None:
        def again() -> None:
            if self.topic.trouble:
                fault()
                self._again(fault, seconds)

        self.clock.callLater(self.rng.expovariate(1 / seconds), again)

    def _stand_still(self) -> None:
        machine = self.rng.choice(self.machines)
        if not machine.stands_still:
            self.counts["stood still"] += 1
            machine.stand_still(self.rng.choice([0.1, 0.6, 1.5, 4.0]))

    def _crash(self) -> None:
        machine = self.rng.choice(self.machines)
        if machine.node is not None and not machine.stands_still:
            self.counts["crashes"] += 1
            machine.stop()
            self.clock.callLater(self.rng.choice([0.01, 0.5, 3.0]), machine.restart)

    def _order(self) -> None:
        """Have an operator order a claim or a step-down."""
        machine = self.rng.choice(self.machines)
        node = machine.node
        if node is None or machine.stands_still:
            return
        if node.state is State.LEADING:
            self.counts["step-downs"] += 1
            machine.resigns = True
            node.step_down(machine.now())
        else:
            self.counts["claims ordered"] += node.claim(machine.now())

    def _go_away(self) -> None:
        self.topic.is_away = self.rng.random() < 0.5
        if self.topic.is_away:
            self.counts["partition away"] += 1
            self.clock.callLater(self.rng.choice([0.2, 1.0, 3.0]), self._come_back)

    def _come_back(self) -> None:
        self.topic.is_away = False

    def _cut_off(self) -> None:
        machine = self.rng.choice(self.machines)
        machine.cut_off(is_cut_off=not machine.is_cut_off)
        self.counts["cut off"] += machine.is_cut_off

    def _forget(self) -> None:
        """Forget the beginning, as a leader does that retention has taken along."""
        partition = next((m.partition for m in self.machines if m.partition is not None), None)
        if partition is not None and self._folded and self.rng.random() < 0.3:
            places = [m.node.place.offset for m in self.machines if m.node is not None]
            partition.forget_before(max(0, self.rng.choice(places)))

    def _end_faults(self) -> None:
        self.topic.trouble = 0.0
        self.topic.is_away = False
        for machine in self.machines:
            machine.is_cut_off = False
        self._settled_at = len(self._confirmed)

    # what must hold

    def a_copy(self) -> Copy:
        """Return a copy of the log as a node that has all of it would give it."""
        self._fold_on()
        return Copy(self._place, bytes(self._log))

    def check_copy(self, place: Place, log: bytes) -> None:
        """Check that a node at a place has the log that the partition has there."""
        self._fold_on()
        expected, version = self._places.get(place.offset, (Place(), 0))
        if place != expected:
            raise InvariantBroken(f"a node is at {place}, rule R at {expected}")
        if log != self._versions[version]:
            raise InvariantBroken(f"another log at {place.offset}")

    def note_confirmed(self, log: bytes) -> None:
        """Note what a leader confirmed.

        One that was deposed may confirm late what its successor had read.
        """
        self.counts["confirmed"] += 1
        if not (log.startswith(self._confirmed) or self._confirmed.startswith(log)):
            raise InvariantBroken("a leader confirmed what contradicts what was confirmed")
        self._confirmed = max(log, self._confirmed, key=len)

    def _check_lease(self) -> None:
        serving = [
            machine
            for machine in self.machines
            if machine.node is not None
            and not machine.stands_still
            and machine.node.is_serving(machine.now())
        ]
        self.counts["served"] += len(serving)
        for machine in self.machines:
            self._check_alone(machine)
        if len(serving) > 1:
            raise InvariantBroken(f"{[machine.name for machine in serving]} serve at once")
        if serving and serving[0].confirmed_to - START < len(self._confirmed):
            raise InvariantBroken(f"{serving[0].name} serves without what was confirmed")

    def _check_alone(self, machine: SimulatedMachine) -> None:
        """Check that no leader holds its clients which nothing can confirm."""
        alone_s = self.clock.seconds() - machine.is_alone_since
        is_alone = machine.is_cut_off and not machine.stands_still and alone_s > ALONE_S
        if is_alone and machine.node is not None and machine.node.state is State.LEADING:
            raise InvariantBroken(f"{machine.name} leads, and is cut off for {alone_s:.1f} s")

    def _fold_on(self) -> None:
        """Fold what came to the partition, by the rule itself."""
        while self._folded < len(self.topic.records):
            offset, data = self.topic.records[self._folded]
            self._folded += 1
            record = decode(data)
            self._place, counts = rules.fold(self._place, offset, checksum_of(data), record)
            if counts and isinstance(record, Claim):
                del self._log[self._place.end - START :]
            elif counts and isinstance(record, Slice):
                self._log += record.data
            if counts and bytes(self._log) != self._versions[-1]:
                self._versions.append(bytes(self._log))
            self._places[offset] = (self._place, len(self._versions) - 1)

    def _check_end(self) -> None:
        self._fold_on()
        if not self._log.startswith(self._confirmed):
            raise InvariantBroken("the partition lacks what was confirmed")
        if len(self._confirmed) == self._settled_at:
            raise InvariantBroken(f"nothing was confirmed in {SETTLE_S} s without faults")
        places = [m.node.place for m in self.machines if m.node is not None]
        if len(places) < NODES or min(place.epoch for place in places) < self._place.epoch:
            raise InvariantBroken(f"nodes are left behind: {places}, {self._place}")
        for machine in self.machines if self.says else ():
            self._check_known(machine)

    def _check_known(self, machine: SimulatedMachine) -> None:
        assert machine.node is not None
        nodes = machine.known.view(machine.node.place, machine.now()).nodes
        leaders = [m.name for m in self.machines if m.node and m.node.state is State.LEADING]
        expected = {m.name: "leader" if m.name in leaders else "follower" for m in self.machines}
        if {node.name: node.role for node in nodes} != expected:
            raise InvariantBroken(f"{machine.name} knows {nodes}, and {leaders} leads")
