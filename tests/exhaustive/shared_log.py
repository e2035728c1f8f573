"""The world of a shared log: two writers, each with a real `Node`, and a partition.

Nodes are real; time, network and partition are the world's. A node that reads nothing
for long is a zombie by itself. Bounds keep the world finite: they count what is left.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from math import inf
from random import Random
from typing import Any, NamedTuple, Self
from uuid import UUID

from txmq.store.shared import rules
from txmq.store.shared.node import End, Node, State, Timing
from txmq.store.shared.partition import CaughtUp, Deliver, Lost, Reported
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

LOG_ID = UUID(int=1)
TIMING = Timing(silence_s=inf, lease_s=1.0)  # claims come by orders only


class Bounds(NamedTuple):
    """How often each thing may happen still; `sizes`: bytes of one of them."""

    claims: int = 2
    writes: int = 0
    sizes: tuple[int, ...] = (1,)
    copies: int = 0  # of records that come twice
    unknown: int = 0  # offsets that no report has
    errors: int = 0
    restarts: int = 0
    resignations: int = 0
    time: int = 0  # the last moment
    beats: int = 0


class _Wire:
    """What nodes produce and tell while a step runs: their partition and listener."""

    def __init__(self) -> None:
        self.produced: list[bytes] = []
        self.told: list[tuple[str, Any]] = []

    def produce(self, data: bytes, reported: Reported) -> None:
        del reported  # the world reports to the copy of the node that it has then
        self.produced.append(data)

    def read_from(self, offset: int, deliver: Deliver, caught_up: CaughtUp, lost: Lost) -> None:
        """The world calls the node's methods."""

    def forget_before(self, offset: int) -> None: ...

    def close(self) -> None: ...

    def counted(self, record: PartitionRecord, place: Place) -> None:
        self.told.append(("counted", record))

    def heard(self, said: NodeStatus, place: Place, *, is_history: bool) -> None: ...

    def leads(self, place: Place) -> None:
        self.told.append(("leads", place))

    def confirmed(self, position: int) -> None:
        self.told.append(("confirmed", position))

    def ended(self, end: End, detail: str) -> None:
        self.told.append(("ended", end))


_WIRE = _Wire()


class Transit(NamedTuple):
    """A record under way: its bytes, and where the partition has it."""

    data: bytes
    at: int | None


class Writer:
    """A node with its copy of the log, and what of its records is under way."""

    __slots__ = ("end", "late", "log", "name", "node", "read", "transit")

    def __init__(self, name: str, node: Node) -> None:
        self.name, self.node = name, node
        self.read = 0  # records
        self.log = b""
        self.transit: Transit | None = None
        self.late: tuple[bytes, ...] = ()  # records that may come at any time
        self.end: End | None = None

    def fork(self) -> Writer:
        twin = copy.copy(self)
        twin.node = node = copy.copy(self.node)
        node._expectation = copy.copy(node._expectation)
        node._queue = deque(node._queue)
        node._in_flight = copy.copy(node._in_flight)
        return twin

    def key(self) -> Hashable:
        node, flight = self.node, self.node._in_flight
        if self.end is not None:
            return self.read, self.late, self.end
        return (
            self.read,
            self.log,
            self.transit,
            self.late,
            node.state,
            node._is_caught_up,
            node._is_slice_read,
            node._slice_read_at,
            node._nonce,
            node._epoch,
            node._expectation._known,
            len(node._queue),
            node._end,
            node._confirmed,
            node._begun_at,
            node._confirmed_at,
            node._free_at,
            node.is_resigning,
            node._now,
            flight and (flight.begun_at, flight.is_reported, flight.offset, flight.read_to),
        )


