"""Expiry of outcomes, conflicts, jobs and instances, and the cost of finding the oldest
undecided transaction.
"""

from __future__ import annotations

import pytest

from tests.core.driver import Driver, token
from txmq.core import machine
from txmq.core.retention import outcome_expiry
from txmq.core.transactions import decisions, indexes, instances, jobs, xa
from txmq.core.transactions.instances import RegisterInstance, check_incarnation, instance_key
from txmq.core.transactions.model import OUTCOME_RETENTION, get
from txmq.errors import ProducerFenced, UnknownTransaction
from txmq.model.bundle import BundleState
from txmq.model.decider import ByChecker, ByHome, ByJob, ByPostgres, Decider
from txmq.model.message import Decision
from txmq.model.units import DAY, SECOND
from txmq.store.tables import CONFLICTS, INSTANCES, JOBS, LISTED

POSTGRES, OTHER_DATABASE = ByPostgres(1, 1, 5, 7, 1), ByPostgres(1, 1, 6, None, 1)
COMMIT, ROLLBACK = Decision.COMMIT, Decision.ROLLBACK


def half(core: Driver, number: int, decider: Decider = POSTGRES, key: str | None = None) -> bytes:
    name = token(core, number)
    core.store(name, [("t", 0, key, str(number))], decider)
    return name


def timed(core: Driver, number: int) -> bytes:
    """Return a UUIDv7 of the driver's time."""
    name = bytearray(token(core, number))
    name[6] |= 0x70
    return bytes(name)


