"""The home broker of an XA transaction: its decision is asked for until it answers, and
its journal is kept.
"""

from __future__ import annotations

import time
from typing import NamedTuple
from uuid import UUID

from txmq.client.blocking.core import Core
from txmq.client.blocking.transaction.decisions import FIRST_LOOK_S, LONGEST_LOOK_S, by, decide
from txmq.client.log import get_logger
from txmq.errors import Conflict, TxmqError
from txmq.model.bundle import GroupState
from txmq.model.message import COMMIT, ROLLBACK, UNKNOWN, Decision

BY = 127  # characters that a broker takes for whoever asks
FOUND = {COMMIT: "rolled back", ROLLBACK: "committed"}  # what contradicts a decision
log = get_logger()


class Verdict(NamedTuple):
    """What the home broker has decided, durably; UNKNOWN where it gave no answer, the
    last trouble being `why`.
    """

    decision: Decision
    published: bool = False
    why: str = ""


def ask(core: Core, token: UUID, question: Decision, deadline: float) -> Verdict:
    """Asks for COMMIT or ROLLBACK, again and again while the broker is away. The answer
    may be the other one.
    """
    once = _commit if question is COMMIT else _roll_back
    pause = FIRST_LOOK_S
    while True:
        try:
            return once(core, token, max(deadline - time.monotonic(), FIRST_LOOK_S))
        except TxmqError as error:
            in_vain = not error.retriable and error.outcome != "unknown"
            if in_vain or time.monotonic() + pause >= deadline:
                return Verdict(UNKNOWN, why=error.message)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_LOOK_S)


def note_mixed(core: Core, token: UUID, gid: str, decision: Decision) -> None:
    """Keeps in the broker's journal that a branch was found otherwise than decided, and
    says so in the log.
    """
    found = FOUND[decision]
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


def _commit(core: Core, token: UUID, timeout: float) -> Verdict:
    try:
        state = decide(core, token, COMMIT, timeout=timeout).state
    except Conflict as conflict:
        return _verdict(conflict.detail.get("state"), conflict.message)
    return _verdict(state)


def _roll_back(core: Core, token: UUID, timeout: float) -> Verdict:
    """Also where the broker has never heard of it: then it makes sure that nothing is
    stored later.
    """
    asked = {"token": token.hex, "log_id": str(core.log_id), "decide": True, "by": by(core)[:BY]}
    return _verdict(
        GroupState[core.call("xa.outcome", asked, timeout=timeout, repeat=True)["state"]]
    )


def _verdict(state: object, why: str = "") -> Verdict:
    if state == GroupState.ROLLED_BACK:
        return Verdict(ROLLBACK, why=why)
    if state in (GroupState.COMMITTED, GroupState.PUBLISHED):
        return Verdict(COMMIT, published=state == GroupState.PUBLISHED, why=why)
    return Verdict(UNKNOWN, why=why)