class LogWorld:
    """A state of the whole: records of the partition, writers, time, what is left."""

    def __init__(self, bounds: Bounds) -> None:
        self.left = bounds
        self.records: tuple[bytes, ...] = (encode(Genesis(LOG_ID, 0, 0, 0)),)
        self.now = 0
        self.confirmed = b""
        self.seen: frozenset[str] = frozenset()  # what has just happened
        self.writers = [Writer(name, _node(name, name, Place(), 0)) for name in "ab"]
        for writer in self.writers:
            self._read_record(writer)
            writer.node._slice_read_at = -inf  # nobody has led before

    def key(self) -> Hashable:
        return (
            self.records,
            self.now,
            self.left,
            self.confirmed,
            *(writer.key() for writer in self.writers),
        )

    def steps(self) -> Iterator[tuple[str, Self]]:
        for name, (guard, step) in STEPS.items():
            for number in range(2):
                if guard(self, self.writers[number]):
                    after = self._fork(number)
                    step(after, after.writers[number])
                    after._settle(after.writers[number])
                    yield f"{name} {self.writers[number].name}", after
        if self.now < self.left.time:
            yield "wait", self._wait()

    def _wait(self) -> Self:
        after = self._fork(0, 1)
        after.now += 1
        for writer in after.writers:
            after._date(writer)
        return after

    def _date(self, writer: Writer) -> None:
        if writer.node.state in (State.FOLLOWING, State.CLAIMING):
            writer.node.tick(self.now)

    def _fork(self, *numbers: int) -> Self:
        twin = copy.copy(self)
        twin.writers = [
            writer.fork() if at in numbers else writer for at, writer in enumerate(self.writers)
        ]
        twin.seen = frozenset()
        return twin

    def spend(self, name: str) -> None:
        self.left = self.left._replace(**{name: getattr(self.left, name) - 1})

    def note(self, what: str) -> None:
        self.seen |= {what}

    def append(self, data: bytes, what: str = "record") -> int:
        before = fold_all(self.records)[0]
        self.records += (data,)
        after = fold_all(self.records)[0]
        if (before.epoch, before.end) == (after.epoch, after.end):
            self.note(f"a {what} is void")
        return len(self.records) - 1

    def scenes(self) -> frozenset[str]:
        """Return what is so in this state, or has just happened."""
        found = {f"{writer.name} serves" for writer in self.serving()}
        leaders = [writer for writer in self.writers if writer.node.state is State.LEADING]
        if len(leaders) == 2:
            found.add("two lead")
        if any(writer.node._now < writer.node._free_at < inf for writer in leaders):
            found.add("a leader waits for the lease of another")
        return self.seen | found

    # invariants

    def check(self) -> None:
        place, log = fold_all(self.records)
        assert log.startswith(self.confirmed), "the partition lacks what was confirmed"
        assert len(set(log)) == len(log) == place.end, "a hole, or a double"
        serving = self.serving()
        assert len(serving) <= 1, "two nodes serve at once"
        for writer in serving:
            assert len(self.confirmed) <= writer.node._confirmed, "an answer from an old state"
        for writer in self.writers:
            assert writer.end not in (End.DIVERGED, End.FORGOTTEN), f"{writer.name} {writer.end}"
            self._check_copy(writer)

    def _check_copy(self, writer: Writer) -> None:
        """Check that a copy has the log of its place; a leader's is ahead."""
        place, log = fold_all(self.records[: writer.read])
        node = writer.node
        assert node.place == place, f"{writer.name} is at {node.place}, rule R at {place}"
        if node.state in (State.FOLLOWING, State.CLAIMING):
            assert writer.log == log, f"{writer.name} has another log"

    def check_end(self) -> None:
        """Nothing has to be done when the bounds are used up."""

    def serving(self) -> list[Writer]:
        if not self.left.time:
            return []
        return [writer for writer in self.writers if writer.node.is_serving(self.now)]

    # what steps have in common

    def _read_record(self, writer: Writer) -> None:
        self._date(writer)
        writer.node._read(writer.read, self.records[writer.read])
        writer.read += 1
        self._date(writer)
        if writer.read == len(self.records):
            writer.node._read_all(writer.read)

    def _settle(self, writer: Writer) -> None:
        """Take what the node produced and told in this step."""
        produced, told = _WIRE.produced, _WIRE.told
        _WIRE.produced, _WIRE.told = [], []
        for kind, what in told:
            if kind == "counted":
                self._take(writer, what)
            elif kind == "leads":
                self.note("leads" if self.left.restarts else "leads after a restart")
                if not self.left.time:  # then there are no leases to wait for
                    writer.node._free_at = -inf
            elif kind == "ended":
                self._end(writer, what)
            else:
                self._confirm(writer.log[:what])
        for data in produced:
            assert writer.transit is None, "two records are in flight"
            writer.transit = Transit(data, None)

    def _end(self, writer: Writer, end: End) -> None:
        """End a process; what it has under way may still come."""
        self.note(end.name)
        writer.end = end
        if writer.transit is not None and writer.transit.at is None:
            writer.late += (writer.transit.data,)
        writer.transit = None

    def _take(self, writer: Writer, record: PartitionRecord) -> None:
        if isinstance(record, Slice):
            writer.log += record.data
        elif isinstance(record, Claim):
            if len(writer.log) > writer.node.place.end:
                self.note("a record was cut")
            writer.log = writer.log[: writer.node.place.end]

    def _confirm(self, log: bytes) -> None:
        self.note("confirmed")
        # one that was deposed may confirm late what its successor had read
        common = min(log, self.confirmed, key=len)
        assert log[: len(common)] == self.confirmed[: len(common)], "two logs are confirmed"
        self.confirmed = max(log, self.confirmed, key=len)


