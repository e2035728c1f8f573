"""Decide a stored bundle, and find out how it was decided."""

from __future__ import annotations

import time
from concurrent.futures import Future
from contextlib import suppress
from uuid import UUID

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.decision_pipeline import PendingDecision
from txmq.client.protocol.transaction.decision import decide_request, deciding
from txmq.errors import ClientClosed, TxmqError, UnknownTransaction
from txmq.model.bundle import BundleState, DecideReceipt
from txmq.model.message import Decision
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode, unpack_decide_receipt

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.2  # between polls of a bundle's state


def decide(
    core: BlockingCore, token: UUID, outcome: Decision, *, timeout: float | None = None
) -> DecideReceipt:
    """Decide a bundle and wait for the receipt.

    Raises Conflict if the bundle has the other outcome, and as a call does.
    """
    payload = decide_request(token, outcome, core.settings.service)
    with deciding(core.settings, token, outcome):
        receipt = core.request(Opcode.DECIDE, payload, timeout=timeout, repeat=True)
    return unpack_decide_receipt(receipt)


def submit_decision(core: BlockingCore, token: UUID, outcome: Decision) -> Future[bytes]:
    """Decide a bundle without waiting; return the future of the receipt."""
    return core.sender.request(Opcode.DECIDE, decide_request(token, outcome, core.settings.service))


def send_decision(core: BlockingCore, token: UUID, outcome: Decision) -> PendingDecision:
    """Decide a bundle without waiting, at less cost than `submit_decision`.

    The answer is read by a later request on the same connection.
    """
    request = decide_request(token, outcome, core.settings.service)
    with deciding(core.settings, token, outcome):
        return core.decision_pipeline.send(token, outcome, request)


def request_check(core: BlockingCore, token: UUID) -> None:
    """Have the broker ask a bundle's decider now, without waiting for it.

    If the request is lost, the broker asks at its time.
    """
    with suppress(ClientClosed):
        core.sender.request(Opcode.CALL, encode_call("tx.check", {"token": token.hex}))


def state_of(core: BlockingCore, token: UUID, timeout: float) -> BundleState | None:
    """Return the state of a bundle; None = the broker has no bundle of that token."""
    try:
        return BundleState[
            core.call("tx.show", {"token": token.hex}, timeout=timeout, repeat=True)["state"]
        ]
    except UnknownTransaction:
        return None


def await_state(
    core: BlockingCore, token: UUID, target: BundleState, deadline: float, *, check: bool = False
) -> BundleState | None:
    """Poll a bundle until it reaches `target` or is rolled back, or until `deadline`.

    Returns its last known state. `check` makes the broker ask the decider before each
    poll. Errors of calls are retried.
    """
    pause, state = FIRST_PAUSE_S, None
    while True:
        left = max(deadline - time.monotonic(), FIRST_PAUSE_S)
        try:
            if check:
                core.call("tx.check", {"token": token.hex}, timeout=left)
            state = state_of(core, token, left)
        except TxmqError:
            pause = LONGEST_PAUSE_S
        if (state is not None and state >= target) or time.monotonic() + pause >= deadline:
            return state
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
