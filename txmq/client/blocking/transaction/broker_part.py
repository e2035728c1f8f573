"""What one broker has of a transaction: what is kept for it until the end of the block,
then its group.

All shares of a transaction carry its token. Their groups go out one after the other and
are answered meanwhile, so that several brokers cost hardly more time than one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable
from uuid import UUID

from txmq.client.blocking.core import Core
from txmq.client.blocking.transaction.bundles import PART_BYTES, Storing, parts_of
from txmq.client.blocking.transaction.decision_pipeline import Told, not_told
from txmq.client.blocking.transaction.decisions import await_state, tell
from txmq.client.protocol.transaction.buffer import Action, Buffer, Built, Mark
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import (
    ClientClosed,
    LocalProtocolError,
    RequestRejected,
    RequestTimeout,
    StaleTopic,
    TransactionAborted,
    TxmqError,
)
from txmq.model.bundle import GroupState
from txmq.model.message import ROLLBACK, Decision, Receipt
from txmq.wire.group import Description, GroupReceipt, Part
from txmq.wire.headers import unpack_decide_receipt


@runtime_checkable
class AckOwner(Protocol):
    """A consumer, as a transaction sees it: `delivered` is a message or batch of its
    own, whose parcel names it.
    """

    @property
    def log_id(self) -> UUID | None:
        """The broker's log that its messages are of; None = not known yet."""

    def ack_actions(self, delivered: object) -> Sequence[Action]:
        """The actions that ack it if the transaction commits. From here on it is the
        transaction's. May raise.
        """

    def transaction_over(self, delivered: object, *, committed: bool | None) -> None:
        """It was acked, or is in hand again; None = nobody knows, the broker will
        deliver it again if it was not.
        """


def require_same_log(owner: AckOwner, log_id: UUID | None) -> None:
    """Raises LocalProtocolError where the consumer is known to be of another broker."""
    if owner.log_id is not None and log_id is not None and owner.log_id != log_id:
        hint = "tx.at(client).ack(...), with the client that the consumer belongs to"
        raise LocalProtocolError(
            "a message of another broker cannot be acked at this one", hint=hint
        )


class ShareMark(NamedTuple):
    """How much there was at a savepoint."""

    buffer: Mark
    acked: int


NOTHING = ShareMark(Mark(0, 0), 0)