def _node(name: str, nonce: str, place: Place, now: int) -> Node:
    return Node(
        _WIRE,
        _WIRE,
        place,
        name=name,
        nonce=nonce.encode().ljust(16),
        rng=Random(0),
        now=now,
        timing=TIMING,
    )


@lru_cache(maxsize=1 << 16)
def fold_all(records: tuple[bytes, ...]) -> tuple[Place, bytes]:
    """Return place and log of a partition, by rule R alone."""
    if not records:
        return Place(), b""
    place, log = fold_all(records[:-1])
    record = decode(records[-1])
    place, counts = rules.fold(place, len(records) - 1, checksum_of(records[-1]), record)
    if counts and isinstance(record, Claim):
        log = log[: place.end]
    elif counts and isinstance(record, Slice):
        log += record.data
    return place, log


# Steps: when each is possible, and what it does. docs/specification/shared_log.qnt has
# the same ones.


def may_claim(world: LogWorld, writer: Writer) -> bool:
    """The first claim is that of "a": the other half of the states mirrors this one."""
    node = writer.node
    return (
        (world.left.claims > 0 and (writer.name == "a" or len(world.records) > 1))
        and node.state in (State.FOLLOWING, State.CLAIMING)
        and node._is_caught_up
        and node._in_flight is None
    )


def claim(world: LogWorld, writer: Writer) -> None:
    world.spend("claims")
    assert writer.node.claim(world.now)


def may_write(world: LogWorld, writer: Writer) -> bool:
    node = writer.node
    return (
        world.left.writes > 0
        and node.state is State.LEADING
        and not node.is_resigning
        and node._in_flight is None
    )


def write(world: LogWorld, writer: Writer) -> None:
    """Write bytes that nothing else has, once what was written before is known."""
    world.spend("writes")
    left = world.left.writes
    size = world.left.sizes[left % len(world.left.sizes)]
    data = bytes(range(left * 8, left * 8 + size))
    writer.log += data
    writer.node.append(data, world.now)


def is_under_way(_world: LogWorld, writer: Writer) -> bool:
    return writer.transit is not None and writer.transit.at is None


def arrive(world: LogWorld, writer: Writer) -> None:
    assert writer.transit is not None
    what = "zombie's record" if writer.node.state is State.LEADING else "claim"
    writer.transit = Transit(writer.transit.data, world.append(writer.transit.data, what))


def may_arrive_again(world: LogWorld, writer: Writer) -> bool:
    return world.left.copies > 0 and has_arrived(world, writer)


def arrive_again(world: LogWorld, writer: Writer) -> None:
    """Append the record a second time, after its answer was lost."""
    world.spend("copies")
    arrive(world, writer)


def leave_a_copy(world: LogWorld, writer: Writer) -> None:
    """Leave a copy in the network, for any later time."""
    world.spend("copies")
    assert writer.transit is not None
    writer.late += (writer.transit.data,)


def is_late(_world: LogWorld, writer: Writer) -> bool:
    return writer.late != ()


def arrive_late(world: LogWorld, writer: Writer) -> None:
    data, *rest = writer.late
    writer.late = tuple(rest)
    world.append(data, "late record")
    if "a late record is void" not in world.seen and writer.end is not None:
        world.note("a record counts after its writer's end")


