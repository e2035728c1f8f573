"""The DECIDE request of a client, and the receipt that answers it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from uuid import UUID

from txmq.client.protocol.settings import ClientSettings
from txmq.client.protocol.transaction.parts import EPOCH
from txmq.model.bundle import BundleState
from txmq.model.message import Decision
from txmq.wire.data_requests import Decide, pack_decide, unpack_decide_receipt

NOT_TRACED = nullcontext()


def decided_by(service: str | None) -> str:
    """Return the name under which the broker's journal records a client's decision."""
    return f"producer {service}" if service else "producer"


def decide_request(token: UUID, outcome: Decision, service: str | None) -> bytes:
    """Return the payload of a DECIDE request."""
    return pack_decide(Decide(outcome, token.bytes, EPOCH, decided_by(service)))


def deciding(
    settings: ClientSettings, token: UUID, outcome: Decision
) -> AbstractContextManager[None]:
    """Return a block in which a client decides a bundle, for its telemetry."""
    telemetry = settings.telemetry
    return NOT_TRACED if telemetry is None else telemetry.deciding(token, outcome)


def is_published(receipt: bytes) -> bool:
    """Return whether a decision's receipt says that consumers can see the messages."""
    return unpack_decide_receipt(receipt).state == BundleState.PUBLISHED