def scanned_keys(core: Driver, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list that collects the keys of transactions scanned from now on."""
    seen: list[bytes] = []
    table, ranged = core.state.transactions, core.state.transactions.range

    def counted(start: bytes, stop: bytes | None = None, *, reverse: bool = False) -> object:
        for key, row in ranged(start, stop, reverse=reverse):
            seen.append(key)
            yield key, row

    monkeypatch.setattr(table, "range", counted)
    return seen


def test_the_oldest_undecided_token_is_not_the_first_that_was_stored(core: Driver) -> None:
    early = token(core, 1)
    core.now += 100 * SECOND
    late = half(core, 2)
    core.store(early, [("t", 0, None, "1")], POSTGRES)
    for state in (core.state, core.replayed()):
        assert (indexes.oldest_undecided(state), list(indexes.undecided_tokens(state))) == (
            early,
            [late, early],
        )
    core.do(decisions.DecideTransaction(early, COMMIT, "producer"))
    assert indexes.oldest_undecided(core.state) == late
    core.do(decisions.DecideTransaction(late, ROLLBACK, "producer"))
    assert indexes.oldest_undecided(core.state) is None


def test_the_oldest_undecided_token_is_found_without_scanning_all(
    core: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "MAX_ROWS_SCANNED", 3)
    done = [half(core, number) for number in range(5)]
    names = [half(core, number) for number in range(5, 90)]
    seen = scanned_keys(core, monkeypatch)
    assert indexes.oldest_undecided(core.state) == done[0]
    assert len(seen) == 1
    for name in done:
        core.do(decisions.DecideTransaction(name, COMMIT, "producer"))
    seen.clear()
    # a decided token stands for the undecided one after it
    assert indexes.oldest_undecided(core.state) == done[2]
    assert len(seen) == 3
    core.now += 1_000 * SECOND
    after = half(core, 90)
    for name in names:
        core.do(decisions.DecideTransaction(name, COMMIT, "producer"))
    assert indexes.oldest_undecided(core.state) == after


def test_only_the_transactions_of_a_database_keep_its_token_rows(core: Driver) -> None:
    half(core, 1, ByChecker("billing"))
    core.now += 1_000 * SECOND
    mine, other = half(core, 2), half(core, 3, OTHER_DATABASE)
    for state in (core.state, core.replayed()):
        assert indexes.oldest_by_database(state) == {
            POSTGRES.database: mine,
            OTHER_DATABASE.database: other,
        }
    core.do(decisions.DecideTransaction(mine, COMMIT, "producer"))
    assert indexes.oldest_by_database(core.state) == {OTHER_DATABASE.database: other}


def test_what_databases_are_to_decide_is_listed_page_by_page(core: Driver) -> None:
    mine = list[bytes]()
    for number in range(1, 10):
        of_mine = number % 3 == 0
        name = half(core, number, POSTGRES if of_mine else ByChecker("billing"))
        mine += [name] * of_mine
    found, pages = list[bytes](), 0
    after: int | None = 0
    while after is not None:
        page, after = indexes.undecided_by_databases(core.state, after, 2)
        found, pages = found + page, pages + 1
    assert (found, pages) == (mine, 5)
    for name in mine:
        core.do(decisions.DecideTransaction(name, COMMIT, "producer"))
    assert indexes.undecided_by_databases(core.state, 0, 2) == ([], None)


def test_undecided_spans_are_counted_again_at_the_start(core: Driver) -> None:
    deciders: tuple[Decider, ...] = (
        POSTGRES,
        ByChecker("billing"),
        OTHER_DATABASE,
        POSTGRES,
    )
    names = [half(core, number, decider) for number, decider in enumerate(deciders)]
    core.do(decisions.DecideTransaction(names[0], COMMIT, "producer"))
    machine.save(core.state)
    state = machine.load(core.state.tables)
    assert (state.undecided, state.undecided_spans) == (
        core.state.undecided,
        core.state.undecided_spans,
    )


def test_expiry_does_not_scan_old_transactions_twice(
    core: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        half(core, number)
    core.now += OUTCOME_RETENTION + SECOND
    monkeypatch.setattr(outcome_expiry, "STEP_ROWS", 7)
    core.sweep()
    recorded, seen = len(core.log), scanned_keys(core, monkeypatch)
    core.now += SECOND
    core.sweep()
    assert (len(core.log), seen) == (recorded, [])
    machine.save(core.state)
    assert (
        machine.load(core.state.tables).expired_to
        == core.state.expired_to
        == core.replayed().expired_to
    )


def test_transactions_that_end_after_expiry_has_passed_them_are_forgotten_too(core: Driver) -> None:
    home = ByHome(b"l" * 16, b"t" * 16)
    names = {
        "committed": half(core, 1),
        "rolled back": half(core, 2),
        "waits": half(core, 3, key="k"),
        "by hand": half(core, 5, home),
    }
    behind = half(core, 4, key="k")
    large = token(core, 6)
    for part in (0, 1):
        core.store(large, [("t", 0, None, "x")], POSTGRES, part=part, sealed=part == 1)
    core.do(decisions.DecideTransaction(behind, COMMIT, "producer"))
    core.now += OUTCOME_RETENTION + SECOND
    core.sweep()
    core.do(decisions.DecideTransaction(names["committed"], COMMIT, "producer"))
    core.do(decisions.DecideTransaction(names["rolled back"], ROLLBACK, "producer"))
    core.do(xa.DecideByHand(names["by hand"], COMMIT, "ada", "the other site is gone", b"m" * 16))
    core.do(decisions.DecideTransaction(names["waits"], ROLLBACK, "producer"))
    core.do(decisions.DecideTransaction(large, COMMIT, "producer"))
    core.sweep()
    assert get(core.state, large) is not None  # committed, but not published yet
    assert get(core.state, names["by hand"]) is not None
    core.work_off()
    core.do(xa.ForgetHeuristics(names["by hand"], "ada", "rows compared"))
    core.sweep()
    for name in (*names.values(), behind, large):
        assert get(core.state, name) is None
    assert not list(core.state.tables[LISTED].range(b""))
    assert core.state.listed == core.replayed().listed


def test_late_transactions_are_forgotten_in_steps(
    core: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [half(core, number) for number in range(10)]
    core.now += OUTCOME_RETENTION + SECOND
    core.sweep()
    monkeypatch.setattr(outcome_expiry, "STEP_ROWS", 3)
    for name in names:
        core.do(decisions.DecideTransaction(name, COMMIT, "producer"))
    core.sweep()
    assert [get(core.state, name) for name in names] == [None] * 10


def test_conflicts_are_kept_for_30_days(core: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcome_expiry, "STEP_ROWS", 2)
    name = half(core, 1)
    core.do(decisions.DecideTransaction(name, COMMIT, "producer"))
    for _ in range(5):
        core.do(decisions.DecideTransaction(name, ROLLBACK, "producer"))
    core.now += 20 * DAY
    core.do(decisions.DecideTransaction(name, ROLLBACK, "producer"))
    core.sweep()
    assert len(list(core.state.tables[CONFLICTS].range(b""))) == 6
    core.now += 10 * DAY + SECOND
    core.sweep()
    assert len(list(core.state.tables[CONFLICTS].range(b""))) == 1
    assert list(core.replayed().tables[CONFLICTS].range(b"")) == list(
        core.state.tables[CONFLICTS].range(b"")
    )


def test_a_job_with_a_timed_token_takes_no_bundles_once_its_decision_may_be_forgotten(
    core: Driver,
) -> None:
    job = timed(core, 50)
    winner = half(core, 1, ByJob(job))
    core.do(jobs.DecideJob(job, COMMIT, (winner,), "driver"))
    core.now += OUTCOME_RETENTION + SECOND
    core.sweep()
    assert core.state.tables[JOBS].get(job) is None
    assert (
        core.store(token(core, 2), [("t", 0, None, "again")], ByJob(job)).state
        is BundleState.ROLLED_BACK
    )
    refused = core.do(jobs.DecideJob(job, COMMIT, (), "driver"))
    assert type(refused) is UnknownTransaction
    assert core.bodies("t") == ["1"]


def test_an_undecided_job_can_be_decided_at_any_age(core: Driver) -> None:
    job = timed(core, 50)
    winner = half(core, 1, ByJob(job))
    core.now += OUTCOME_RETENTION + SECOND
    assert not core.do(jobs.DecideJob(job, COMMIT, (winner,), "driver")).repeated
    assert core.bodies("t") == ["1"]


def test_a_job_with_a_name_is_kept_for_400_days(
    core: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcome_expiry, "STEP_ROWS", 2)
    names = [bytes((number,)) * 6 + b"\x80" + bytes(9) for number in range(5)]
    for job in names:
        core.do(jobs.DecideJob(job, COMMIT, (), "driver"))
    core.now += 399 * DAY
    core.sweep()
    assert all(core.do(jobs.DecideJob(job, COMMIT, (), "driver")).repeated for job in names)
    core.now += DAY + SECOND
    core.sweep()
    assert not list(core.state.tables[JOBS].range(b""))


def test_an_instance_without_a_connection_for_30_days_is_forgotten(core: Driver) -> None:
    here, gone = instance_key("orders", "here"), instance_key("orders", "gone")
    for name in ("here", "gone"):
        assert core.do(RegisterInstance("orders", name)) == 1
    for _ in range(31):
        core.now += DAY + SECOND
        core.sweep(frozenset({here}))
    assert [key for key, _row in core.state.tables[INSTANCES].range(b"")] == [here]
    core.now += 29 * DAY
    core.sweep()
    check_incarnation(core.state, "orders", "here", 1)
    assert core.state.tables[INSTANCES].get(gone) is None


def test_an_instance_epoch_is_never_used_twice(core: Driver) -> None:
    for _ in range(3):
        core.do(RegisterInstance("orders", "one"))
    core.now += instances.INSTANCE_RETENTION + SECOND
    core.sweep()
    with pytest.raises(ProducerFenced):
        check_incarnation(core.state, "orders", "one", 3)
    machine.save(core.state)
    for state in (core.state, core.replayed(), machine.load(core.state.tables)):
        assert state.last_forgotten_epoch == 3
    assert core.do(RegisterInstance("orders", "one")) == 4
    with pytest.raises(ProducerFenced):
        check_incarnation(core.state, "orders", "one", 3)
