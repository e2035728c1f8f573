"""A time in doubt removes nothing and refuses nobody; and the way back."""

from __future__ import annotations

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld, Received
from tests.core.driver import Driver, token
from tests.core.due import due_checks
from tests.core.retention.test_topic_retention import first, retain, same_after_replay
from txmq.core import persistence
from txmq.core.consumers.commands import ExpireLeases
from txmq.core.retention.broker_time import TOLERATED_US, NoteTime, doubt_at_start
from txmq.core.transactions.decisions import DecideTransaction
from txmq.core.transactions.model import get
from txmq.errors import RequestRejected, UnknownTransaction
from txmq.model.decider import ByPostgres
from txmq.model.message import Decision
from txmq.model.units import DAY, SECOND

POSTGRES = ByPostgres(1, 1, 5, 7, 1)


def store(core: Driver, name: bytes) -> object:
    return core.store(name, [("t", 0, None, "x")], POSTGRES)


@pytest.mark.parametrize(
    ("wall", "doubted"),
    [(TOLERATED_US, 0), (3 * DAY, 3 * DAY), (-TOLERATED_US, 0), (-30 * DAY, 30 * DAY)],
)
def test_a_start_doubts_the_later_of_log_and_clock(core: Driver, wall: int, doubted: int) -> None:
    store(core, token(core, 1))
    wall += core.now
    assert doubt_at_start(core.state, wall, max(wall, core.now)) == doubted


def test_a_new_log_doubts_nothing(core: Driver) -> None:
    assert doubt_at_start(Driver().state, core.now, core.now) == 0


def test_a_restart_does_not_end_a_doubt(core: Driver) -> None:
    store(core, token(core, 1))
    core.now += 30 * DAY
    core.do(NoteTime(30 * DAY))
    core.now += SECOND
    assert doubt_at_start(core.state, core.now, core.now) == 30 * DAY + SECOND
    persistence.save(core.state)
    assert persistence.load(core.state.tables).doubted == 30 * DAY


def test_retention_waits_while_the_time_is_in_doubt() -> None:
    world = ConsumersWorld(t=1)
    world.publish("t", None, None)
    world.now += 30 * DAY
    world.do(NoteTime(30 * DAY))
    retain(world, days=1)
    assert first(world) == 0
    world.do(NoteTime(0))
    retain(world, days=1)
    assert first(world) == 2
    assert same_after_replay(world)


def test_outcomes_stay_and_no_token_is_refused_while_the_time_is_in_doubt(core: Driver) -> None:
    old, right = token(core, 1), token(core, 2)
    store(core, old)
    core.do(DecideTransaction(old, Decision.COMMIT, "producer"))
    core.now += 30 * DAY
    core.do(NoteTime(30 * DAY))
    core.sweep()
    assert get(core.state, old) is not None
    assert not isinstance(store(core, right), RequestRejected)


def test_tokens_made_after_a_wrong_expiry_are_taken_and_earlier_ones_refused(
    core: Driver,
) -> None:
    """While a wrong clock was believed, outcomes were forgotten, and all refused."""
    true = core.now
    forgotten, retried = token(core, 1), token(core, 2)
    store(core, forgotten)
    core.do(DecideTransaction(forgotten, Decision.COMMIT, "producer"))
    core.now += 30 * DAY
    core.sweep()
    assert get(core.state, forgotten) is None
    core.now = true + 10 * SECOND
    again = token(core, 3)
    core.now = true + 30 * DAY + 10 * SECOND
    core.do(NoteTime(doubt_at_start(core.state, true + 10 * SECOND, core.now)))
    for late in (forgotten, retried):
        refused = store(core, late)
        assert type(refused) is UnknownTransaction
    assert not isinstance(store(core, again), RequestRejected)


def test_a_time_set_back_lets_leases_retries_and_check_backs_wait_for_as_long_as_before() -> None:
    world = ConsumersWorld(t=1)
    world.now += 30 * DAY
    half = token(world, 1)
    world.store(half, [("t", 0, None, "x")], POSTGRES, check_after=6 * SECOND)
    world.publish("t", 1, 2)
    world.join("a", retry=QUICK, lease_us=30 * SECOND)
    world.fetch("a")
    world.nack("a", 1, delay=4 * SECOND)
    world.do(NoteTime(0, back=30 * DAY))
    world.now -= 30 * DAY
    assert world.state.stored_at == world.now
    world.now += 4 * SECOND - 1
    assert world.fetch("a") == []
    world.now += 1
    assert world.fetch("a") == [Received("t", 0, 1, 2)]
    world.now += 2 * SECOND - 1
    assert list(due_checks(world.state, world.now, 9)) == []
    assert list(due_checks(world.state, world.now + 1, 9)) == [half]
    world.now += 24 * SECOND
    assert world.do(ExpireLeases(world.now)).expired == 0
    world.now += 1
    assert world.do(ExpireLeases(world.now)).expired == 1
    assert same_after_replay(world)


def test_a_time_set_forward_ends_no_lease_and_lets_nothing_wait_for_longer() -> None:
    """As after a machine was paused by its host: its members are alive."""
    world = ConsumersWorld(t=1)
    world.publish("t", 1, 2)
    world.join("a", retry=QUICK, lease_us=30 * SECOND)
    world.fetch("a")
    world.nack("a", 1, delay=4 * SECOND)
    world.do(NoteTime(3 * DAY, back=-3 * DAY))
    world.now += 3 * DAY
    assert world.state.stored_at == world.now
    assert world.fetch("a") == [Received("t", 0, 1, 2)]
    world.now += 30 * SECOND - 1
    assert world.do(ExpireLeases(world.now)).expired == 0
    assert same_after_replay(world)
