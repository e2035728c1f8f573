"""Decisions by hand that a database has yet to confirm."""

from __future__ import annotations

import pytest

from tests.core.driver import Driver, token
from txmq.core.events.outcome import Outcome
from txmq.core.retention.outcome_expiry import ExpireOutcomes
from txmq.core.transactions import indexes, queries, unverified
from txmq.core.transactions.indexes import ListKind
from txmq.core.transactions.model import get
from txmq.core.transactions.unverified import CompareDecision, ForceDecision
from txmq.core.transactions.xa import DecideByHand
from txmq.errors import RequestRejected
from txmq.model.decider import ByChecker, ByPostgres, Decider
from txmq.model.message import Decision
from txmq.model.units import DAY

POSTGRES = ByPostgres(1, 1, 5, None, 1)
COMMIT, ROLLBACK = Decision.COMMIT, Decision.ROLLBACK


def forced(core: Driver, outcome: Decision, decider: Decider = POSTGRES) -> bytes:
    name = token(core, 1)
    core.store(name, [("t", 0, "k", "m")], decider)
    by_hand = DecideByHand(name, outcome, "ada", "the disk is lost", b"l" * 16)
    assert not isinstance(core.do(ForceDecision(by_hand)), RequestRejected)
    return name


def listed(core: Driver) -> list[bytes]:
    found = list(indexes.listed_tokens(core.state, ListKind.UNVERIFIED))
    assert found == list(indexes.listed_tokens(core.replayed(), ListKind.UNVERIFIED))
    return found


def expire(core: Driver) -> None:
    step: object = ExpireOutcomes()
    while isinstance(step, ExpireOutcomes):
        step = core.do(step)


@pytest.mark.parametrize("found", [COMMIT, ROLLBACK])
@pytest.mark.parametrize("outcome", [COMMIT, ROLLBACK])
def test_a_forced_decision_is_compared_and_a_contradiction_recorded(
    core: Driver, outcome: Decision, found: Decision
) -> None:
    name = forced(core, outcome)
    assert listed(core) == [name]
    state = get(core.state, name)
    for _ in range(2):
        core.do(CompareDecision(name, found, "resolver shop", "its row"))
    assert (listed(core), get(core.state, name)) == ([], state)
    recorded = [(one.asked, one.by) for one in queries.recorded_conflicts(core.state, name)]
    assert recorded == ([] if found is outcome else [(found, "resolver shop")])


def test_only_databases_are_asked_afterwards(core: Driver) -> None:
    forced(core, COMMIT, ByChecker("billing"))
    assert listed(core) == []


def test_a_forced_decision_keeps_its_token_row_and_its_outcome_until_it_is_compared(
    core: Driver,
) -> None:
    name = forced(core, ROLLBACK)
    assert indexes.oldest_by_database(core.state) == {POSTGRES.database: name}
    core.now += 30 * DAY
    expire(core)
    assert get(core.state, name) is not None
    core.do(CompareDecision(name, ROLLBACK, "resolver shop", ""))
    assert indexes.oldest_by_database(core.state) == {}
    expire(core)
    assert get(core.state, name) is None
    assert (
        unverified.compare_decision(
            core.state, CompareDecision(name, COMMIT, "resolver shop", ""), core.now
        )
        == Outcome()
    )
