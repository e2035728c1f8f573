"""The rules of XA: final outcomes, foreign branches, decisions by hand, heuristics."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.driver import Driver, token
from txmq.core.transactions import branches
from txmq.core.transactions.decisions import DecideTransaction
from txmq.core.transactions.instances import RegisterInstance, check_incarnation
from txmq.core.transactions.model import OUTCOME_RETENTION, get
from txmq.core.transactions.xa import DecideByHand, ForgetHeuristics, NoteHeuristic, ResolveOutcome
from txmq.errors import (
    BadRequest,
    Conflict,
    DigestMismatch,
    DuplicateXid,
    HeuristicOutcome,
    ProducerFenced,
    RequestRejected,
    UnknownTransaction,
)
from txmq.model.bundle import BundleState, DecideReceipt
from txmq.model.decider import (
    BrokerBranch,
    ByChecker,
    ByForeign,
    ByHome,
    ByPostgres,
    Decider,
    PostgresBranch,
)
from txmq.model.message import COMMIT, ROLLBACK, Decision
from txmq.model.units import SECOND
from txmq.store.tables import CONFLICTS, HANDLED_HEURISTICS, XA, XIDS
from txmq.tx.xid import Xid

LOG, OTHER_LOG = b"l" * 16, b"o" * 16
XID = ByForeign(7, b"gtrid", b"bqual")
BRANCHES = (
    PostgresBranch(1, 5, "shop", "orders", "1_YQ==_Yg==", None, 1, 1),
    BrokerBranch(OTHER_LOG),
)


def home(core: Driver, number: int, log_id: bytes = LOG, **options: Any) -> bytes:
    name = token(core, number)
    core.store(name, [("t", 0, "k", str(number))], ByHome(log_id, name), **options)
    return name


def foreign(core: Driver, number: int, decider: Decider = XID, **options: Any) -> Any:
    return core.store(token(core, number), [("t", 0, "k", str(number))], decider, **options)


def ask(core: Driver, name: bytes, *, decide: bool = True) -> Any:
    return core.do(ResolveOutcome(name, LOG, decide, "recoverer"))


def by_hand(core: Driver, name: bytes, outcome: Decision) -> Any:
    return core.do(DecideByHand(name, outcome, "ann", "the manager is gone", LOG))


def refusal(reply: object) -> type[Exception]:
    assert isinstance(reply, RequestRejected)
    return type(reply)


def listed(core: Driver, *, heuristic: bool = False) -> list[bytes]:
    return list(branches.xa_tokens(core.state, b"", heuristic=heuristic))


def test_the_participants_of_a_bundle_are_kept_even_without_messages(core: Driver) -> None:
    name = token(core, 1)
    core.store(name, [], ByHome(LOG, name), participants=BRANCHES)
    assert core.do(DecideTransaction(name, COMMIT, "producer")) == DecideReceipt(
        BundleState.PUBLISHED, repeated=False
    )
    row = get(core.replayed(), name)
    assert row is not None
    assert (row.participants, row.state) == (BRANCHES, BundleState.PUBLISHED)


def test_resolving_an_outcome_rolls_back_what_is_undecided(core: Driver) -> None:
    name = home(core, 1)
    assert ask(core, name, decide=False) is BundleState.UNDECIDED
    assert ask(core, name) is BundleState.ROLLED_BACK
    assert refusal(core.do(DecideTransaction(name, COMMIT, "producer"))) is Conflict
    assert core.bodies("t") == []


def test_resolving_an_outcome_changes_nothing_that_is_decided(core: Driver) -> None:
    name = home(core, 1)
    core.do(DecideTransaction(name, COMMIT, "producer"))
    recorded = len(core.log)
    assert ask(core, name) is BundleState.PUBLISHED
    assert len(core.log) == recorded


def test_resolving_an_unknown_token_leaves_a_tombstone_that_later_parts_meet(
    core: Driver,
) -> None:
    name = token(core, 1)
    assert ask(core, name, decide=False) is None
    assert get(core.state, name) is None
    assert ask(core, name) is BundleState.ROLLED_BACK
    for digest in (b"a" * 32, b"b" * 32):
        late = core.store(name, [("t", 0, "k", "late")], ByHome(LOG, name), digest=digest)
        assert late.state is BundleState.ROLLED_BACK
    assert (
        core.store(name, [], None, part=3, sealed=False, digest=bytes(32)).state
        is BundleState.ROLLED_BACK
    )
    assert core.do(DecideTransaction(name, ROLLBACK, "producer")) == DecideReceipt(
        BundleState.ROLLED_BACK, repeated=True
    )
    assert refusal(core.do(DecideTransaction(name, COMMIT, "producer"))) is Conflict
    assert core.bodies("t") == []
    replayed = get(core.replayed(), name)
    assert replayed == get(core.state, name)
    assert replayed is not None
    assert (replayed.by, replayed.decider) == ("recoverer", ByHome(LOG, name))


def test_a_bundle_rolled_back_before_its_last_part_answers_that_part(core: Driver) -> None:
    name = home(core, 1, sealed=False, digest=bytes(32))
    assert ask(core, name, decide=False) is BundleState.UNDECIDED
    assert ask(core, name) is BundleState.ROLLED_BACK
    last = core.store(name, [("t", 0, "k", "x")], None, part=1, digest=b"z" * 32)
    assert last.state is BundleState.ROLLED_BACK


def test_an_expired_token_has_no_outcome(core: Driver) -> None:
    name = token(core, 1)
    core.now += OUTCOME_RETENTION + SECOND
    for decide in (False, True):
        assert refusal(ask(core, name, decide=decide)) is UnknownTransaction
    assert get(core.state, name) is None


def test_an_old_token_that_is_still_stored_is_answered(core: Driver) -> None:
    name = home(core, 1)
    core.now += OUTCOME_RETENTION + SECOND
    assert ask(core, name) is BundleState.ROLLED_BACK


@pytest.mark.parametrize(
    "decider",
    [ByPostgres(1, 1, 5, 7, 1), ByChecker("orders"), XID, ByHome(OTHER_LOG, b"t" * 16)],
    ids=str,
)
def test_resolving_an_outcome_never_rolls_back_what_another_decides(
    core: Driver, decider: Decider
) -> None:
    foreign(core, 1, decider)
    assert refusal(ask(core, token(core, 1))) is BadRequest
    assert ask(core, token(core, 1), decide=False) is BundleState.UNDECIDED


def test_an_xid_belongs_to_one_transaction(core: Driver) -> None:
    assert foreign(core, 1).state is BundleState.UNDECIDED
    assert foreign(core, 1).state is BundleState.UNDECIDED
    assert refusal(foreign(core, 2)) is DuplicateXid
    assert foreign(core, 3, ByForeign(7, b"gtri", b"dbqual")).state is BundleState.UNDECIDED
    core.do(DecideTransaction(token(core, 1), ROLLBACK, "manager"))
    assert refusal(foreign(core, 4)) is DuplicateXid
    assert branches.find_token(core.replayed(), Xid(7, b"gtrid", b"bqual")) == token(core, 1)


def test_an_xid_is_free_when_its_outcome_is_forgotten(core: Driver) -> None:
    foreign(core, 1)
    core.do(DecideTransaction(token(core, 1), COMMIT, "manager"))
    core.now += OUTCOME_RETENTION + SECOND
    core.sweep()
    assert not list(core.state.tables[XIDS].range(b""))
    assert foreign(core, 2).state is BundleState.UNDECIDED


def test_a_foreign_manager_commits_in_one_phase(core: Driver) -> None:
    receipt = foreign(core, 1, commit=True)
    assert (receipt.state, receipt.offsets) == (BundleState.PUBLISHED, (0,))
    assert core.bodies("t") == ["1"]
    assert core.do(DecideTransaction(token(core, 1), COMMIT, "manager")).repeated
    assert listed(core) == []


def test_a_one_phase_commit_waits_behind_a_half_of_its_key(core: Driver) -> None:
    half = token(core, 9)
    core.store(half, [("t", 0, "k", "half")], ByPostgres(1, 1, 5, 7, 1))
    assert foreign(core, 1, commit=True).state is BundleState.COMMITTED
    core.do(DecideTransaction(half, COMMIT, "resolver"))
    assert core.bodies("t") == ["half", "1"]


def test_undecided_branches_are_listed_until_they_are_decided(core: Driver) -> None:
    one, two = home(core, 1), token(core, 2)
    foreign(core, 2)
    core.store(token(core, 3), [("t", 0, "z", "h")], ByPostgres(1, 1, 5, 7, 1))
    core.store(
        token(core, 4),
        [("t", 0, None, "open")],
        ByForeign(1, b"", b""),
        sealed=False,
        digest=bytes(32),
    )
    assert listed(core) == [one, two]
    core.do(DecideTransaction(one, COMMIT, "producer"))
    assert listed(core) == [two]
    core.do(DecideTransaction(two, ROLLBACK, "manager"))
    assert listed(core) == []


@pytest.mark.parametrize("decider", [XID, ByHome(OTHER_LOG, b"t" * 16)], ids=str)
@pytest.mark.parametrize("outcome", [COMMIT, ROLLBACK])
def test_an_operator_s_decision_of_another_s_branch_is_heuristic(
    core: Driver, decider: Decider, outcome: Decision
) -> None:
    name = token(core, 1)
    foreign(core, 1, decider)
    assert not by_hand(core, name, outcome).repeated
    [seen] = branches.heuristics(core.state, name)
    assert (seen.branch, seen.decided, seen.operator, seen.reason) == (
        "",
        outcome,
        "ann",
        "the manager is gone",
    )
    assert listed(core, heuristic=True) == [name]
    assert core.do(DecideTransaction(name, outcome, "manager")).repeated
    other = ROLLBACK if outcome is COMMIT else COMMIT
    refused = core.do(DecideTransaction(name, other, "manager"))
    assert refusal(refused) is HeuristicOutcome
    assert "ann" in refused.message
    assert len(list(core.state.tables[CONFLICTS].range(b""))) == 1


def test_the_home_broker_s_own_decision_by_hand_is_none(core: Driver) -> None:
    name = home(core, 1)
    by_hand(core, name, ROLLBACK)
    assert listed(core) == []
    assert refusal(core.do(DecideTransaction(name, COMMIT, "producer"))) is Conflict


def test_a_second_decision_by_hand_adds_nothing(core: Driver) -> None:
    foreign(core, 1)
    by_hand(core, token(core, 1), COMMIT)
    assert by_hand(core, token(core, 1), COMMIT).repeated
    assert len(branches.heuristics(core.state, token(core, 1))) == 1


def test_a_heuristic_outcome_is_kept_until_an_operator_clears_it(core: Driver) -> None:
    name = token(core, 1)
    foreign(core, 1)
    by_hand(core, name, COMMIT)
    core.now += OUTCOME_RETENTION + SECOND
    core.sweep()
    assert get(core.state, name) is not None
    core.do(ForgetHeuristics(name, "ann", "told the manager's people"))
    assert listed(core) == []
    assert refusal(core.do(DecideTransaction(name, ROLLBACK, "manager"))) is Conflict
    core.sweep()
    assert get(core.state, name) is None
    assert get(core.replayed(), name) is None


def test_what_recoverers_find_is_written_down_once(core: Driver) -> None:
    name = home(core, 1, participants=BRANCHES)
    core.do(DecideTransaction(name, COMMIT, "producer"))
    note = NoteHeuristic(
        name, "1_YQ==_Yg==", COMMIT, "rolled back", "recoverer", "42704 after the decision"
    )
    for one in (note, note._replace(operator="another"), note._replace(branch="1_YQ==_Yw==")):
        core.do(one)
    assert [entry.branch for entry in branches.heuristics(core.replayed(), name)] == [
        "1_YQ==_Yg==",
        "1_YQ==_Yw==",
    ]
    assert listed(core, heuristic=True) == [name]
    # decided by its manager, whatever a branch did
    assert refusal(core.do(DecideTransaction(name, ROLLBACK, "x"))) is Conflict
    assert refusal(core.do(note._replace(token=token(core, 9)))) is UnknownTransaction


def test_what_was_dealt_with_is_not_written_down_again(core: Driver) -> None:
    name = home(core, 1)
    core.do(DecideTransaction(name, COMMIT, "home"))
    seen = NoteHeuristic(name, "1_YQ==_Yg==", COMMIT, "rolled back", "recovery", "found")
    assert [core.do(seen) for _ in range(2)] == [False, False]
    core.do(ForgetHeuristics(name, "ada", "row written again"))
    recorded = len(core.log)
    assert core.do(seen) is True
    assert (len(core.log), listed(core, heuristic=True)) == (recorded, [])
    other = seen._replace(branch="1_YQ==_Yw==")
    assert core.do(other) is False
    core.do(ForgetHeuristics(name, "ada", "that one, too"))
    assert (core.do(seen), core.do(other)) == (True, True)
    core.now += OUTCOME_RETENTION + SECOND
    core.sweep()
    assert not list(core.state.tables[HANDLED_HEURISTICS].range(b""))


def test_an_undecided_branch_stays_listed_when_its_heuristics_are_forgotten(core: Driver) -> None:
    name = home(core, 1)
    core.do(NoteHeuristic(name, "gid", ROLLBACK, "committed", "ann", "why"))
    core.do(ForgetHeuristics(name, "ann", "seen"))
    assert (listed(core), listed(core, heuristic=True)) == ([name], [])
    assert refusal(core.do(ForgetHeuristics(token(core, 9), "ann", "seen"))) is UnknownTransaction
    recorded = len(core.log)
    core.do(ForgetHeuristics(name, "ann", "again"))
    assert len(core.log) == recorded


def test_another_digest_of_a_complete_branch_is_refused(core: Driver) -> None:
    home(core, 1)
    core.do(DecideTransaction(token(core, 1), ROLLBACK, "producer"))
    again = core.store(token(core, 1), [], ByHome(LOG, token(core, 1)), digest=b"e" * 32)
    assert refusal(again) is DigestMismatch


def test_each_incarnation_fences_those_before_it(core: Driver) -> None:
    check_incarnation(core.state, "orders", "one", 0)
    assert [core.do(RegisterInstance("orders", "one")) for _ in range(2)] == [1, 2]
    assert core.do(RegisterInstance("orders", "two")) == 1
    assert core.do(RegisterInstance("other", "one")) == 1
    state = core.replayed()
    check_incarnation(state, "orders", "one", 2)
    for stale in (0, 1, 3):
        with pytest.raises(ProducerFenced):
            check_incarnation(state, "orders", "one", stale)


def test_a_log_s_tables_are_the_same_after_a_replay(core: Driver) -> None:
    foreign(core, 1)
    by_hand(core, token(core, 1), ROLLBACK)
    home(core, 2)
    ask(core, token(core, 3))
    state = core.replayed()
    for table in (XA, XIDS):
        assert list(state.tables[table].range(b"")) == list(core.state.tables[table].range(b""))
