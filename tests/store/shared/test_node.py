"""What a node does, step by step, over a partition that is a list."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from tests.store.shared.histories import GENESIS, LOG_ID, START
from tests.store.shared.test_records import sealed
from txmq.errors import StoreClosed
from txmq.store.shared.node import LEASE_MARGIN, End, Node, State
from txmq.store.shared.partition import CaughtUp, Deliver, Lost, Reported
from txmq.store.shared.records import (
    MOST_DATA,
    Claim,
    NodeStatus,
    PartitionRecord,
    Slice,
    checksum_of,
    decode,
    encode,
)
from txmq.store.shared.rules import NO_NONCE, Place

MINE, OTHER = b"m" * 16, b"o" * 16
FIRST = GENESIS.epoch + 1


@dataclass
class World:
    """The partition and the listener of one node; what it does is noted."""

    records: list[bytes] = field(default_factory=lambda: [encode(GENESIS)])
    under_way: list[tuple[bytes, Reported]] = field(default_factory=list)
    told: list[object] = field(default_factory=list)
    asked_from: int = -1

    def produce(self, data: bytes, reported: Reported) -> None:
        self.under_way.append((data, reported))

    def read_from(self, offset: int, deliver: Deliver, caught_up: CaughtUp, lost: Lost) -> None:
        self.asked_from, self._read = offset, offset
        self._deliver, self._caught_up, self.lost = deliver, caught_up, lost

    def forget_before(self, offset: int) -> None: ...

    def close(self) -> None: ...

    def read(self) -> None:
        """Have the node read all records."""
        while self._read < len(self.records):
            self._read += 1
            self._deliver(self._read - 1, self.records[self._read - 1])
        self._caught_up(self._read)

    def arrive(self) -> tuple[int, Reported]:
        """Append the record that is under way; return its offset, and how to report."""
        data, reported = self.under_way.pop(0)
        self.records.append(data)
        return len(self.records) - 1, reported

    def others(self, *records: PartitionRecord) -> None:
        """Append records of another node."""
        self.records += map(encode, records)

    def counted(self, record: PartitionRecord, place: Place) -> None:
        self.told.append(record)

    def heard(self, said: NodeStatus, place: Place, *, is_history: bool) -> None:
        self.told.append((said, is_history))

    def leads(self, place: Place) -> None:
        self.told.append("leads")

    def confirmed(self, position: int) -> None:
        self.told.append(position)

    def ended(self, end: End, detail: str) -> None:
        self.told.append(end)


def follower(world: World, place: Place = Place(), nonce: bytes = MINE) -> Node:  # noqa: B008  # a constant
    node = Node(world, world, place, name="n", nonce=nonce, rng=Random(1), now=0.0)
    node.start()
    world.read()
    node.tick(0.0)
    return node


def leader(world: World) -> Node:
    """Return a node that leads, with no lease to wait for, and a beat at 3.1."""
    node = follower(world)
    tick_to(node, 3.0)
    offset, reported = world.arrive()
    world.read()
    reported(None, offset)
    node.tick(3.1)
    assert is_(node.state, State.LEADING)
    offset, reported = world.arrive()
    world.read()
    reported(None, offset)
    world.told.clear()
    return node


def tick_to(node: Node, now: float) -> None:
    """Tick as often as a machine that does not stand still."""
    while node._now + 0.1 < now:
        node.tick(node._now + 0.1)
    node.tick(now)


def is_(state: State, expected: State) -> bool:
    """Compare without narrowing the type: the node's next step changes its state."""
    return state is expected


def other_claim(epoch: int = FIRST) -> Claim:
    return Claim(LOG_ID, epoch, OTHER, "other")


def other_slice(start: int, data: bytes, epoch: int = FIRST) -> Slice:
    end = START + start + len(data)
    return Slice(LOG_ID, epoch, OTHER, START + start, end, data)


