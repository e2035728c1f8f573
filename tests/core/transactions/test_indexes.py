"""The lists for operators: a transaction is listed exactly as long as it needs one."""

from __future__ import annotations

import pytest

from tests.core.driver import Driver, token
from txmq.core import machine
from txmq.core.transactions import decisions, jobs, timers, xa
from txmq.core.transactions.indexes import ListKind, listed_tokens
from txmq.core.transactions.model import OUTCOME_RETENTION, get
from txmq.model.bundle import BundleState
from txmq.model.decider import ByBroker, ByHome, ByJob, ByPostgres, Decider
from txmq.model.message import Decision
from txmq.model.units import SECOND

POSTGRES = ByPostgres(1, 1, 5, 7, 1)


def store(
    core: Driver,
    number: int,
    key: str | None,
    decider: Decider = POSTGRES,
    **options: object,
) -> bytes:
    name = token(core, number)
    core.store(name, [("t", 0, key, str(number))], decider, **options)
    return name


def decide(core: Driver, name: bytes, outcome: Decision = Decision.COMMIT) -> None:
    core.do(decisions.DecideTransaction(name, outcome, "producer"))


def listed(core: Driver) -> dict[str, list[bytes]]:
    """Return the lists; counts agree in memory, after loading and after replay."""
    found = {kind.name: list(listed_tokens(core.state, kind)) for kind in ListKind}
    machine.save(core.state)
    for state in (core.state, machine.load(core.state.tables), core.replayed()):
        assert {kind.name: state.listed[kind] for kind in ListKind} == {
            name: len(names) for name, names in found.items()
        }
    return {name: names for name, names in found.items() if names}


@pytest.mark.parametrize("ends", ["sealed", "rolled back"])
def test_a_transaction_is_open_from_its_first_part_to_its_last(core: Driver, ends: str) -> None:
    one, other = store(core, 1, "a", sealed=False), store(core, 2, "a", sealed=False)
    assert listed(core) == {"OPEN": [one, other]}
    store(core, 1, "a", part=1, sealed=False)
    assert listed(core) == {"OPEN": [one, other]}
    if ends == "sealed":
        store(core, 1, "a", part=2)
    else:
        decide(core, one, Decision.ROLLBACK)
    assert listed(core) == {"OPEN": [other]}


@pytest.mark.parametrize("outcome", [Decision.COMMIT, Decision.ROLLBACK])
def test_a_transaction_is_in_doubt_until_it_is_decided(core: Driver, outcome: Decision) -> None:
    name, other = store(core, 1, "a"), store(core, 2, "b")
    for in_doubt in (False, True, True):
        core.do(timers.PlanCheck(name, core.now + SECOND, 1, in_doubt))
    assert listed(core) == {"IN_DOUBT": [name]}
    decide(core, other, outcome)
    assert listed(core) == {"IN_DOUBT": [name]}
    decide(core, name, outcome)
    assert listed(core) == {}


def test_a_flag_can_be_taken_back(core: Driver) -> None:
    name = store(core, 1, "a")
    core.do(timers.PlanCheck(name, core.now + SECOND, 1, in_doubt=True))
    core.do(timers.PlanCheck(name, core.now + SECOND, 1, in_doubt=False))
    assert listed(core) == {}


def test_a_committed_transaction_waits_until_what_is_before_it_has_gone(core: Driver) -> None:
    first, second = store(core, 1, "a"), store(core, 2, "a")
    decide(core, second)
    local = store(core, 3, "a", ByBroker())
    assert listed(core) == {"WAITING": [second, local]}
    decide(core, first)
    assert listed(core) == {}
    assert core.bodies("t") == ["1", "2", "3"]


def test_what_a_job_commits_waits_as_well(core: Driver) -> None:
    first, job = store(core, 1, "a"), token(core, 50)
    winner, loser = store(core, 2, "a", ByJob(job)), store(core, 3, "a", ByJob(job))
    core.do(jobs.DecideJob(job, Decision.COMMIT, (winner,), "job"))
    assert listed(core) == {"WAITING": [winner]}
    assert get(core.state, loser).state is BundleState.ROLLED_BACK  # type: ignore[union-attr]  # it is stored
    decide(core, first, Decision.ROLLBACK)
    assert listed(core) == {}


def test_a_heuristic_outcome_is_listed_until_it_is_dealt_with(core: Driver) -> None:
    home, other = store(core, 1, "a", ByHome(b"l" * 16, b"t" * 16)), store(core, 2, "b")
    core.do(xa.DecideByHand(home, Decision.COMMIT, "ada", "the other site is gone", b"m" * 16))
    core.do(xa.NoteHeuristic(home, "gid", Decision.COMMIT, "rolled back", "ada", "found so"))
    core.do(xa.DecideByHand(other, Decision.COMMIT, "ada", "seen", b"m" * 16))
    assert listed(core) == {"HEURISTIC": [home]}
    core.do(xa.ForgetHeuristics(home, "ada", "rows compared"))
    core.do(xa.ForgetHeuristics(home, "ada", "rows compared"))
    assert listed(core) == {}


def test_what_waits_for_longer_than_outcomes_are_kept_is_published_all_the_same(
    core: Driver,
) -> None:
    first, second = store(core, 1, "a"), store(core, 2, "a")
    decide(core, second)
    core.now += OUTCOME_RETENTION + SECOND
    core.sweep()
    decide(core, first)
    assert core.bodies("t") == ["1", "2"]
