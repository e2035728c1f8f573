"""Trials of dead letters: one delivery to one member, and a letter again unless it is
processed.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld
from txmq.core import machine
from txmq.core.consumers.commands import (
    LeaveGroup,
    PauseGroup,
    ReportStored,
    ReturnMessages,
    StoredEntry,
)
from txmq.core.consumers.letter_trials import TrialOutcome, TrialReply, TryLetter, outcome_of
from txmq.core.state import attempts, failed_messages, trial_outcomes
from txmq.core.state.failed_rows import FailedKind, FailedMessage
from txmq.errors import RequestRejected
from txmq.model.retry import FailureReport
from txmq.model.units import MINUTE

MEMBERS = ("a", "b")


def dead(mode: str = "concurrent", keys: tuple[int | None, ...] = (None,)) -> ConsumersWorld:
    """Two members of a group; the first message of the topic is a dead letter."""
    world = ConsumersWorld(t=2)
    world.publish("t", *keys)
    for name in MEMBERS:
        world.join(name, mode=mode, retry=QUICK)
    for name in MEMBERS:
        if world.fetch(name):
            world.nack(name, 0, dead=True)
            for offset in range(1, len(keys)):
                world.ack(name, (offset, offset + 1))
    assert row(world).kind == FailedKind.LETTER
    return world


def row(world: ConsumersWorld, offset: int = 0) -> FailedMessage:
    group = world.group()
    found = failed_messages.get(world.state, group, (1, 0, offset))
    assert found is not None
    return found


def attempt(world: ConsumersWorld, member: str, offset: int = 0) -> TrialReply | RequestRejected:
    reply: TrialReply | RequestRejected = world.do(TryLetter("g", ("t", 0, offset), member, "ada"))
    return reply


@pytest.mark.parametrize("chosen", MEMBERS)
def test_only_the_chosen_member_gets_the_letter_and_may_process_it(chosen: str) -> None:
    world = dead()
    assert attempt(world, chosen) == TrialReply(1)
    [other] = {*MEMBERS} - {chosen}
    assert world.offsets(other) == []
    assert world.offsets(chosen) == [0]
    world.ack(chosen, (0, 1))
    assert failed_messages.get(world.state, world.group(), (1, 0, 0)) is None


def test_a_start_knows_how_the_last_trials_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_outcomes, "KEPT", 1)
    world = ConsumersWorld(t=1)
    world.join("a", mode="concurrent", retry=QUICK)
    for offset in range(2):
        world.publish("t", None)
        assert world.offsets("a") == [offset]
        world.nack("a", offset, dead=True)
        assert attempt(world, "a", offset) == TrialReply(offset + 1)
        assert world.offsets("a") == [offset]
        world.ack("a", (offset, offset + 1))
    machine.save(world.state)
    for state in (world.state, machine.load(world.state.tables), world.replayed()):
        known: Any = [outcome_of(state, "g", ("t", 0, offset), offset + 1) for offset in range(2)]
        assert known[0].outcome == "unknown"
        assert known[1] == TrialOutcome("processed")


def test_a_failed_trial_is_a_dead_letter_again_without_retries() -> None:
    world = dead()
    attempt(world, "a")
    assert world.offsets("a") == [0]
    world.nack("a", 0)
    after = row(world)
    assert (after.kind, after.number, after.trial_by, after.replays) == (
        FailedKind.LETTER,
        2,
        "",
        1,
    )
    assert (world.offsets("a"), world.offsets("b")) == ([], [])


@pytest.mark.parametrize("state", ["stored", "returned", "dead"])
def test_a_trial_that_a_local_store_would_retry_is_a_dead_letter_again(state: str) -> None:
    world = dead()
    attempt(world, "a")
    assert world.offsets("a") == [0]
    entry = StoredEntry("t", 1, 0, 0, state, 1, 0, FailureReport("E", "text", "print"))
    report = ReportStored("g", "a", world.generation(), b"s" * 16, "host", (entry,))
    assert world.do(report).verdicts == ("settled",)
    assert (row(world).kind, row(world).number, row(world).trial_by) == (FailedKind.LETTER, 2, "")
    assert not any(store.messages for store in world.group().stores.values())
    assert attempts.get(world.state, world.group(), (1, 0, 0)).failures == 2


@pytest.mark.parametrize("end", ["silent", "left with it", "left before"])
def test_a_trial_without_an_answer_is_a_dead_letter_again(end: str) -> None:
    world = dead()
    attempt(world, "a")
    if end != "left before":
        assert world.offsets("a") == [0]
    if end == "silent":
        world.now += 2 * MINUTE
        world.expire()
    else:
        world.do(LeaveGroup("g", "a", "a", lost=True))
    assert world.offsets("b") == [], "not for others, but theirs to find"
    after = row(world)
    assert (after.kind, after.number, after.trial_by) == (FailedKind.LETTER, 2, "")


def test_a_trial_that_was_not_begun_goes_on() -> None:
    world = dead()
    attempt(world, "a")
    assert world.offsets("a") == [0]
    world.do(ReturnMessages("g", "a", world.generation(), (("t", 0, 0, 1),)))
    assert world.offsets("b") == []
    assert world.offsets("a") == [0]
    world.boot()
    assert row(world).trial_by == "a"


def test_a_letter_is_tried_only_where_it_would_be_delivered() -> None:
    world = dead("ordered", (7, 8))
    owner = next(
        name for name, member in world.group().members.items() if (1, 0) in member.partitions
    )
    [other] = {*MEMBERS} - {owner}
    refused = {
        other: f"{other!r} has not this partition",
        "nobody": "'nobody' is not a member",
    }
    for name, text in refused.items():
        answer = attempt(world, name)
        assert isinstance(answer, RequestRejected)
        assert text in answer.message
    missing = attempt(world, owner, 1)
    assert isinstance(missing, RequestRejected)
    world.do(PauseGroup("g", paused=True))
    paused = attempt(world, owner)
    assert isinstance(paused, RequestRejected)
    assert "the group is paused" in paused.message
    world.do(PauseGroup("g", paused=False))
    world.publish("t", 7)
    assert world.offsets(owner) == [], "its key waits"
    assert attempt(world, owner) == TrialReply(1)
    again = attempt(world, owner)
    assert isinstance(again, RequestRejected)
    assert "not dead" in again.message
    assert world.offsets(owner) == [0]
    world.nack(owner, 0)
    assert row(world, 2).kind == FailedKind.PARKED, "its key still waits"
    attempt(world, owner)
    assert world.offsets(owner) == [0]
    world.ack(owner, (0, 1))
    assert world.offsets(owner) == [2]
