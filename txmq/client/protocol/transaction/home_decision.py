"""The decision of an XA transaction's home broker, and the errors that tell it."""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

from txmq.client.log import get_logger
from txmq.client.protocol.transaction.decision import decided_by
from txmq.errors import (
    BrokerUnavailable,
    ConnectionLost,
    HeuristicMixed,
    InDoubt,
    RequestTimeout,
    TransactionAborted,
    TxmqError,
)
from txmq.model.bundle import COMMITTED, BundleState
from txmq.model.message import COMMIT, ROLLBACK, UNKNOWN, Decision

DECIDED_BY_LIMIT = 127  # characters; brokers refuse longer names
OPPOSITE = {COMMIT: "rolled back", ROLLBACK: "committed"}  # the outcome that contradicts a decision
RECOVERY_HINT = "recovery ends the branches as the home broker decides: see `txmq xa recover`"
log = get_logger()


class HomeDecision(NamedTuple):
    """The home broker's durable decision; UNKNOWN = it gave no answer.

    `why` is the last error, or the reason of a decision that was not asked for.
    """

    decision: Decision
    published: bool = False
    why: str = ""


def decision_of(state: object, why: str = "") -> HomeDecision:
    """Return the decision that a state of the home broker's bundle shows."""
    if state == BundleState.ROLLED_BACK:
        return HomeDecision(ROLLBACK, why=why)
    if state in COMMITTED:
        return HomeDecision(COMMIT, published=state == BundleState.PUBLISHED, why=why)
    return HomeDecision(UNKNOWN, why=why)


def rollback_args(token: UUID, log_id: UUID, service: str | None) -> dict[str, Any]:
    """Return the arguments of the call that rolls back at home.

    An unknown token gets a tombstone there, which a late bundle meets.
    """
    return {
        "token": token.hex,
        "log_id": str(log_id),
        "decide": True,
        "by": decided_by(service)[:DECIDED_BY_LIMIT],
    }


def mixed_entry(token: UUID, gid: str, decision: Decision, service: str | None) -> dict[str, Any]:
    """Log that a branch contradicts the decision; return its entry of the journal."""
    found = OPPOSITE[decision]
    log.error("transaction.mixed", token=str(token), branch=gid, decided=decision.name, found=found)
    return {
        "token": token.hex,
        "branch": gid,
        "decided": decision.name,
        "found": found,
        "operator": service or "producer",
        "reason": "found by the coordinator when it came to end the branch",
    }


def mixed_error(token: UUID, decision: Decision, gids: tuple[str, ...]) -> HeuristicMixed:
    """Return the error of a transaction some of whose branches contradict it."""
    return HeuristicMixed(
        f"branches of transaction {token} that contradict its {decision.name}: {len(gids)}",
        token=str(token),
        decision=decision.name,
        branches=gids,
        hint="compare the databases and correct them, then run `txmq xa forget`",
    )


def uncommitted_error(
    token: UUID, decision: Decision, failure: TxmqError | None, why: str
) -> TxmqError | None:
    """Return the error of a transaction that is not committed; None for COMMIT."""
    if decision is UNKNOWN:
        text = f"The home broker did not answer: {why}"
        return InDoubt(text, token=str(token), hint=RECOVERY_HINT)
    if decision is not ROLLBACK:
        return None
    if failure is None:
        return TransactionAborted(
            f"The home broker had rolled transaction {token} back: {why}",
            hint="it took too long, or recovery or an operator was first: see `txmq tx show`",
        )
    text = f"{failure.message}; the transaction was rolled back"
    if isinstance(failure, ConnectionLost | RequestTimeout):
        return BrokerUnavailable(
            f"A broker did not confirm the messages: {text}", hint="run the transaction again"
        )
    return failure if failure.outcome == "not done" else TransactionAborted(text)
