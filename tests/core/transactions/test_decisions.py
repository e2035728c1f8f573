"""Decisions: compare-and-set, order tickets, jobs."""

from __future__ import annotations

import pytest

from tests.core.driver import Driver, token
from tests.core.due import due_checks
from txmq.batch import encode, verify
from txmq.core.retention import outcome_expiry
from txmq.core.topics import stored_for_jobs
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic, DeleteTopic, GrowTopic
from txmq.core.transactions import decisions, jobs, large_bundles, timers
from txmq.core.transactions.large_bundles import LargeBundle
from txmq.core.transactions.model import OUTCOME_RETENTION, Transaction, get
from txmq.errors import (
    Conflict,
    DigestMismatch,
    SequenceGap,
    StaleTopic,
    UnknownProducer,
    UnknownTransaction,
)
from txmq.model.bundle import TRANSITIONS, BundleState, DecideReceipt, Transition
from txmq.model.decider import ByBroker, ByJob, ByPostgres
from txmq.model.message import Decision, Message
from txmq.model.units import SECOND
from txmq.store.tables import HOLDS, QUEUED, UNDECIDED

POSTGRES = ByPostgres(1, 1, 5, 7, 1)
LOCAL = ByBroker()


def half(core: Driver, number: int, *keys: str | None) -> bytes:
    name = token(core, number)
    core.store(name, [("t", 0, key, f"{number}:{key}") for key in keys], POSTGRES)
    return name


def decide(core: Driver, name: bytes, outcome: Decision = Decision.COMMIT) -> object:
    return core.do(decisions.DecideTransaction(name, outcome, "producer"))


def test_a_half_message_is_invisible_until_it_is_committed(core: Driver) -> None:
    name = half(core, 1, "a")
    assert core.bodies("t") == []
    assert decide(core, name) == DecideReceipt(BundleState.PUBLISHED, repeated=False)
    assert core.bodies("t") == ["1:a"]
    assert core.state.undecided == 0
    assert not list(core.state.tables[UNDECIDED].range(b""))


def test_a_rolled_back_half_is_never_seen_and_holds_nothing(core: Driver) -> None:
    name = half(core, 1, "a")
    decide(core, name, Decision.ROLLBACK)
    core.send("t", "x", key="a")
    assert core.bodies("t") == ["x"]
    assert not list(core.state.tables[HOLDS].range(b""))


def test_the_same_decision_again_changes_nothing(core: Driver) -> None:
    name = half(core, 1, "a")
    decide(core, name)
    recorded = len(core.log)
    assert decide(core, name) == DecideReceipt(BundleState.PUBLISHED, repeated=True)
    assert len(core.log) == recorded


@pytest.mark.parametrize("first", [Decision.COMMIT, Decision.ROLLBACK])
def test_the_other_decision_is_refused_and_kept(core: Driver, first: Decision) -> None:
    name = half(core, 1, "a")
    decide(core, name, first)
    before = get(core.state, name)
    other = Decision.ROLLBACK if first is Decision.COMMIT else Decision.COMMIT
    refused = decide(core, name, other)
    assert type(refused) is Conflict
    assert get(core.state, name) == before
    assert len(list(core.state.tables["conflicts"].range(b""))) == 1


def test_halves_of_one_key_are_published_in_the_order_they_were_stored(core: Driver) -> None:
    first, second = half(core, 1, "a"), half(core, 2, "a")
    assert decide(core, second) == DecideReceipt(BundleState.COMMITTED, repeated=False)
    assert core.bodies("t") == []
    decide(core, first)
    assert core.bodies("t") == ["1:a", "2:a"]