def has_arrived(_world: LogWorld, writer: Writer) -> bool:
    return writer.transit is not None and writer.transit.at is not None


def _report(writer: Writer, error: Exception | None, offset: int | None) -> None:
    writer.transit = None
    flight = writer.node._in_flight
    assert flight is not None
    writer.node._reported(flight, error, offset)


def report(world: LogWorld, writer: Writer) -> None:
    """Report a record with its offset."""
    assert writer.transit is not None
    if writer.transit.at != writer.node._expectation._known + 1:
        world.note("a gap")
    _report(writer, None, writer.transit.at)


def may_report_unknown(world: LogWorld, writer: Writer) -> bool:
    return world.left.unknown > 0 and has_arrived(world, writer)


def report_unknown(world: LogWorld, writer: Writer) -> None:
    """Report a record as a duplicate: its answer was lost before."""
    world.spend("unknown")
    _report(writer, None, None)


def may_give_up(world: LogWorld, writer: Writer) -> bool:
    return world.left.errors > 0 and writer.transit is not None


def give_up(world: LogWorld, writer: Writer) -> None:
    """Give a record up; it comes late all the same, or not at all: `arrive_late`."""
    world.spend("errors")
    assert writer.transit is not None
    if writer.transit.at is None:
        writer.late += (writer.transit.data,)
    _report(writer, TimeoutError(), None)


def may_read(world: LogWorld, writer: Writer) -> bool:
    return writer.read < len(world.records) and writer.node.state is not State.ENDED


def read(world: LogWorld, writer: Writer) -> None:
    """Read the next record; a follower reads all, as it does nothing in between."""
    while writer.node.state is State.FOLLOWING and writer.read < len(world.records) - 1:
        world._read_record(writer)
        world._settle(writer)
    asked = writer.node._in_flight is not None and writer.node._in_flight.is_reported
    world._read_record(writer)
    if asked and writer.node.state is State.LEADING:
        world.note("a question was answered")


def may_restart(world: LogWorld, writer: Writer) -> bool:
    return world.left.restarts > 0 and writer.node.state is State.ENDED


def restart(world: LogWorld, writer: Writer) -> None:
    """Start the process again, as a follower with the copy that the place tells."""
    world.spend("restarts")
    place = writer.node.place
    nonce = f"{writer.name}{world.left.restarts}"
    writer.node, writer.end = _node(writer.name, nonce, place, world.now), None
    writer.log = fold_all(world.records[: writer.read])[1]
    writer.read -= 1
    world._read_record(writer)


def may_tick(world: LogWorld, writer: Writer) -> bool:
    """Leaders tick late or never; others tick at once, so that they lead soonest."""
    node = writer.node
    if node.state is not State.LEADING or not world.left.time:
        return False
    beats = node._in_flight is None and world.now - node._begun_at >= TIMING.beat_s
    return world.left.beats > 0 if beats else node._now < world.now or node._free_at == inf


def tick(world: LogWorld, writer: Writer) -> None:
    begun_at = writer.node._begun_at
    writer.node.tick(world.now)
    if writer.node._begun_at != begun_at:
        world.spend("beats")


def may_resign(world: LogWorld, writer: Writer) -> bool:
    node = writer.node
    return world.left.resignations > 0 and node.state is State.LEADING and not node.is_resigning


def resign(world: LogWorld, writer: Writer) -> None:
    world.spend("resignations")
    writer.node.step_down(world.now)


Guard = Callable[[LogWorld, Writer], bool]
Step = Callable[[LogWorld, Writer], None]
STEPS: dict[str, tuple[Guard, Step]] = {
    "claim": (may_claim, claim),
    "write": (may_write, write),
    "arrive": (is_under_way, arrive),
    "arrive_again": (may_arrive_again, arrive_again),
    "leave_a_copy": (may_arrive_again, leave_a_copy),
    "arrive_late": (is_late, arrive_late),
    "report": (has_arrived, report),
    "report_unknown": (may_report_unknown, report_unknown),
    "give_up": (may_give_up, give_up),
    "read": (may_read, read),
    "restart": (may_restart, restart),
    "tick": (may_tick, tick),
    "resign": (may_resign, resign),
}