def test_a_follower_claims_after_silence_and_leads_when_it_has_read_its_claim() -> None:
    world = World()
    node = follower(world)
    tick_to(node, 1.4)
    assert is_(node.state, State.FOLLOWING)
    tick_to(node, 2.5)
    assert is_(node.state, State.CLAIMING)
    offset, reported = world.arrive()
    reported(None, offset)
    assert is_(node.state, State.CLAIMING)
    world.read()
    assert (node.state, world.told[-1]) == (State.LEADING, "leads")


def test_what_counts_keeps_a_follower_quiet_and_time_that_it_stood_still_does_too() -> None:
    world = World()
    node = follower(world)
    world.others(other_claim())
    for beat in range(6):
        tick_to(node, float(beat))
        world.others(other_slice(0, b""))
        world.read()
    assert is_(node.state, State.FOLLOWING)
    node.tick(500.0)
    assert is_(node.state, State.FOLLOWING)
    tick_to(node, 503.0)
    assert is_(node.state, State.CLAIMING)


def test_a_follower_that_lags_does_not_claim() -> None:
    world = World()
    node = follower(world)
    world._deliver(1, encode(other_claim()))
    assert not node.claim(0.0)
    world._caught_up(2)
    assert node.claim(0.0)
    assert not node.claim(0.0)  # one at a time


def test_a_node_that_does_not_read_its_own_claim_ends() -> None:
    world = World()
    node = follower(world)
    tick_to(node, 3.0)
    offset, reported = world.arrive()
    reported(None, offset)
    tick_to(node, 7.0)
    assert (world.told[-1], world.under_way) == (End.UNDELIVERED, [])


def test_a_claim_that_was_taken_late_may_be_read_as_late() -> None:
    world = World()
    node = follower(world)
    tick_to(node, 20.0)  # Kafka elects a leader meanwhile
    assert is_(node.state, State.CLAIMING)
    offset, reported = world.arrive()
    reported(None, offset)
    tick_to(node, 21.0)
    assert is_(node.state, State.CLAIMING)
    world.read()
    assert is_(node.state, State.LEADING)


def test_a_lost_claim_makes_a_follower_again() -> None:
    world = World()
    node = follower(world)
    node.claim(0.0)
    world.others(other_claim())
    world.read()
    assert is_(node.state, State.FOLLOWING)


def test_an_append_is_confirmed_as_a_whole_and_one_slice_is_under_way() -> None:
    world = World()
    node = leader(world)
    node.append(bytes(MOST_DATA + 1), 3.1, begins_segment=True)
    node.append(b"next", 3.1)
    slices = []
    for _ in range(3):
        assert len(world.under_way) == 1
        slices.append(decode(world.under_way[0][0]))
        offset, reported = world.arrive()
        reported(None, offset)
    end = START + MOST_DATA + 1
    assert [
        (one.start, one.whole, one.begins_segment) for one in slices if isinstance(one, Slice)
    ] == [
        (START, START, True),
        (START + MOST_DATA, end, False),
        (end, end + 4, False),
    ]
    assert world.told == [end, end + 4]


def test_a_gap_is_answered_by_what_is_read() -> None:
    world = World()
    node = leader(world)
    world.others(other_claim(2))  # void
    node.append(b"data", 3.1)
    offset, reported = world.arrive()
    reported(None, offset)
    assert world.told == []
    world.read()
    assert world.told == [START + 4]


def test_an_unknown_offset_is_answered_by_what_is_read_before_or_after() -> None:
    world = World()
    node = leader(world)
    node.append(b"data", 3.1)
    _, reported = world.arrive()
    world.read()
    reported(None, None)
    node.append(b"more", 3.1)
    _, reported = world.arrive()
    reported(None, None)
    assert world.told == [START + 4]
    world.read()
    assert world.told == [START + 4, START + 8]


def test_a_question_that_nothing_answers_ends_the_leader() -> None:
    world = World()
    node = leader(world)
    node.append(b"data", 3.1)
    world.under_way.pop()[1](None, None)
    tick_to(node, 6.0)
    assert world.told == [End.UNDELIVERED]