class Share:
    """One broker's part in a transaction. For one thread, as the transaction is."""

    def __init__(self, core: Core, token: UUID) -> None:
        self.core, self.token = core, token
        self.buffer = Buffer(core.topics)
        self.sent = False  # whether the broker may have the group
        self.published = False  # whether it is known to be
        self.queued = False  # whether the group waits in the outbox instead
        self._acked: list[tuple[AckOwner, object]] = []
        self._built = Built([], [])
        self._deadline = 0.0
        self._description = Description(())
        self._storing: Storing | None = None
        self._decision: Told | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to send and nothing to ack here."""
        return self.buffer.empty

    def ack(self, delivered: object) -> None:
        """Takes a message, or batch, over from its consumer. Raises LocalProtocolError,
        NotLeased.
        """
        owner = getattr(getattr(delivered, "parcel", None), "owner", None)
        if not isinstance(owner, AckOwner):
            hint = "ack what a consumer of this process delivered, as it delivered it"
            raise LocalProtocolError(
                f"{type(delivered).__name__} cannot be acked in a transaction", hint=hint
            )
        if owner.log_id is not None and getattr(owner, "core", None) is not self.core:
            require_same_log(owner, self.core.log_id)
        self.buffer.actions += owner.ack_actions(delivered)
        self._acked.append((owner, delivered))

    def mark(self) -> ShareMark:
        """How much there is now."""
        return ShareMark(self.buffer.mark(), len(self._acked))

    def back_to(self, mark: ShareMark) -> None:
        """Takes back whatever came since."""
        self.buffer.back_to(mark.buffer)
        self._release(mark.acked, committed=False)

    def over(self, *, committed: bool | None) -> None:
        """The transaction is over; None = nobody knows how.

        What a stored group acks was reserved for it: rolled back, it is delivered
        again, and no longer in hand.
        """
        self.buffer.clear()
        self._release(0, committed=committed or (None if self.sent else committed))

    def prepare(self, description: Description, deadline: float) -> None:
        """Builds the group, which is to be stored by `deadline`; asks the broker for
        topics not known yet.
        """
        self._description, self._deadline = description, deadline
        self._storing = Storing(self.core, self._parts(), deadline)

    def send(self) -> None:
        """Sends the group. Raises BrokerUnavailable; then, and only then, it certainly
        is not there.
        """
        assert self._storing is not None, "prepared first, then sent"
        self._storing.send()
        self.sent = True

    def extend(self, deadline: float) -> None:
        """Allows the group that was sent until `deadline`."""
        assert self._storing is not None, "sent first, then waited for"
        self._deadline = self._storing.deadline = deadline

    def receipt(self) -> GroupReceipt:
        """Waits until the group is durable; stores it anew where a topic has grown, if
        no part of it can be there.

        Raises what the broker refuses it with, ConnectionLost or RequestTimeout, or
        TransactionAborted where it was rolled back meanwhile.
        """
        assert self._storing is not None, "sent first, then answered"
        try:
            receipt = self._receipt()
        except RequestRejected:
            self.sent = self._storing.parts > 1  # of several, some may be there
            raise
        if receipt.state == GroupState.ROLLED_BACK:
            hint = "it took too long, or somebody decided so: txmq tx show"
            raise TransactionAborted(f"transaction {self.token} was rolled back", hint=hint)
        return receipt

    def _receipt(self) -> GroupReceipt:
        assert self._storing is not None, "sent first, then answered"
        for _ in range(self.core.settings.retries):
            try:
                return self._storing.receipt()
            except StaleTopic as stale:
                if self._storing.parts > 1:
                    raise
                self.core.topics.refresh(str(stale.detail.get("topic", "")))
            self._storing = Storing(self.core, self._parts(), self._deadline)
            self._storing.send()
        return self._storing.receipt()

    def give_up(self) -> None:
        """Does not wait for the group any longer."""
        if self._storing is not None:
            self._storing.give_up()

    def tell(self, outcome: Decision) -> None:
        """Sends the decision without waiting for it; should it get lost, whoever else
        knows it tells the broker.
        """
        try:
            self._decision = tell(self.core, self.token, outcome)
        except ClientClosed as closed:
            not_told(self.token, outcome, closed)

    def queue(self) -> None:
        """The group goes to the outbox: with another token, if the broker may have it
        under this one.
        """
        if self.sent:
            self.tell(ROLLBACK)
            self.token, self.sent, self._decision = new_token(), False, None
        self.queued, self._built = True, Built([], [])

    def wait_published(self, deadline: float) -> None:
        """Returns once consumers can see the messages. Raises RequestTimeout,
        TransactionAborted.
        """
        if (
            self.published
            or not (self._built.batches or self.queued)
            or self._told_published(deadline)
        ):
            return
        state = await_state(self.core, self.token, GroupState.PUBLISHED, deadline, ask=True)
        if state is GroupState.ROLLED_BACK:
            raise TransactionAborted(
                f"transaction {self.token} was rolled back", hint="txmq tx show tells by whom"
            )
        if state is not GroupState.PUBLISHED:
            told = state.name if state else "UNKNOWN"
            raise RequestTimeout(
                f"transaction {self.token} is {told}, not published in time",
                hint=f"txmq tx show {self.token}",
            )

    def receipts(self) -> list[Receipt]:
        """The receipts of the messages in the order of their sends; offsets are None
        until it is published.

        There are none for what went through the outbox.
        """
        if not self._built.batches:
            return []
        shown = self.core.call("tx.show", {"token": self.token.hex}, repeat=True)
        return self._built.receipts(self.token, [batch["offset"] for batch in shown["batches"]])

    def _parts(self, most: int = PART_BYTES) -> list[Part]:
        """The parts of the group, by what is known of the topics now."""
        built = self.buffer.build(self.token)
        parts = parts_of(self.token, self._description, built.batches, most)
        self._built = Built([batch._replace(batch=b"") for batch in built.batches], built.places)
        return parts

    def _told_published(self, deadline: float) -> bool:
        if self._decision is None:
            return False
        try:
            payload = self._decision.result(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, TxmqError):
            return False
        return unpack_decide_receipt(payload).state == GroupState.PUBLISHED

    def _release(self, start: int, *, committed: bool | None) -> None:
        acked, self._acked[start:] = self._acked[start:], []
        for owner, delivered in acked:
            owner.transaction_over(delivered, committed=committed)
