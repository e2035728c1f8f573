"""Decide a stored bundle, and find out how it was decided."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import suppress
from uuid import UUID

from txmq.client.blocking.at_once import CoreAtOnce
from txmq.client.blocking.core import BlockingCore
from txmq.client.protocol.awaited import decisions
from txmq.client.protocol.sender.accumulator import SideRequest
from txmq.client.protocol.transaction.decision import decide_request
from txmq.errors import ClientClosed
from txmq.faces import run
from txmq.model.bundle import BundleState, DecideReceipt
from txmq.model.message import Decision
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode


def decide(
    core: BlockingCore, token: UUID, outcome: Decision, *, timeout: float | None = None
) -> DecideReceipt:
    """Decide a bundle and wait for the receipt: see `awaited.decisions`."""
    return run(decisions.decide(CoreAtOnce(core), token, outcome, within=timeout))


def submit_decision(core: BlockingCore, token: UUID, outcome: Decision) -> Future[bytes]:
    """Decide a bundle without waiting; return the future of the receipt."""
    return core.sender.request(
        SideRequest(Opcode.DECIDE, decide_request(token, outcome, core.settings.service))
    )


def request_check(core: BlockingCore, token: UUID) -> None:
    """Have the broker ask a bundle's decider now, without waiting for it.

    If the request is lost, the broker asks at its time.
    """
    with suppress(ClientClosed):
        core.sender.request(SideRequest(Opcode.CALL, encode_call("tx.check", {"token": token.hex})))


def state_of(core: BlockingCore, token: UUID, timeout: float) -> BundleState | None:
    """Return the state of a bundle; None = the broker has no bundle of that token."""
    return run(decisions.state_of(CoreAtOnce(core), token, timeout))


def await_state(
    core: BlockingCore, token: UUID, target: BundleState, deadline: float, *, check: bool = False
) -> BundleState | None:
    """Wait for the state of a bundle: see `awaited.decisions`."""
    waited = decisions.await_state(CoreAtOnce(core), token, target, deadline, check=check)
    return run(waited)
