"""Orphans: rules for prepared branches that their coordinator has left.

Absence never means a rollback. The log of the home broker says how the transaction
ended. If it has not ended, and the safety interval is over, the home broker is asked to
end it, and its answer is followed. Without an answer everything stays as it is.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from txmq.model.bundle import BundleState
from txmq.model.message import Decision


class KnownOutcome(StrEnum):
    """The decision of a transaction as far as it is known."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    UNDECIDED = "undecided"  # stored at home
    UNHEARD_OF = "unheard of"  # not stored at home, and may yet be
    SILENT = "home is silent"  # it cannot be reached now
    FORGOTTEN = "forgotten"  # older than what brokers keep
    UNKNOWN_LOG = "unknown log"  # none of the brokers that can be reached has that log
    REFUSED = "refused"  # the broker knows the transaction as one that another decides

    @property
    def decision(self) -> Decision:
        """The final decision of the home broker, or UNKNOWN."""
        return _DECISIONS.get(self, Decision.UNKNOWN)


_DECISIONS = {KnownOutcome.COMMITTED: Decision.COMMIT, KnownOutcome.ROLLED_BACK: Decision.ROLLBACK}
_OF_STATES = {
    "UNKNOWN": KnownOutcome.UNHEARD_OF,
    BundleState.OPEN.name: KnownOutcome.UNDECIDED,
    BundleState.UNDECIDED.name: KnownOutcome.UNDECIDED,
    BundleState.COMMITTED.name: KnownOutcome.COMMITTED,
    BundleState.PUBLISHED.name: KnownOutcome.COMMITTED,
    BundleState.ROLLED_BACK.name: KnownOutcome.ROLLED_BACK,
}


class BranchAction(StrEnum):
    """An action on a branch."""

    COMMIT = "commit prepared"
    ROLL_BACK = "roll back prepared"
    WAIT = "wait"
    LEAVE = "leave alone"
    HEURISTIC = "heuristic"  # a person has to decide, and to say why
    LOST = "lost"  # a failover or a restore lost the branch of a committed transaction


class BranchVerdict(NamedTuple):
    """An action on a branch, and why.

    `ask`: the home broker has to decide first, and its answer replaces `action`.
    """

    action: BranchAction
    reason: str
    ask: bool = False


FOREIGN = BranchVerdict(BranchAction.LEAVE, "foreign: its own transaction manager finishes it")
_SETTLED = {
    KnownOutcome.COMMITTED: BranchVerdict(
        BranchAction.COMMIT, "its home broker has committed the transaction"
    ),
    KnownOutcome.ROLLED_BACK: BranchVerdict(
        BranchAction.ROLL_BACK, "its home broker has rolled the transaction back"
    ),
    KnownOutcome.SILENT: BranchVerdict(BranchAction.WAIT, "its home broker cannot be reached now"),
    KnownOutcome.FORGOTTEN: BranchVerdict(
        BranchAction.HEURISTIC, "its home broker keeps no outcomes as old: needs --reason"
    ),
    KnownOutcome.UNKNOWN_LOG: BranchVerdict(
        BranchAction.LEAVE, "unknown log: no broker that is configured has it"
    ),
    KnownOutcome.REFUSED: BranchVerdict(
        BranchAction.LEAVE, "its home broker says that another decides it: see txmq tx show"
    ),
}


def known_outcome(state: str) -> KnownOutcome:
    """Return the outcome for a state in a reply to `xa.outcome`. Raises KeyError."""
    return _OF_STATES[state]


def judge_branch(outcome: KnownOutcome, age_s: float, safety_s: float) -> BranchVerdict:
    """Return the verdict on one of our branches that was prepared `age_s` ago."""
    if settled := _SETTLED.get(outcome):
        return settled
    if age_s < safety_s:
        return BranchVerdict(
            BranchAction.WAIT, f"{outcome}, and younger than the safety interval of {safety_s:g} s"
        )
    return BranchVerdict(
        BranchAction.ROLL_BACK,
        f"{outcome} for longer than the safety interval: home decides first",
        ask=True,
    )


def contradiction(outcome: KnownOutcome, xid_status: str | None) -> str:
    """Return the end of a finished branch that contradicts the decision; "" = none.

    The end is "committed" or "aborted". `xid_status` comes from pg_xact_status for the
    transaction id of the prepared branch; PostgreSQL never assigns it again. That a
    branch is gone proves nothing by itself.
    """
    against = {KnownOutcome.COMMITTED: "aborted", KnownOutcome.ROLLED_BACK: "committed"}.get(
        outcome
    )
    return against if against is not None and xid_status == against else ""
