"""A machine's clock that jumps by days, and what confirms it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.support import BrokerInMemory, FakeResolver
from txmq.broker.background.clock_service import AGREED_S, UNREAD
from txmq.broker.checkback.resolvers import ResolverStatus
from txmq.core.retention.broker_time import CONFIRMED_S, NoteTime
from txmq.core.transactions.decisions import DecideTransaction
from txmq.model.message import Decision, Message
from txmq.model.units import DAY, MINUTE, SECOND

AHEAD = 30 * DAY


class ClockWorld:
    """A broker whose machine's clock is set, and databases with clocks of their own."""

    def __init__(self) -> None:
        self.oracle = FakeResolver()
        self.databases: dict[str, int] = {}  # how far their clocks are ahead
        self.broker = BrokerInMemory(self.oracle)
        self.broker.start()
        self.broker.pass_time(1)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, in seconds as the service looks."""
        for _ in range(int(seconds)):
            now = self.broker.now()
            self.oracle.is_like = tuple(
                ResolverStatus(name, now, 0, "", 0, "", time=now + SECOND + ahead)
                for name, ahead in self.databases.items()
            )
            self.broker.clock.advance(1)

    @property
    def wrong(self) -> int:
        """Microseconds by which the broker's time is ahead of the true one."""
        return self.broker.engine.now() - self.broker.now()

    @property
    def doubted(self) -> int:
        return self.broker.engine.state.doubted

    def shown(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.broker.ask("clock.show")
        return shown

    def confirm(self) -> dict[str, Any]:
        shown: dict[str, Any] = self.broker.ask("clock.confirm", operator="ada", reason="looked")
        return shown


@pytest.fixture
def world() -> ClockWorld:
    return ClockWorld()


@pytest.mark.parametrize("ahead", [AHEAD, 2 * MINUTE])
def test_a_clock_that_is_ahead_for_two_seconds_changes_nothing(
    world: ClockWorld, ahead: int
) -> None:
    world.broker.wall_wrong = ahead
    world.pass_time(2)
    assert (world.wrong, world.shown()["believed"]) == (0, False)
    token = world.broker.half(1, Message(b"m"))
    world.broker.wall_wrong = 0
    world.pass_time(2)
    assert (world.wrong, world.shown()["believed"], world.doubted) == (0, True, 0)
    world.broker.do(DecideTransaction(bytes.fromhex(token), Decision.COMMIT, "producer"))
    assert world.broker.engine.state.stored_at <= world.broker.now()


def test_databases_that_all_agree_for_a_minute_confirm_a_clock_but_what_cannot_be_undone_waits(
    world: ClockWorld,
) -> None:
    world.databases = {"shop": AHEAD, "bank": 0}
    world.broker.wall_wrong = AHEAD
    world.pass_time(2 * AGREED_S)
    assert world.wrong == 0, "one of them says otherwise"
    world.databases["bank"] = AHEAD
    world.pass_time(AGREED_S - 5)
    assert world.wrong == 0
    world.pass_time(10)
    assert world.wrong == AHEAD == world.doubted
    world.pass_time(CONFIRMED_S - 30)
    assert world.doubted == AHEAD
    world.pass_time(60)
    assert world.doubted == 0


def test_an_operator_confirms_a_clock_at_once(world: ClockWorld) -> None:
    world.broker.wall_wrong = AHEAD
    world.pass_time(2)
    shown = world.confirm()
    assert (world.wrong, world.doubted, shown["believed"]) == (AHEAD, 0, True)


def test_a_clock_that_databases_contradict_is_confirmed_by_force_only(world: ClockWorld) -> None:
    world.databases = {"shop": 0, "bank": AHEAD}
    world.broker.wall_wrong = AHEAD
    world.pass_time(2)
    refused = world.broker.ask("clock.confirm", operator="ada", reason="looked")
    assert refused.message == "the clocks of shop are not near this machine's"
    assert "--force" in refused.hint
    assert world.wrong == 0
    world.broker.ask("clock.confirm", operator="ada", reason="looked", force=True)
    assert world.wrong == AHEAD


@pytest.mark.parametrize("who", ["operator", "database"])
def test_a_time_that_was_ahead_goes_back_once_it_is_confirmed(world: ClockWorld, who: str) -> None:
    """So ends the doubt about a log with times of the future."""
    world.broker.wall_wrong = AHEAD
    world.confirm()
    world.broker.wall_wrong = 0
    world.pass_time(10)
    assert world.wrong > AHEAD - 2 * SECOND
    assert world.doubted > AHEAD - 2 * SECOND, "what cannot be undone waits"
    assert world.broker.engine.certain() <= world.broker.now()
    if who == "operator":
        world.confirm()
    else:
        world.databases = {"shop": 0}
        world.pass_time(2 * AGREED_S)
    assert abs(world.wrong) <= SECOND
    assert world.doubted < MINUTE, "what was lost while the broker's time was slower"
    assert world.broker.engine.state.stored_at <= world.broker.now()
    assert world.broker.half(1, Message(b"m"))
    assert world.shown()["believed"]


def test_a_doubt_ends_when_the_clock_was_steady_for_an_hour(world: ClockWorld) -> None:
    world.broker.do(NoteTime(3 * DAY))
    assert world.broker.engine.certain() == world.broker.now() - 3 * DAY
    world.pass_time(CONFIRMED_S / 2)
    world.broker.wall_wrong = AHEAD
    world.pass_time(2)
    world.broker.wall_wrong = 0
    world.pass_time(CONFIRMED_S - 10)
    assert world.doubted == 3 * DAY, "the hour began anew"
    assert 0 < world.shown()["certain_after_s"] <= 20
    world.pass_time(20)
    assert world.doubted == 0
    assert world.shown()["certain_after_s"] is None


def test_a_database_whose_clock_is_not_known_yet_is_named_with_the_reason(
    world: ClockWorld,
) -> None:
    world.oracle.is_like = (
        ResolverStatus("new", 0, 0, "", 0, ""),
        ResolverStatus("away", 0, 1, "connection refused", 0, ""),
        ResolverStatus("shop", 1, 0, "", 0, "", time=world.broker.now()),
    )
    shown = world.shown()
    assert [one["name"] for one in shown["databases"]] == ["shop"]
    assert shown["not_compared"] == [
        {"name": "new", "reason": UNREAD},
        {"name": "away", "reason": "connection refused"},
    ]
