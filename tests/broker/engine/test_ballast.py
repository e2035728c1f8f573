"""A disk that other programs fill to its last byte: acks, decisions and retention
continue with the ballast, which is made again later.
"""

from __future__ import annotations

import errno
from collections import Counter
from contextlib import suppress
from random import Random

import pytest
from twisted.internet.task import Clock

from tests.broker.data_directory.retention_world import (
    ARCHIVE,
    DATA,
    RetentionWorld,
    bodies,
    recount,
)
from tests.broker.support import BEGAN
from tests.simulation.simulated_broker import recover
from tests.store.simfs import SimFS
from txmq.broker.engine.disk_space import DiskWatch
from txmq.broker.engine.engine import Engine
from txmq.config.broker import DiskSettings
from txmq.core.state import log_pins
from txmq.core.topics.topics import AlterTopic, CreateTopic
from txmq.errors import ReadOnly, RequestRejected, StoreError
from txmq.model.units import MIB, SECOND
from txmq.store.ballast import NAME, Ballast
from txmq.store.log.segment import list_segments

HOUR = 3_600
SIZE = 20_000  # bytes of a body; three of those are a segment
KEPT = 160  # messages: more than 2 MiB to be freed
LIMITS = DiskSettings(warn_free_mib=2, resume_free_mib=1, refuse_free_mib=1, ballast_mib=1)


@pytest.fixture(autouse=True)
def _little_slack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_pins, "SLACK_BYTES", 1_000)


class FullDiskBroker:
    """A broker with more data than it keeps, on a disk that other programs fill."""

    def __init__(self, limits: DiskSettings = LIMITS, kept: int = KEPT) -> None:
        fs = SimFS()
        for folder in (DATA, ARCHIVE):
            fs.makedirs(folder)
        self.world = RetentionWorld(fs.copy())
        self.watch = DiskWatch(self.world.fs, DATA, self.world.engine.disk, limits)
        self.watch.tick()
        self.world.do(CreateTopic("t", 1))
        for _ in range(kept):
            assert not isinstance(self.world.send(bytes(SIZE)), RequestRejected)
        self.look()

    def look(self) -> None:
        """Let a second pass."""
        self.watch.tick()
        for _ in range(12):
            self.world.storage.tick()
            self.world.turn(0.3)  # the write that found the disk full is tried again

    def fill(self) -> None:
        """Fill the disk to the last byte, so that the log has no space left either."""
        space = self.world.fs.space("/")
        self.world.fs.capacity = space.size - space.free
        while not self.world.log.read_only:
            self.world.engine.submit(self.world.sending(bytes(3_000)), lambda _reply: None)
            self.world.turn()

    @property
    def there(self) -> bool:
        return NAME in self.world.fs.listdir(DATA)


def test_retention_frees_a_disk_that_others_have_filled() -> None:
    full = FullDiskBroker()
    world = full.world
    assert full.there
    full.fill()
    refused = world.do(CreateTopic("u", 1))
    assert type(refused) is ReadOnly
    full.look()
    assert not full.there
    assert not world.log.read_only
    assert isinstance(world.send(b"x"), RequestRejected), (
        "nobody who writes messages gets of the ballast"
    )
    world.sequence -= 1
    assert isinstance(world.do(CreateTopic("u", 1)), tuple)
    world.turn(2 * HOUR)
    for _ in range(3):
        world.retain()
    full.watch.tick()
    assert world.log.first > 2 * MIB
    assert not isinstance(world.send(b"x"), RequestRejected)
    assert not full.there, "an operator wants more to be free"
    world.fs.capacity = None
    full.look()
    full.look()
    assert full.there
    recount(world.state)


def test_a_ballast_is_not_made_again_with_its_own_space() -> None:
    full = FullDiskBroker()
    full.fill()
    for _ in range(12):  # before anybody has looked at the disk again
        full.world.storage.tick()
        full.world.turn(0.3)
    assert not full.there
    assert not full.world.log.read_only
    refused = full.world.send(b"x")
    assert isinstance(refused, RequestRejected)
    assert "0 MiB left" in refused.message
    assert full.world.engine.disk.troubles == {}


def test_without_a_ballast_nothing_continues_before_there_is_space() -> None:
    full = FullDiskBroker(LIMITS.model_copy(update={"ballast_mib": 0}))
    world = full.world
    assert not full.there
    full.fill()
    full.look()
    world.turn(2 * HOUR)
    for _ in range(3):
        world.retain()
    assert world.log.read_only
    assert world.log.first == 0
    world.fs.capacity = None
    full.look()
    for _ in range(3):
        world.retain()
    assert world.log.first > 0


