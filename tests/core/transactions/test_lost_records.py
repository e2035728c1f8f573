"""Lost records: what they may have decided is not decided from absence."""

from __future__ import annotations

import pytest

from tests.core.driver import Driver, token
from txmq.core import machine
from txmq.core.events.base import Booted
from txmq.core.state.state import State
from txmq.core.transactions import indexes, jobs, lost_records
from txmq.core.transactions.decisions import DecideTransaction
from txmq.core.transactions.model import get
from txmq.core.transactions.xa import DecideByHand, ResolveOutcome
from txmq.errors import RequestRejected, UnknownTransaction
from txmq.model.bundle import BundleState
from txmq.model.decider import ByBroker, ByHome, ByJob, ByPostgres
from txmq.model.message import Decision
from txmq.model.units import SECOND
from txmq.store.tables import MemoryTables

LOG = b"l" * 16


def home(core: Driver, number: int) -> bytes:
    name = token(core, number)
    core.store(name, [("t", 0, "k", str(number))], ByHome(LOG, name))
    return name


def lose(core: Driver) -> None:
    """Lose a span of the log and start the broker again."""
    core.end += 4_096
    lost_records.apply_lost(core.state, core.end)
    core.now += SECOND
    core.record(Booted(2, "b"))


def ask(core: Driver, name: bytes, *, decide: bool = True) -> object:
    reply = core.do(ResolveOutcome(name, LOG, decide, "recovery"))
    return type(reply) if isinstance(reply, RequestRejected) else reply


@pytest.mark.parametrize("decide", [True, False])
def test_an_outcome_that_may_have_been_lost_is_not_made_up(core: Driver, *, decide: bool) -> None:
    before, lost_one = home(core, 1), token(core, 2)
    lose(core)
    assert ask(core, before, decide=decide) == (
        UnknownTransaction if decide else BundleState.UNDECIDED
    )
    assert ask(core, lost_one, decide=decide) is UnknownTransaction
    stored = get(core.state, before)
    assert stored is not None
    assert stored.state is BundleState.UNDECIDED
    assert get(core.state, lost_one) is None


def test_what_is_stored_after_the_loss_is_decided_as_ever(core: Driver) -> None:
    lose(core)
    core.now += 2 * lost_records.CLOCK_SKEW
    after, unheard_of = home(core, 1), token(core, 2)
    assert ask(core, after) is BundleState.ROLLED_BACK
    assert ask(core, unheard_of) is BundleState.ROLLED_BACK


def test_an_operator_and_the_producer_can_still_decide(core: Driver) -> None:
    by_hand, by_producer = home(core, 1), home(core, 2)
    lose(core)
    assert core.do(DecideByHand(by_hand, Decision.COMMIT, "ada", "the rows are there", LOG)).state
    assert core.do(DecideTransaction(by_producer, Decision.COMMIT, "producer")).state
    assert core.bodies("t") == ["1", "2"]


def test_a_loss_is_remembered_in_the_tables(core: Driver) -> None:
    name = home(core, 1)
    lose(core)
    machine.save(core.state)
    state = machine.load(core.state.tables)
    row = get(state, name)
    assert row is not None
    assert lost_records.may_have_lost_decision(state, row)
    assert lost_records.may_have_lost_transaction(state, token(core, 3))


def busy(core: Driver) -> None:
    """Record sends, halves, a large bundle and a job, decided one after the other."""
    halves = [token(core, number) for number in (1, 2)]
    for name in halves:
        core.store(name, [("t", 0, "a", name.hex())], ByPostgres(1, 1, 5, 7, 1))
    core.send("t", "queued", key="a")
    core.send("t", "plain")
    for name in reversed(halves):
        core.do(DecideTransaction(name, Decision.COMMIT, "producer"))
    large, job, winner = token(core, 3), token(core, 50), token(core, 4)
    for part in (0, 1):
        core.store(
            large,
            [("t", 0, "b", str(part))],
            ByBroker(),
            part=part,
            sealed=part == 1,
            commit=part == 1,
        )
    core.work_off()
    core.store(winner, [("t", 1, "c", "won")], ByJob(job))
    core.do(jobs.DecideJob(job, Decision.COMMIT, (winner,), "driver"))


def test_whatever_record_is_lost_the_rest_is_folded_and_nothing_is_decided_that_was_not(
    core: Driver,
) -> None:
    busy(core)
    whole = {
        name for name, row in core.state.transactions.range(b"") if row[0] == BundleState.PUBLISHED
    }
    assert len(whole) == 4
    left_out = 0
    for missing in range(len(core.log)):
        state = State(MemoryTables())
        for number, (place, event) in enumerate(core.log):
            if number == missing:
                lost_records.apply_lost(state, place.end)
            else:
                left_out += not machine.apply_after_loss(state, event, place)
        states = {name: row[0] for name, row in state.transactions.range(b"")}
        assert BundleState.ROLLED_BACK not in states.values()
        rows = [get(state, name) for name in indexes.undecided_tokens(state)]
        assert all(
            row is not None and lost_records.may_have_lost_decision(state, row) for row in rows
        )
    assert 0 < left_out < len(core.log) ** 2 / 4
