"""Deciding a stored group, and finding out how it was decided."""

from __future__ import annotations

import time
from concurrent.futures import Future
from uuid import UUID

from txmq.client.blocking.core import Core
from txmq.client.blocking.transaction.bundles import EPOCH
from txmq.client.blocking.transaction.decision_pipeline import Told
from txmq.errors import TxmqError, UnknownTransaction
from txmq.model.bundle import GroupState
from txmq.model.message import Decision
from txmq.wire.headers import Decide, DecideReceipt, Opcode, pack_decide, unpack_decide_receipt

FIRST_LOOK_S, LONGEST_LOOK_S = 0.005, 0.2  # between looks at a transaction


def decide(
    core: Core, token: UUID, outcome: Decision, *, timeout: float | None = None
) -> DecideReceipt:
    """Decides a group and waits for the answer. Raises Conflict where it has the other
    outcome, and as a call does.
    """
    payload = pack_decide(Decide(outcome, token.bytes, EPOCH, by(core)))
    return unpack_decide_receipt(core.request(Opcode.DECIDE, payload, timeout=timeout, repeat=True))


def submit(core: Core, token: UUID, outcome: Decision) -> Future[bytes]:
    """Decides a group without waiting; the future gets the receipt."""
    return core.pipeline.submit(
        Opcode.DECIDE, pack_decide(Decide(outcome, token.bytes, EPOCH, by(core)))
    )


def tell(core: Core, token: UUID, outcome: Decision) -> Told:
    """As `submit`, at less cost where a connection is at hand."""
    return core.teller.tell(
        token, outcome, pack_decide(Decide(outcome, token.bytes, EPOCH, by(core)))
    )


def by(core: Core) -> str:
    """In whose name a client decides: it stands in the broker's journal."""
    return f"producer {core.settings.service}" if core.settings.service else "producer"


def state_of(core: Core, token: UUID, timeout: float) -> GroupState | None:
    """Where a group stands; None where the broker knows none such. Raises as a call
    does.
    """
    try:
        return GroupState[
            core.call("tx.show", {"token": token.hex}, timeout=timeout, repeat=True)["state"]
        ]
    except UnknownTransaction:
        return None


def await_state(
    core: Core, token: UUID, least: GroupState, deadline: float, *, ask: bool = False
) -> GroupState | None:
    """Looks until a group has come so far or is rolled back; gives how far it is then,
    or at the deadline.

    `ask`: whoever decides it is asked, again and again. A broker that does not answer
    is asked again as well.
    """
    pause, state = FIRST_LOOK_S, None
    while True:
        left = max(deadline - time.monotonic(), FIRST_LOOK_S)
        try:
            if ask:
                core.call("tx.check", {"token": token.hex}, timeout=left)
            state = state_of(core, token, left)
        except TxmqError:
            pause = LONGEST_LOOK_S
        if (state is not None and state >= least) or time.monotonic() + pause >= deadline:
            return state
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_LOOK_S)