def test_segments_that_were_let_go_are_removed_though_the_log_is_full() -> None:
    full = FullDiskBroker(LIMITS.model_copy(update={"ballast_mib": 0}))
    world, remove = full.world, full.world.fs.remove

    def refuse(path: str) -> None:
        raise StoreError(f"{path}: not now")

    world.fs.remove = refuse  # type: ignore[method-assign]
    world.turn(2 * HOUR)
    for _ in range(3):
        world.retain()
    assert [*world.engine.disk.troubles] == ["snapshot"] or [*world.engine.disk.troubles] == [
        "retention"
    ]
    full.fill()
    assert len(list_segments(world.fs, DATA)) > 50
    world.fs.remove = remove  # type: ignore[method-assign]
    for _ in range(5):
        full.look()
    assert len(list_segments(world.fs, DATA)) < 5
    assert not world.log.read_only


def test_a_broker_starts_on_a_full_disk_by_giving_its_ballast_up() -> None:
    full = FullDiskBroker()
    full.fill()
    fs = full.world.fs.copy()
    fs.capacity = full.world.fs.capacity
    log, state = recover(fs, BEGAN)
    engine = Engine(log, state, clock=Clock(), now=lambda: BEGAN, in_thread=full.world._at_once)
    DiskWatch(fs, DATA, engine.disk, LIMITS)
    while not log.read_only:
        engine.boot("again")
    assert NAME not in fs.listdir(DATA)
    assert engine.disk.refusing


def kept(fs: SimFS) -> list[int]:
    """Return the offsets that can be read after a start; retention's minimum must be
    among them.
    """
    log, state = recover(fs, BEGAN)
    recount(state)
    found, first = bodies(log.read, state, "t"), state.topics["t"].start_offsets[0]
    assert list(found) == list(range(first, state.topics["t"].end_offsets[0]))
    log.close()
    return list(found)


def a_round(world: RetentionWorld, watch: DiskWatch) -> None:
    """Run a round of retention on a disk with a ballast, and send some messages."""
    watch.tick()
    for number in range(3):
        world.engine.submit(world.sending(bytes([number])), lambda _reply: None)
        world.retain()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_an_error_at_any_call_of_a_round_stops_the_broker_or_is_lived_with(number: int) -> None:
    full = FullDiskBroker(kept=12)
    base, began, counts = full.world.fs.copy(), full.world.now() + 2 * HOUR * SECOND, Counter[str]()
    undisturbed = base.copy()
    world = RetentionWorld(undisturbed, now=began)
    before = undisturbed.calls
    a_round(world, DiskWatch(undisturbed, DATA, world.engine.disk, LIMITS))
    assert world.log.first > 0
    for call in range(before + 1, undisturbed.calls + 1, 2):
        fs = base.copy()
        world = RetentionWorld(fs, now=began)
        watch = DiskWatch(fs, DATA, world.engine.disk, LIMITS)
        world.engine.on_failure = lambda _failure: None
        fs.errors = {call: number}
        with suppress(StoreError):  # the reactor's, from a write of its own
            a_round(world, watch)
        fs.errors = {}
        watch.tick()
        counts["stopped" if world.engine.failed else "went on"] += 1
        if world.engine.failed is None:
            for _ in range(6):
                world.retain()
            assert world.log.first > 0
            assert fs.listdir(DATA).count(NAME) == 1
            assert world.engine.disk.troubles == {}
        assert kept(fs.crash(Random(call)))[-1:] >= [11]
    assert min(counts["stopped"], counts["went on"]) > 2, counts


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_ballast_is_there_as_a_whole_or_not_at_all(number: int) -> None:
    empty = SimFS()
    empty.makedirs(DATA)
    whole = empty.copy()
    Ballast(whole, DATA, 10_000).create()
    for call in range(2, whole.calls + 1):
        fs = empty.copy()
        ballast = Ballast(fs, DATA, 10_000)
        fs.errors = {call: number}
        with suppress(StoreError):
            ballast.create()
        for image in (fs.copy(), fs.crash(Random(call))):
            again = Ballast(image, DATA, 10_000)
            if again.needed:
                again.create()
            assert again.exists
            assert image.listdir(DATA) == [NAME]
        assert not ballast.exists or NAME in fs.listdir(DATA)


def test_an_idle_broker_frees_all_that_an_operator_no_longer_wants() -> None:
    world = FullDiskBroker(LIMITS.model_copy(update={"ballast_mib": 0})).world
    world.do(AlterTopic("t", {"retention_us": 1}))
    world.turn(1)
    world.retain()
    assert len(world.segments()) == 1