def test_a_leader_that_nothing_confirms_ends_by_itself() -> None:
    world = World()
    node = leader(world)
    node.append(b"data", 3.1)
    tick_to(node, 5.5)
    assert world.told == []
    tick_to(node, 5.7)  # the longest time that a follower waits, after the tick at 3.2
    assert world.told == [End.UNDELIVERED]


def test_time_that_a_leader_stood_still_is_no_silence() -> None:
    world = World()
    node = leader(world)
    node.append(b"data", 3.1)
    node.tick(3.2)
    node.tick(60.0)
    world.others(other_claim(FIRST + 1))
    world.read()
    assert world.told == [End.DEPOSED]


def test_a_leader_that_loses_its_space_steps_down() -> None:
    world = World()
    node = leader(world)
    node.has_space = False
    node.tick(3.2)
    assert decode(world.under_way[0][0]) == Claim(LOG_ID, FIRST + 1, NO_NONCE, "n")


@pytest.mark.parametrize("lacking", ["has_space", "is_whole"])
def test_a_node_without_space_or_with_damage_claims_last_and_then_leads_on(lacking: str) -> None:
    world = World()
    node = follower(world)
    setattr(node, lacking, False)
    tick_to(node, 2.5)  # when any other has claimed
    assert is_(node.state, State.FOLLOWING)
    tick_to(node, 5.0)
    offset, reported = world.arrive()
    world.read()
    reported(None, offset)
    tick_to(node, 5.1)
    assert is_(node.state, State.LEADING)
    assert isinstance(decode(world.under_way[0][0]), Slice)


def test_a_deposed_leader_ends_and_confirms_nothing() -> None:
    world = World()
    node = leader(world)
    node.append(b"data", 3.1)
    world.others(other_claim(FIRST + 1))
    offset, reported = world.arrive()
    reported(None, offset)
    world.read()
    assert world.told == [End.DEPOSED]
    with pytest.raises(StoreClosed):
        node.append(b"more", 3.2)


def test_an_error_ends_a_leader_and_makes_a_claimant_a_follower() -> None:
    world = World()
    node = leader(world)
    node.append(b"data", 3.1)
    world.under_way.pop()[1](TimeoutError("late"), None)
    assert world.told == [End.UNDELIVERED]
    node = follower(World())
    node.claim(0.0)
    node._partition.under_way.pop()[1](TimeoutError("late"), None)  # type: ignore[attr-defined]  # a World
    assert is_(node.state, State.FOLLOWING)


def test_a_leader_serves_for_its_lease_and_beats_renew_it() -> None:
    world = World()
    node = leader(world)
    assert node.is_serving(4.0)
    assert not node.is_serving(4.1)
    node.tick(3.5)
    offset, reported = world.arrive()
    reported(None, offset)
    assert node.is_serving(4.4)
    assert not node.is_serving(4.5)  # a lease counts from when the beat was begun


def test_a_new_leader_answers_and_confirms_after_the_lease_of_the_one_before() -> None:
    world = World([encode(GENESIS), encode(other_claim()), encode(other_slice(0, b"theirs"))])
    node = follower(world)
    tick_to(node, 0.2)
    world.others(other_slice(6, b"last"))
    world.read()
    tick_to(node, 0.3)  # which dates it
    node.claim(0.3)
    offset, reported = world.arrive()
    world.read()
    reported(None, offset)
    node.append(b"mine", 0.4)
    offset, reported = world.arrive()
    reported(None, offset)
    free_at = 0.3 + LEASE_MARGIN
    tick_to(node, free_at - 0.01)
    assert START + 14 not in world.told
    assert not node.is_serving(free_at - 0.01)
    tick_to(node, free_at + 0.01)
    assert world.told[-1] == START + 14


