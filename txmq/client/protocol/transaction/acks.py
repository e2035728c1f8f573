"""Acks that take effect with a transaction: the contract between it and a consumer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable
from uuid import UUID

from txmq.client.protocol.consumer.fetched import owner_of
from txmq.errors import LocalProtocolError
from txmq.model.actions import AckAction


@runtime_checkable
class AckOwner(Protocol):
    """A consumer whose messages a transaction can ack.

    `delivered` is a message or a batch that this consumer has delivered.
    """

    @property
    def log_id(self) -> UUID | None:
        """The log of the consumer's broker; None = not known yet."""

    def ack_actions(self, delivered: object) -> Sequence[AckAction]:
        """Return the actions that ack `delivered`, which the transaction now owns.

        Raises NotLeased.
        """

    def transaction_ended(self, delivered: object, *, committed: bool | None) -> None:
        """Settle `delivered`: acked if `committed`, else the consumer's own again.

        None = the outcome is unknown. The broker delivers it again unless it was acked.
        """


def ack_owner_of(delivered: object) -> AckOwner:
    """Return the consumer of a message or a batch. Raises LocalProtocolError."""
    owner = owner_of(delivered)
    if not isinstance(owner, AckOwner):
        raise LocalProtocolError(
            f"A transaction cannot ack an object of type {type(delivered).__name__}",
            hint="ack a message or a batch as a consumer of this process has delivered it",
        )
    return owner


def require_same_log(owner: AckOwner, log_id: UUID | None) -> None:
    """Raise LocalProtocolError where the consumer is known to have another broker."""
    if owner.log_id is not None and log_id is not None and owner.log_id != log_id:
        raise LocalProtocolError(
            "A message of another broker cannot be acked at this one",
            hint="use tx.at(client).ack(...), with the client of the consumer",
        )
