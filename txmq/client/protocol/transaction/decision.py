"""The DECIDE request of a client, and the receipt that answers it."""

from __future__ import annotations

from uuid import UUID

from txmq.client.protocol.transaction.parts import EPOCH
from txmq.model.bundle import BundleState
from txmq.model.message import Decision
from txmq.wire.data_requests import Decide, pack_decide, unpack_decide_receipt


def decided_by(service: str | None) -> str:
    """Return the name under which the broker's journal records a client's decision."""
    return f"producer {service}" if service else "producer"


def decide_request(token: UUID, outcome: Decision, service: str | None) -> bytes:
    """Return the payload of a DECIDE request."""
    return pack_decide(Decide(outcome, token.bytes, EPOCH, decided_by(service)))


def is_published(receipt: bytes) -> bool:
    """Return whether a decision's receipt says that consumers can see the messages."""
    return unpack_decide_receipt(receipt).state == BundleState.PUBLISHED