def test_a_copy_of_an_earlier_beat_does_not_renew_the_lease() -> None:
    world = World()
    node = leader(world)
    node.tick(3.5)
    beat, _ = world.under_way[0]
    offset, reported = world.arrive()
    reported(None, offset)
    node.tick(4.0)
    world.records.append(beat)
    world.read()
    world.under_way.pop()[1](None, None)  # the second beat is nowhere
    assert not node.is_serving(4.5)


def test_a_leader_that_steps_down_frees_its_followers_of_its_lease() -> None:
    world = World()
    node = leader(world)
    node.append(b"data", 3.1)
    node.step_down(3.1)
    assert not node.is_serving(3.1)
    with pytest.raises(StoreClosed):
        node.append(b"more", 3.1)
    for _ in range(2):
        offset, reported = world.arrive()
        reported(None, offset)
    assert world.told == [START + 4, End.RESIGNED]
    assert decode(world.records[-1]) == Claim(LOG_ID, FIRST + 1, NO_NONCE, "n")
    successor = follower(world, nonce=b"s" * 16)
    tick_to(successor, 0.5)
    offset, reported = world.arrive()
    reported(None, offset)
    world.read()
    tick_to(successor, 0.9)
    offset, reported = world.arrive()
    reported(None, offset)
    assert successor.is_serving(0.9)


def test_a_restart_reads_the_record_of_its_place_again() -> None:
    world = World()
    world.others(other_claim(), other_slice(0, b"data"))
    place = follower(world).place
    world.told.clear()
    node = follower(world, place)
    assert (world.asked_from, node.place, world.told) == (2, place, [])


@pytest.mark.parametrize(("offset", "checksum"), [(1, 7), (9, None)])
def test_another_partition_ends_a_node(offset: int, checksum: int | None) -> None:
    world = World()
    world.others(other_claim())
    place = follower(world).place
    world.told.clear()
    follower(world, place._replace(offset=offset, checksum=checksum or place.checksum))
    assert world.told == [End.DIVERGED]


def test_a_partition_that_was_cut_ends_a_node() -> None:
    world = World()
    node = leader(world)
    node.append(b"data", 3.1)
    world.under_way.pop()[1](None, 1)  # an offset that was read before
    assert world.told == [End.DIVERGED]
    world = World()
    follower(world)
    world._deliver(0, encode(GENESIS))
    assert world.told[-1] == End.DIVERGED


def test_a_node_that_missed_records_ends() -> None:
    world = World()
    follower(world)
    world.lost(5)
    assert world.told[-1] == End.FORGOTTEN
    world = World()
    follower(world)
    world.lost(0)
    assert world.told[-1] == End.DIVERGED


def a_status(nonce: bytes = OTHER) -> NodeStatus:
    return NodeStatus(LOG_ID, FIRST, nonce, START, 0, "other", "1", "other:1")


def test_what_nodes_say_is_told_and_counts_for_nothing() -> None:
    world = World()
    world.others(a_status())
    node = follower(world)
    world.others(a_status(), other_claim())
    world.read()
    assert world.told == [GENESIS, (a_status(), True), (a_status(), False), other_claim()]
    world.told.clear()
    for _ in range(9):
        world.others(a_status())
        world.read()
        tick_to(node, node._now + 0.3)
    assert is_(node.state, State.CLAIMING)  # they quiet nobody


def test_a_status_between_slices_is_a_question_that_is_answered() -> None:
    world = World()
    node = leader(world)
    world.others(a_status())
    node.append(b"data", 3.1)
    offset, reported = world.arrive()
    reported(None, offset)
    assert world.told == []
    world.read()
    assert world.told == [(a_status(), False), START + 4]


def test_a_record_of_a_later_version_ends_a_node() -> None:
    world = World()
    node = follower(world)
    world.records.append(sealed(encode(other_claim()), 8, 2))
    world.read()
    assert world.told[-1] == End.UNSUPPORTED
    assert node.place.checksum == checksum_of(encode(GENESIS))
