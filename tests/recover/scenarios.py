"""Scenarios in which planted bugs of recovery break the audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any
from unittest.mock import patch
from uuid import UUID, uuid4

from tests.recover.world import SAFETY_S, RecoveryWorld, SilentDisagreement
from tests.tx.postgres.prepared_branches import end_manually, gid_of, leave_prepared
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import RequestRejected
from txmq.model.message import COMMIT, ROLLBACK, Decision
from txmq.recover.branches import BranchRecovery
from txmq.recover.bundles import BundleRecovery
from txmq.recover.databases import RecoveredDatabase
from txmq.recover.findings import Finding
from txmq.recover.home_brokers import HomeBrokers
from txmq.tx.orphans import BranchVerdict, KnownOutcome, judge_branch
from txmq.tx.postgres.prepared import Ending
from txmq.tx.postgres.prepared_list import PreparedTransaction

FOREIGN = "131075_Z3RyaWQ=_YnF1YWw="


def two_passes(world: RecoveryWorld) -> None:
    recoverer = world.recoverer()
    recoverer.run_pass()
    world.clock.now += SAFETY_S
    recoverer.run_pass()


def slow_coordinator(world: RecoveryWorld) -> None:
    """A coordinator stores and decides after recovery has rolled back."""
    token = world.begin(stored=0)
    two_passes(world)
    for client in world.clients:
        world.store(client, token)
    with suppress(RequestRejected):
        world.decide(token, COMMIT)
    world.recoverer().run_pass()
    world.audit()


def decision_in_between(world: RecoveryWorld) -> None:
    """A coordinator decides between the recoverer's two requests to the home broker."""
    token = world.begin()
    word = HomeBrokers.outcome

    def decided_first(
        self: HomeBrokers, log: str, of: UUID, *, decide: bool = False
    ) -> KnownOutcome:
        if decide and of == token and world.state(token) == "UNDECIDED":
            world.decide(token, COMMIT)
        return word(self, log, of, decide=decide)

    with patch.object(HomeBrokers, "outcome", decided_first):
        two_passes(world)
    world.audit()


def strangers(world: RecoveryWorld) -> None:
    """Branches of another manager, and of an unknown log."""
    lost = gid_of(uuid4(), new_token())
    for gid in (FOREIGN, lost):
        leave_prepared(world.dsns["a"], gid, f"INSERT INTO effects VALUES ('{gid}')")
    two_passes(world)
    if world.standing("a") != [FOREIGN, lost]:
        raise SilentDisagreement(f"only {world.standing('a')} are left")


def hand_before(world: RecoveryWorld, outcome: Decision = COMMIT) -> None:
    """An operator ends a branch otherwise just before the recoverer does."""
    token = world.begin()
    world.decide(token, outcome)
    finish = RecoveredDatabase.finish

    def after_operator(
        self: RecoveredDatabase, branch: PreparedTransaction, decision: Decision
    ) -> Ending:
        if self.name == "a":
            end_manually(world.dsns["a"], branch.gid, commit=outcome is ROLLBACK)
        return finish(self, branch, decision)

    with patch.object(RecoveredDatabase, "finish", after_operator):
        world.recoverer().run_pass()
    world.audit()


def hand_between(world: RecoveryWorld) -> None:
    """An operator rolls a branch back between two passes, after the decision."""
    token = world.begin()
    recoverer = world.recoverer()
    recoverer.run_pass()
    world.decide(token, COMMIT)
    end_manually(world.dsns["a"], world.gid(token, "a"), commit=False)
    recoverer.run_pass()
    world.audit()


def half_prepared(world: RecoveryWorld) -> None:
    """One coordinator died before the second PREPARE, another one after its
    decision.
    """
    world.begin(prepared=("a",))
    world.decide(world.begin(), COMMIT)
    two_passes(world)
    world.audit()


SCENARIOS: dict[str, Callable[[RecoveryWorld], None]] = {
    one.__name__: one
    for one in (
        slow_coordinator,
        decision_in_between,
        strangers,
        hand_before,
        hand_between,
        half_prepared,
    )
}


@contextmanager
def absence_is_a_rollback() -> Iterator[None]:
    def presumed(
        self: BranchRecovery, of_log: str, token: UUID, age_s: float, *, act: bool
    ) -> tuple[KnownOutcome, BranchVerdict]:
        word = self._homes.outcome(of_log, token)
        verdict = judge_branch(word, age_s, self._safety_s)
        return (KnownOutcome.ROLLED_BACK, verdict) if verdict.ask and act else (word, verdict)

    with patch.object(BranchRecovery, "home_outcome", presumed):
        yield


@contextmanager
def the_answer_is_not_read() -> Iterator[None]:
    def deaf(
        self: BranchRecovery, of_log: str, token: UUID, age_s: float, *, act: bool
    ) -> tuple[KnownOutcome, BranchVerdict]:
        word = self._homes.outcome(of_log, token)
        verdict = judge_branch(word, age_s, self._safety_s)
        if verdict.ask and act:
            self._homes.outcome(of_log, token, decide=True)
            word = KnownOutcome.ROLLED_BACK
        return word, verdict

    with patch.object(BranchRecovery, "home_outcome", deaf):
        yield


@contextmanager
def foreign_branches_are_touched() -> Iterator[None]:
    finish = BranchRecovery.finish

    def grabs(self: BranchRecovery, database: RecoveredDatabase, finding: Finding) -> Finding:
        if finding.prepared is not None and finding.token is None:
            database.finish(finding.prepared, ROLLBACK)
        return finish(self, database, finding)

    with patch.object(BranchRecovery, "finish", grabs):
        yield


@contextmanager
def an_unknown_log_is_a_rollback() -> Iterator[None]:
    word = HomeBrokers.outcome

    def presumed(self: HomeBrokers, log: str, token: UUID, *, decide: bool = False) -> KnownOutcome:
        found = word(self, log, token, decide=decide)
        return KnownOutcome.ROLLED_BACK if found is KnownOutcome.UNKNOWN_LOG else found

    with patch.object(HomeBrokers, "outcome", presumed):
        yield


@contextmanager
def missing_is_committed() -> Iterator[None]:
    """Error 42704 counts as done, whatever the branch's end was."""
    finish = RecoveredDatabase.finish

    def done(self: RecoveredDatabase, branch: PreparedTransaction, decision: Decision) -> Ending:
        finish(self, branch, decision)
        return Ending.DONE

    with patch.object(RecoveredDatabase, "finish", done):
        yield


@contextmanager
def the_gone_are_forgotten() -> Iterator[None]:
    def nobody(*args: Any) -> Iterator[Finding]:
        yield from ()

    with patch.object(BranchRecovery, "find_mixed", nobody):
        yield


@contextmanager
def only_databases_are_recovered() -> Iterator[None]:
    with patch.object(BundleRecovery, "recover", lambda *_args, **_kwargs: iter(())):
        yield


BUGS: dict[Callable[[], AbstractContextManager[None]], str] = {
    absence_is_a_rollback: "slow_coordinator",
    the_answer_is_not_read: "decision_in_between",
    foreign_branches_are_touched: "strangers",
    an_unknown_log_is_a_rollback: "strangers",
    missing_is_committed: "hand_before",
    the_gone_are_forgotten: "hand_between",
    only_databases_are_recovered: "half_prepared",
}
