"""Requests of an XA coordinator to the home broker: the decision, and the journal."""

from __future__ import annotations

from typing import Any

from txmq.client.log import get_logger
from txmq.client.protocol.awaited.bundle import StoringBundle
from txmq.client.protocol.transaction.home_decision import (
    HomeDecision,
    decision_of,
    mixed_entry,
    rollback_args,
)
from txmq.errors import Conflict, TxmqError
from txmq.model.bundle import BundleState
from txmq.model.message import COMMIT, UNKNOWN, Decision

Home = StoringBundle[Any]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.2  # between two questions for the decision
log = get_logger()


async def request_decision(home: Home, wanted: Decision, deadline: float) -> HomeDecision:
    """Ask for COMMIT or ROLLBACK, and retry while the broker is away.

    The answer may be the other decision.
    """
    once = _commit if wanted is COMMIT else _roll_back
    seconds, core = FIRST_PAUSE_S, home.core
    while True:
        try:
            return await once(home, max(deadline - core.seconds(), FIRST_PAUSE_S))
        except TxmqError as error:
            final = not error.retriable and error.outcome != "unknown"
            if final or core.seconds() + seconds >= deadline:
                return HomeDecision(UNKNOWN, why=error.message)
        await home.broker.sleep(seconds)
        seconds = min(2 * seconds, LONGEST_PAUSE_S)


async def record_mixed(home: Home, gid: str, decision: Decision) -> None:
    """Log and journal that a branch contradicts the decision."""
    entry = mixed_entry(home.token, gid, decision, home.core.settings.service)
    try:
        await home.call("xa.heuristic", entry)
    except TxmqError as error:
        token = str(home.token)
        log.warning("transaction.not_journalled", token=token, branch=gid, error=error.message)


async def _commit(home: Home, seconds: float) -> HomeDecision:
    try:
        return decision_of((await home.decide(COMMIT, seconds)).state)
    except Conflict as conflict:
        return decision_of(conflict.detail.get("state"), conflict.message)


async def _roll_back(home: Home, seconds: float) -> HomeDecision:
    args = rollback_args(home.token, await home.log_id(), home.core.settings.service)
    reply = await home.call("xa.outcome", args, within=seconds)
    return decision_of(BundleState[reply["state"]])
