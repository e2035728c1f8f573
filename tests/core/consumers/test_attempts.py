"""The history of a failed message: bounded, and kept by a replay."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.consumers.world import ConsumersWorld
from txmq.core.consumers.commands import (
    AlterGroup,
    NackMessage,
    ReplayLetters,
    RequestedSettings,
    ResetPosition,
)
from txmq.core.consumers.message_lives import in_group
from txmq.core.events.letters import HistoriesForgotten
from txmq.core.retention import past_failures
from txmq.core.retention.outcome_expiry import KINDS, ExpireOutcomes
from txmq.core.state import attempts
from txmq.core.state.attempts import KEPT_LAST, MAX_TEXT, Attempt, History
from txmq.core.state.failed_rows import FailedKind, FailedMessage
from txmq.model.retry import FailureReport, RetryPolicy
from txmq.model.units import SECOND
from txmq.store.tables import ATTEMPTS, FAILED, FAILED_KEY

PLACE = (1, 0, 0)


@pytest.fixture
def world() -> ConsumersWorld:
    world = ConsumersWorld(t=1)
    world.publish("t", 7, 8)
    world.join("a", retry=RetryPolicy((1,)))
    world.fetch("a")
    return world


def fail(world: ConsumersWorld, text: str = "text", *, offset: int = 0, **options: Any) -> Any:
    generation = world.generation()
    failure = FailureReport("E", text, "print")
    return world.do(NackMessage("g", "a", generation, "t", 0, offset, 7, None, failure, **options))


def history(world: ConsumersWorld) -> History:
    return attempts.get(world.state, world.group(), PLACE)


def redeliver(world: ConsumersWorld) -> None:
    world.now += 2 * SECOND
    assert world.fetch("a")


def test_each_failure_is_kept_with_its_time_consumer_and_error(world: ConsumersWorld) -> None:
    first = world.now
    fail(world, "one")
    redeliver(world)
    fail(world, "two")
    assert history(world) == History(
        2,
        (
            Attempt(first, 1, 0, "a", "E", "one", "print"),
            Attempt(world.now, 2, 0, "a", "E", "two", "print"),
        ),
    )


def test_a_replay_begins_no_new_history(world: ConsumersWorld) -> None:
    fail(world, "one", dead=True)
    for _ in range(3):
        world.do(ReplayLetters("g", (("t", 0, 0),)))
        redeliver(world)
        fail(world, "again", dead=True)
    found = history(world)
    assert [(one.replays, one.error_text) for one in found.attempts] == [
        (0, "one"), (1, "again"), (2, "again"), (3, "again"),
    ]  # fmt: skip


def test_the_first_and_the_last_failures_are_kept(world: ConsumersWorld) -> None:
    for number in range(30):
        fail(world, str(number), dead=True)
        world.do(ReplayLetters("g", (("t", 0, 0),)))
        redeliver(world)
    found = history(world)
    assert found.failures == 30
    assert [one.error_text for one in found.attempts] == [
        "0", *map(str, range(30 - KEPT_LAST, 30))
    ]  # fmt: skip


def test_of_a_long_text_the_end_is_kept(world: ConsumersWorld) -> None:
    fail(world, "x" * 3_000 + "the error")
    [one] = history(world).attempts
    assert len(one.error_text) == MAX_TEXT
    assert one.error_text.startswith("…")
    assert one.error_text.endswith("the error")


def test_a_postponed_message_has_not_failed(world: ConsumersWorld) -> None:
    fail(world, postpone=True)
    assert history(world) == History()


def test_the_history_ends_when_the_message_is_processed(world: ConsumersWorld) -> None:
    fail(world)
    redeliver(world)
    world.ack("a", (0, 1))
    assert history(world) == History()
    assert not len(world.state.tables[ATTEMPTS])  # type: ignore[arg-type]


def test_a_dead_letter_keeps_its_history_when_it_is_processed(world: ConsumersWorld) -> None:
    fail(world, "one", dead=True)
    world.do(ReplayLetters("g", (("t", 0, 0),)))
    redeliver(world)
    fail(world, "two")
    redeliver(world)
    world.ack("a", (0, 1))
    life = in_group(world.state, world.group(), PLACE, 7, 0)
    assert life["state"] == "settled"
    assert [one["error_text"] for one in life["history"]] == ["one", "two"]
    assert past_failures.find_over(world.state, b"", 10) == (None, None)
    world.state.topics_by_id[1].start_offsets[0] = 1
    found, _following = past_failures.find_over(world.state, b"", 10)
    assert found == HistoriesForgotten((FAILED_KEY.pack(1, *PLACE),))
    world.do(ExpireOutcomes(kind=len(KINDS) - 1))
    assert history(world) == History()


def test_the_history_of_a_letter_stays_as_long_as_the_letter(world: ConsumersWorld) -> None:
    fail(world, "one", dead=True)
    world.state.topics_by_id[1].start_offsets[0] = 1
    assert past_failures.find_over(world.state, b"", 10) == (None, None)


def test_the_history_ends_when_the_group_is_reset(world: ConsumersWorld) -> None:
    fail(world)
    world.do(ResetPosition("g", "t", "first"))
    assert not len(world.state.tables[ATTEMPTS])  # type: ignore[arg-type]


def test_a_message_without_failures_has_no_row(world: ConsumersWorld) -> None:
    world.ack("a", (0, 2))
    assert not len(world.state.tables[ATTEMPTS])  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["ValueError: one", ""])
def test_a_message_whose_attempts_an_operator_took_away_has_not_died(
    world: ConsumersWorld, text: str
) -> None:
    fail(world, text)
    world.do(AlterGroup("g", RequestedSettings(retry=RetryPolicy((1,), retries=0))))
    world.now += 2 * SECOND
    assert world.offsets("a") == []
    stored: Any = world.state.tables[FAILED].get(FAILED_KEY.pack(1, *PLACE))
    row = FailedMessage(*stored)
    assert (row.kind, row.error_type, row.error_text) == (FailedKind.LETTER, "E", text)
    assert [one.error_type for one in history(world).attempts] == ["E"]


def test_a_message_that_kills_its_consumers_has_their_deaths(world: ConsumersWorld) -> None:
    world.publish("t", 7)
    world.join("a", retry=RetryPolicy((1,), retries=0))
    died = 0
    while not world.group().letters and died < 10:
        died += 1
        world.now += 3600 * SECOND
        world.expire()
        for member in ("a", "b"):
            world.join(member)
        world.fetch("a")
    rows: Any = world.state.tables[FAILED].range(b"")
    dead = [FAILED_KEY.unpack(key)[1:] for key, row in rows if FailedMessage(*row).dead_at]
    assert dead, "it kills whoever gets it"
    for place in dead:
        found = attempts.get(world.state, world.group(), place)
        assert [one.error_type for one in found.attempts] == ["consumer died"]
