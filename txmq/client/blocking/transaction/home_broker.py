"""Requests of an XA coordinator to the home broker: the decision, and the journal."""

from __future__ import annotations

import time
from uuid import UUID

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.decisions import FIRST_PAUSE_S, LONGEST_PAUSE_S, decide
from txmq.client.log import get_logger
from txmq.client.protocol.transaction.home_decision import (
    HomeDecision,
    decision_of,
    mixed_entry,
    rollback_args,
)
from txmq.errors import Conflict, TxmqError
from txmq.model.bundle import BundleState
from txmq.model.message import COMMIT, UNKNOWN, Decision

log = get_logger()


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
    entry = mixed_entry(token, gid, decision, core.settings.service)
    try:
        core.call("xa.heuristic", entry, repeat=True)
    except TxmqError as error:
        log.warning("transaction.not_journalled", token=str(token), branch=gid, error=error.message)


def _commit(core: BlockingCore, token: UUID, timeout: float) -> HomeDecision:
    try:
        state = decide(core, token, COMMIT, timeout=timeout).state
    except Conflict as conflict:
        return decision_of(conflict.detail.get("state"), conflict.message)
    return decision_of(state)


def _roll_back(core: BlockingCore, token: UUID, timeout: float) -> HomeDecision:
    args = rollback_args(token, core.log_id, core.settings.service)
    reply = core.call("xa.outcome", args, timeout=timeout, repeat=True)
    return decision_of(BundleState[reply["state"]])
