"""Recovery of prepared branches: each is ended as its home broker has decided.

A branch that is gone proves nothing: another recoverer or an operator may have ended
it. The status of its xid tells which, because a prepared xid is on disk and never given
to another transaction (docs/PROTOCOL.md 3.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from txmq.client.log import get_logger
from txmq.crashpoints import crashpoint
from txmq.errors import DatabaseError, TxmqError
from txmq.model.message import UNKNOWN
from txmq.recover.findings import Finding, Observations
from txmq.recover.home_brokers import RECOVERY_NAME
from txmq.tx.orphans import (
    FOREIGN,
    BranchAction,
    BranchVerdict,
    KnownOutcome,
    contradiction,
    judge_branch,
)
from txmq.tx.postgres.branch_finish import BUSY
from txmq.tx.postgres.prepared import Ending
from txmq.tx.postgres.prepared_list import PreparedTransaction

if TYPE_CHECKING:
    from uuid import UUID

    from txmq.recover.databases import RecoveredDatabase
    from txmq.recover.findings import Key
    from txmq.recover.home_brokers import HomeBrokers
    from txmq.tx.xid import XaBranch

OPPOSITE: Final = {
    KnownOutcome.COMMITTED: "rolled back",
    KnownOutcome.ROLLED_BACK: "committed",
}
LOST: Final = "lost in a failover or restore"  # in journals
log = get_logger()


class BranchRecovery:
    """Judges and ends prepared branches.

    `trust_clocks` = ages are by the databases' clocks, not since the first observation.
    """

    def __init__(
        self, homes: HomeBrokers, observations: Observations, safety_s: float, *, trust_clocks: bool
    ) -> None:
        self._homes, self._observations, self._safety_s = homes, observations, safety_s
        self._trust_clocks = trust_clocks

    def judge(self, database: RecoveredDatabase, one: PreparedTransaction, *, act: bool) -> Finding:
        """Return the finding of a branch.

        With `act`, the home broker decides an undecided transaction once the safety
        interval is over.
        """
        finding = Finding(database.name, one.gid, None, one.age_s, *FOREIGN[:2], prepared=one)
        if one.branch is None:
            return finding
        observed_s = self._observations.age(finding.key, one.branch, one.xid, database.timeline)
        outcome, verdict = self.home_outcome(
            one.branch.log,
            one.branch.token,
            one.age_s if self._trust_clocks else observed_s,
            act=act,
        )
        return replace(
            finding,
            token=one.branch.token,
            action=verdict.action,
            reason=verdict.reason,
            outcome=outcome,
            needs_operator=verdict_needs_operator(verdict),
        )

    def home_outcome(
        self, log_prefix: str, token: UUID, age_s: float, *, act: bool
    ) -> tuple[KnownOutcome, BranchVerdict]:
        """Return the home broker's outcome, and the verdict that follows from it.

        With `act`, the home broker decides first if that is due.
        """
        outcome = self._homes.outcome(log_prefix, token)
        verdict = judge_branch(outcome, age_s, self._safety_s)
        if verdict.ask and act:
            crashpoint("recovery.before_outcome")
            outcome = self._homes.outcome(log_prefix, token, decide=True)
            crashpoint("recovery.after_outcome")
            verdict = judge_branch(outcome, age_s, self._safety_s)
        return outcome, verdict

    def finish(self, database: RecoveredDatabase, finding: Finding) -> Finding:
        """End a branch as its home has decided; after an error a later pass retries."""
        one, outcome = finding.prepared, finding.outcome
        if one is None or one.branch is None or outcome is None or outcome.decision is UNKNOWN:
            return finding
        try:
            crashpoint("recovery.before_finish")
            ending = database.finish(one, outcome.decision)
            crashpoint("recovery.after_finish")
        except DatabaseError as error:
            return _unfinished(finding, error)
        log.info(
            "xa.finished",
            where=database.name,
            gid=one.gid,
            decision=outcome.decision.name,
            ending=ending.name,
        )
        if ending is Ending.OTHERWISE:
            return self.record_mixed(finding.key, one.branch, outcome)
        if ending is Ending.UNKNOWN:
            return replace(finding, reason=f"{finding.reason}; {ending.value}")
        self._observations.drop(finding.key)
        return replace(finding, done=True)

    def find_mixed(
        self, database: RecoveredDatabase, present: Iterable[PreparedTransaction]
    ) -> Iterator[Finding]:
        """Yield branches that are gone and contradict the decision."""
        for key, observation in self._observations.gone(
            database.name, {one.gid for one in present}
        ):
            branch = observation.branch
            if branch is None:
                continue
            if observation.timeline != database.timeline:
                # After a failover the id may be another's: the audit of commits knows.
                self._observations.drop(key)
                continue
            outcome = self._homes.outcome(branch.log, branch.token)
            try:
                [(status, _trace)] = database.ends([(observation.xid, None)])
            except DatabaseError:
                continue  # the next pass reads the status again
            if contradiction(outcome, status):
                yield self.record_mixed(key, branch, outcome)
            elif _is_over(outcome, status):
                self._observations.drop(key)

    def record_mixed(self, key: Key, branch: XaBranch, outcome: KnownOutcome) -> Finding:
        """Enter a branch that contradicts `outcome` in the home broker's journal.

        If that fails, the next pass finds the branch again. Returns the finding, which
        needs an operator unless one has dealt with it already.
        """
        found = OPPOSITE[outcome]
        reason = f"mixed: decided {outcome.decision.name}, and {found} by somebody else"
        finding = Finding(*key, branch.token, 0.0, BranchAction.HEURISTIC, reason, outcome)
        return self._record(finding, branch, found, "xa.mixed", f"found in database {key[0]}")

    def record_lost(self, key: Key, branch: XaBranch, why: str) -> Finding:
        """Enter a branch of a committed transaction that its database has lost.

        Returns the finding as `record_mixed` does.
        """
        finding = Finding(
            *(*key, branch.token, 0.0, BranchAction.LOST),
            f"lost: decided COMMIT, and {why}; write its rows again, or undo the others",
            KnownOutcome.COMMITTED,
        )
        return self._record(finding, branch, LOST, "xa.lost_branch", f"database {key[0]}: {why}")

    def _record(
        self, finding: Finding, branch: XaBranch, found: str, event: str, reason: str
    ) -> Finding:
        assert finding.outcome is not None, "only what contradicts an outcome is recorded"
        decided, dealt = finding.outcome.decision.name, False
        try:
            dealt = self._homes.record_heuristic(
                branch.log,
                branch.token,
                branch=finding.name,
                decided=decided,
                found=found,
                operator=RECOVERY_NAME,
                reason=reason,
            )
        except TxmqError as error:
            log.warning("xa.not_journalled", gid=finding.name, error=str(error))
        else:
            self._observations.drop(finding.key)
        if dealt:
            return replace(
                finding, action=BranchAction.LEAVE, reason=f"{finding.reason}, and dealt with"
            )
        log.error(
            event,
            where=finding.place,
            gid=finding.name,
            token=branch.token.hex,
            decided=decided,
            found=found,
        )
        return replace(finding, needs_operator=True)


def verdict_needs_operator(verdict: BranchVerdict) -> bool:
    """Return whether recovery leaves a branch of txmq to an operator."""
    return verdict.action in (BranchAction.LEAVE, BranchAction.HEURISTIC)


def _unfinished(finding: Finding, error: DatabaseError) -> Finding:
    if error.sqlstate == BUSY:
        return replace(
            finding, action=BranchAction.WAIT, reason="another session is ending it just now"
        )
    return replace(finding, reason=f"{finding.reason}; {error}", needs_operator=not error.retriable)


def _is_over(outcome: KnownOutcome, status: str | None) -> bool:
    """Return whether the end of a branch that is gone is final.

    An undecided transaction may still be decided otherwise than its branch has ended.
    """
    undecided = outcome in (KnownOutcome.UNDECIDED, KnownOutcome.SILENT) or (
        outcome is KnownOutcome.UNHEARD_OF and status == "committed"
    )
    return not undecided