def test_a_producer_whose_clock_is_a_day_off_keeps_its_place(core: Driver) -> None:
    day_ms = 24 * 3600 * 1_000
    names = [
        (core.now // 1_000 + off * day_ms).to_bytes(6, "big") + number.to_bytes(10, "big")
        for number, off in enumerate((1, -1, 0))
    ]
    for number, name in enumerate(names):
        core.store(name, [("t", 0, "a", str(number))], POSTGRES)
    rows = [row for name in names if (row := get(core.state, name)) is not None]
    assert [row.check_at - row.stored_at for row in rows] == [6 * SECOND] * 3
    for name in reversed(names):
        decide(core, name)
    assert core.bodies("t") == ["0", "1", "2"]


def test_a_rollback_sets_free_what_waited_behind_it(core: Driver) -> None:
    first, second = half(core, 1, "a"), half(core, 2, "a")
    decide(core, second)
    decide(core, first, Decision.ROLLBACK)
    assert core.bodies("t") == ["2:a"]


def test_other_keys_do_not_wait(core: Driver) -> None:
    half(core, 1, "a")
    second = half(core, 2, "b")
    decide(core, second)
    core.send("t", "plain", key="c")
    core.send("t", "keyless")
    assert core.bodies("t") == ["2:b", "plain", "keyless"]


def test_a_plain_send_of_a_held_key_queues_and_keeps_its_place(core: Driver) -> None:
    name = half(core, 1, "a")
    assert core.send("t", "x", key="a").offset == -1
    later = half(core, 2, "a")
    decide(core, later)
    assert core.send("t", "y", key="a").offset == -1
    decide(core, name)
    assert core.bodies("t") == ["1:a", "x", "2:a", "y"]
    assert not list(core.state.tables[QUEUED].range(b""))
    assert not core.state.held_keys


def test_a_chain_over_several_keys_is_released_whole(core: Driver) -> None:
    one, two, three = half(core, 1, "a"), half(core, 2, "a", "b"), half(core, 3, "b", "c")
    decide(core, three)
    decide(core, two)
    assert core.bodies("t") == []
    decide(core, one)
    assert core.bodies("t") == ["1:a", "2:a", "2:b", "3:b", "3:c"]


def test_a_bundle_is_one_event_whole_or_not_at_all(core: Driver) -> None:
    name = token(core, 1)
    core.store(name, [("t", 0, None, "m"), ("t", 1, None, "n"), ("t", 0, None, "o")], POSTGRES)
    recorded = len(core.log)
    decide(core, name)
    assert len(core.log) == recorded + 1
    assert (core.bodies("t", 0), core.bodies("t", 1)) == (["m", "o"], ["n"])


def test_a_local_transaction_is_published_as_it_is_stored(core: Driver) -> None:
    receipt = core.store(token(core, 1), [("t", 0, "a", "m"), ("t", 1, "b", "n")], LOCAL)
    assert receipt.state is BundleState.PUBLISHED
    assert receipt.offsets == (0, 0)
    assert (core.bodies("t", 0), core.bodies("t", 1)) == (["m"], ["n"])


def test_a_local_transaction_waits_behind_a_half_of_its_key(core: Driver) -> None:
    name = half(core, 1, "a")
    receipt = core.store(token(core, 2), [("t", 0, "a", "m"), ("t", 1, "b", "n")], LOCAL)
    assert receipt.state is BundleState.COMMITTED
    assert core.bodies("t", 1) == []
    decide(core, name)
    assert (core.bodies("t", 0), core.bodies("t", 1)) == (["1:a", "m"], ["n"])


def test_parts_make_a_bundle_only_with_the_seal(core: Driver) -> None:
    name = token(core, 1)
    core.store(name, [("t", 0, "a", "m")], POSTGRES, sealed=False)
    refused = decide(core, name)
    assert type(refused) is Conflict
    assert type(core.store(name, [("t", 0, "a", "o")], POSTGRES, part=2)) is SequenceGap
    core.store(name, [("t", 0, "a", "n")], POSTGRES, part=1)
    decide(core, name)
    core.work_off()
    assert core.bodies("t") == ["m", "n"]


def test_the_same_token_again_gets_the_same_answer_and_other_contents_are_refused(
    core: Driver,
) -> None:
    name = half(core, 1, "a")
    recorded = len(core.log)
    assert core.store(name, [("t", 0, "a", "1:a")], POSTGRES).state is BundleState.UNDECIDED
    assert (
        type(core.store(name, [("t", 0, "a", "other")], POSTGRES, digest=b"e" * 32))
        is DigestMismatch
    )
    assert len(core.log) == recorded


def test_an_unknown_or_too_old_token_is_refused(core: Driver) -> None:
    assert type(decide(core, token(core, 9))) is UnknownTransaction
    old = token(core, 1)
    core.now += OUTCOME_RETENTION + SECOND
    assert type(core.store(old, [("t", 0, None, "m")], POSTGRES)) is UnknownTransaction


def test_outcomes_are_forgotten_after_a_week_but_never_an_undecided_half(core: Driver) -> None:
    done, open_ = half(core, 1, "a"), half(core, 2, "b")
    decide(core, done)
    core.now += OUTCOME_RETENTION + SECOND
    core.sweep()
    assert get(core.state, done) is None
    assert get(core.state, open_) is not None
    decide(core, open_)
    assert core.bodies("t") == ["1:a", "2:b"]


def test_a_sweep_gets_past_what_it_must_keep(core: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome_expiry, "STEP_ROWS", 3)
    for number in range(7):
        half(core, number, None)
    done = [half(core, number, None) for number in range(7, 12)]
    for name in done:
        decide(core, name)
    core.now += OUTCOME_RETENTION + SECOND
    steps = core.sweep()
    assert [get(core.state, name) for name in done] == [None] * 5
    assert core.state.undecided == 7
    assert core.sweep() == steps - 3  # what is behind it is not looked at again


def test_a_job_publishes_its_winners_and_drops_all_others(core: Driver) -> None:
    job = token(core, 50)
    names = [token(core, number) for number in (1, 2, 3)]
    for number, name in enumerate(names):
        core.store(name, [("t", 0, "k", str(number))], ByJob(job))
    reply = core.do(jobs.DecideJob(job, Decision.COMMIT, (names[2], names[0]), "driver"))
    assert reply == jobs.JobReceipt(Decision.COMMIT, repeated=False)
    assert core.bodies("t") == ["2", "0"]
    again = core.do(jobs.DecideJob(job, Decision.COMMIT, (names[1],), "driver"))
    assert again == jobs.JobReceipt(Decision.COMMIT, repeated=True)
    late = core.store(token(core, 4), [("t", 0, "k", "late")], ByJob(job))
    assert late.state is BundleState.ROLLED_BACK
    assert core.bodies("t") == ["2", "0"]


def test_a_job_waits_behind_halves_of_its_keys(core: Driver) -> None:
    name, job = half(core, 1, "k"), token(core, 50)
    tasks = [token(core, 2), token(core, 3)]
    for task in tasks:
        core.store(task, [("t", 0, "k", task.hex()[-1])], ByJob(job))
    core.do(jobs.DecideJob(job, Decision.COMMIT, tuple(tasks), "driver"))
    core.send("t", "after", key="k")
    assert core.bodies("t") == []
    decide(core, name)
    assert core.bodies("t") == ["1:k", "2", "3", "after"]


def test_check_backs_are_due_until_the_decision(core: Driver) -> None:
    name = half(core, 1, "a")
    assert list(due_checks(core.state, core.now + 5 * SECOND, 10)) == []
    assert list(due_checks(core.state, core.now + 6 * SECOND, 10)) == [name]
    core.do(timers.PlanCheck(name, core.now + 36 * SECOND, 1, in_doubt=False))
    assert list(due_checks(core.state, core.now + 35 * SECOND, 10)) == []
    decide(core, name)
    assert list(due_checks(core.state, core.now + 100 * SECOND, 10)) == []


def test_a_repeated_send_gets_its_first_receipt(core: Driver) -> None:
    first = core.send("t", "x", "y")
    core.sequences[b"p" * 16] = 0
    again = core.send("t", "x", "y")
    assert (again.offset, again.duplicate) == (first.offset, True)
    core.sequences[b"p" * 16] = 5
    assert type(core.send("t", "z")) is SequenceGap
    core.sequences[b"q" * 16] = 3
    assert type(core.send("t", "z", producer=b"q" * 16)) is UnknownProducer
    assert core.bodies("t") == ["x", "y"]


def test_a_send_repeated_after_its_topic_has_grown_gets_its_first_receipt(core: Driver) -> None:
    data = encode([Message(b"x")], producer_id=b"r" * 16, epoch=0, sequence=0, born_at=1)
    send = StoreBatch("t", 1, 0, data, verify(data))
    first = core.do(send)
    core.do(GrowTopic("t", 4))
    assert core.do(send) == first._replace(duplicate=True)
    fresh = encode([Message(b"y")], producer_id=b"s" * 16, epoch=0, sequence=0, born_at=1)
    assert type(core.do(StoreBatch("t", 1, 0, fresh, verify(fresh)))) is StaleTopic


def test_a_topic_with_undecided_transactions_is_neither_grown_nor_deleted(core: Driver) -> None:
    name = half(core, 1, "a")
    assert type(core.do(GrowTopic("t", 9))) is Conflict
    assert type(core.do(DeleteTopic("t"))) is Conflict
    decide(core, name)
    core.do(DeleteTopic("t"))
    assert "t" not in core.state.topics


def test_hostile_62_a_topic_of_undecided_messages_without_keys_is_not_deleted(
    core: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = half(core, 1, None)
    assert type(core.do(DeleteTopic("t"))) is Conflict
    core.do(CreateTopic("other", 1))
    monkeypatch.setattr(stored_for_jobs, "MAX_SEARCHED", 0)
    assert type(core.do(DeleteTopic("other"))) is Conflict, "nobody has looked"
    monkeypatch.undo()
    core.do(DeleteTopic("other"))
    decide(core, name)
    core.do(DeleteTopic("t"))
    assert not {"t", "other"} & core.state.topics.keys()


@pytest.mark.parametrize("large", [False, True])
def test_a_topic_that_a_job_writes_to_is_neither_grown_nor_deleted(
    core: Driver,
    large: bool,  # noqa: FBT001  # a parameter of pytest
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its decision would find the topic gone, and say that all was sent."""
    monkeypatch.setattr(large_bundles, "KEYS_PER_PIECE", 1 if large else 100)
    job, name = token(core, 50), token(core, 1)
    core.store(name, [("t", 0, "k", "a"), ("t", 0, "j", "b")], ByJob(job))
    stored = get(core.state, name)
    assert stored is not None
    assert (stored.large is not None) is large
    places = (stored_for_jobs.STATE, stored_for_jobs.BATCHES, stored_for_jobs.LARGE)
    assert [Transaction._fields[place] for place in places] == ["state", "batches", "large"]
    assert LargeBundle._fields[stored_for_jobs.PARTITIONS] == "partitions"
    assert type(core.do(GrowTopic("t", 9))) is Conflict
    assert type(core.do(DeleteTopic("t"))) is Conflict
    core.do(jobs.DecideJob(job, Decision.COMMIT, (name,), "driver"))
    core.sweep()
    core.do(DeleteTopic("t"))
    assert "t" not in core.state.topics


def test_a_topic_is_not_deleted_between_two_parts_of_a_job(core: Driver) -> None:
    """Made anew, it would get the last part only."""
    name = token(core, 1)
    core.store(name, [("t", 0, "k", "a")], ByJob(token(core, 50)), sealed=False)
    assert type(core.do(DeleteTopic("t"))) is Conflict
    core.store(name, [("t", 0, "k", "b")], None, part=1)
    stored = get(core.state, name)
    assert stored is not None
    assert stored.large is not None
    assert [one.messages for one in stored.large.partitions] == [2]


def test_every_state_and_transition_is_ruled() -> None:
    assert set(TRANSITIONS) == set(BundleState)
    reached = {
        state: {what: TRANSITIONS[state].get(what) for what in Transition} for state in BundleState
    }
    terminal = {state for state, after in reached.items() if set(after.values()) <= {None, state}}
    assert terminal == {BundleState.PUBLISHED, BundleState.ROLLED_BACK}
