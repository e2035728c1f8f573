"""Decide a stored bundle, and find out how it was decided."""

from __future__ import annotations

from uuid import UUID

from txmq.client.protocol.awaited.core import AwaitedCore
from txmq.client.protocol.transaction.decision import decide_request, deciding
from txmq.errors import TxmqError, UnknownTransaction
from txmq.model.bundle import BundleState, DecideReceipt
from txmq.model.message import Decision
from txmq.wire.data_requests import Opcode, unpack_decide_receipt

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.2  # between polls


async def decide(
    core: AwaitedCore, token: UUID, outcome: Decision, *, within: float | None = None
) -> DecideReceipt:
    """Decide a bundle and wait for the receipt.

    Raises Conflict if the bundle has the other outcome, and as a call does.
    """
    payload = decide_request(token, outcome, core.settings.service)
    with deciding(core.settings, token, outcome):
        receipt = await core.request(Opcode.DECIDE, payload, repeat=True, within=within)
    return unpack_decide_receipt(receipt)


async def state_of(core: AwaitedCore, token: UUID, within: float) -> BundleState | None:
    """Return the state of a bundle; None = the broker has no bundle of that token."""
    try:
        shown = await core.call("tx.show", {"token": token.hex}, repeat=True, within=within)
    except UnknownTransaction:
        return None
    return BundleState[shown["state"]]


async def await_state(
    core: AwaitedCore, token: UUID, target: BundleState, deadline: float, *, check: bool = False
) -> BundleState | None:
    """Poll a bundle until it reaches `target` or is rolled back, or until `deadline`.

    Returns its last known state. `check` makes the broker ask the decider before each
    poll. Errors of calls are retried.
    """
    pause, state = FIRST_PAUSE_S, None
    while True:
        left = max(deadline - core.seconds(), FIRST_PAUSE_S)
        try:
            if check:
                await core.call("tx.check", {"token": token.hex}, within=left)
            state = await state_of(core, token, left)
        except TxmqError:
            pause = LONGEST_PAUSE_S
        if (state is not None and state >= target) or core.seconds() + pause >= deadline:
            return state
        await core.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
