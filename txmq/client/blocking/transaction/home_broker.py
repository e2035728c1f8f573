"""Requests of an XA coordinator to the home broker: the decision, and the journal."""

from __future__ import annotations

import time
from typing import NamedTuple
from uuid import UUID

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.decisions import FIRST_PAUSE_S, LONGEST_PAUSE_S, decide
from txmq.client.log import get_logger
from txmq.client.protocol.transaction.decision import decided_by
from txmq.errors import Conflict, TxmqError
from txmq.model.bundle import BundleState
from txmq.model.message import COMMIT, ROLLBACK, UNKNOWN, Decision

DECIDED_BY_LIMIT = 127  # characters; brokers refuse longer names
OPPOSITE = {COMMIT: "rolled back", ROLLBACK: "committed"}  # the outcome that contradicts a decision
log = get_logger()


class HomeDecision(NamedTuple):
    """The home broker's durable decision; UNKNOWN = it gave no answer.

    `why` is the last error, or the reason of a decision that was not asked for.
    """

    decision: Decision
    published: bool = False
    why: str = ""


def request_decision(
    core: BlockingCore, token: UUID, wanted: Decision, deadline: float
) -> HomeDecision:
    """Ask for COMMIT or ROLLBACK, and retry while the broker is away.

    The answer may be the other decision.
    """
    once = _commit if wanted is COMMIT else _roll_back
    pause = FIRST_PAUSE_S
    while True:
        try:
            return once(core, token, max(deadline - time.monotonic(), FIRST_PAUSE_S))
        except TxmqError as error:
            final = not error.retriable and error.outcome != "unknown"
            if final or time.monotonic() + pause >= deadline:
                return HomeDecision(UNKNOWN, why=error.message)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def record_mixed(core: BlockingCore, token: UUID, gid: str, decision: Decision) -> None:
    """Log and journal that a branch contradicts the decision."""
    found = OPPOSITE[decision]
    log.error("transaction.mixed", token=str(token), branch=gid, decided=decision.name, found=found)
    entry = {
        "token": token.hex,
        "branch": gid,
        "decided": decision.name,
        "found": found,
        "operator": core.settings.service or "producer",
        "reason": "found by the coordinator when it came to end the branch",
    }
    try:
        core.call("xa.heuristic", entry, repeat=True)
    except TxmqError as error:
        log.warning("transaction.not_journalled", token=str(token), branch=gid, error=error.message)


def _commit(core: BlockingCore, token: UUID, timeout: float) -> HomeDecision:
    try:
        state = decide(core, token, COMMIT, timeout=timeout).state
    except Conflict as conflict:
        return _decision_of(conflict.detail.get("state"), conflict.message)
    return _decision_of(state)


def _roll_back(core: BlockingCore, token: UUID, timeout: float) -> HomeDecision:
    """Roll back at home.

    An unknown token gets a tombstone there, which a late bundle meets.
    """
    args = {
        "token": token.hex,
        "log_id": str(core.log_id),
        "decide": True,
        "by": decided_by(core.settings.service)[:DECIDED_BY_LIMIT],
    }
    reply = core.call("xa.outcome", args, timeout=timeout, repeat=True)
    return _decision_of(BundleState[reply["state"]])


def _decision_of(state: object, why: str = "") -> HomeDecision:
    if state == BundleState.ROLLED_BACK:
        return HomeDecision(ROLLBACK, why=why)
    if state in (BundleState.COMMITTED, BundleState.PUBLISHED):
        return HomeDecision(COMMIT, published=state == BundleState.PUBLISHED, why=why)
    return HomeDecision(UNKNOWN, why=why)
