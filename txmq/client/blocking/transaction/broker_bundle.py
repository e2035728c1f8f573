"""The bundle of a transaction at one broker, from its first send to its decision.

All bundles of a transaction carry its token. The brokers store them at the same time,
so that several brokers cost hardly more time than one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple
from uuid import UUID

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.decision_pipeline import PendingDecision, log_undelivered
from txmq.client.blocking.transaction.bundle_upload import BundleUpload
from txmq.client.blocking.transaction.decisions import await_state, send_decision
from txmq.client.protocol.transaction.acks import AckOwner, ack_owner_of, require_same_log
from txmq.client.protocol.transaction.buffer import Buffer, BufferPosition, BuiltBatches
from txmq.client.protocol.transaction.decision import is_published
from txmq.client.protocol.transaction.parts import batch_count, split_into_parts
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import (
    ClientClosed,
    RequestRejected,
    RequestTimeout,
    StaleTopic,
    TransactionAborted,
    TxmqError,
)
from txmq.model.bundle import BundleReceipt, BundleState
from txmq.model.message import ROLLBACK, Decision, Receipt
from txmq.wire.bundle import BundleDescription, BundlePart

if TYPE_CHECKING:  # OpenTelemetry is for those who ask for it
    from txmq.client.protocol.telemetry.tracing import Operation


class BundlePosition(NamedTuple):
    """The length of a bundle's buffer and of its acks at a savepoint."""

    buffer: BufferPosition
    acked: int


BUNDLE_START = BundlePosition(BufferPosition(0, 0), 0)


class BrokerBundle:
    """A transaction's messages and acks at one broker. For one thread.

    `decided_by_seal`: the request that completes it commits it.
    """

    decided_by_seal: ClassVar[bool] = False

    def __init__(self, core: BlockingCore, token: UUID) -> None:
        self.core, self.token = core, token
        self.buffer = Buffer(core.topics)
        self.first_number = 0  # of its messages, whose ids are TOKEN-NUMBER
        self.sent = False  # the broker may have it
        self.published = False  # known to be visible to consumers
        self.in_outbox = False  # it waits in the database instead
        self._acked: list[tuple[AckOwner, object]] = []
        self._built = BuiltBatches([], [])
        self._deadline = 0.0
        self._description: BundleDescription | None = None
        self._upload: BundleUpload | None = None
        self._decision: PendingDecision | None = None
        self._operation: Operation | None = None

    @property
    def empty(self) -> bool:
        """Return whether there is nothing to send and nothing to ack."""
        return self.buffer.empty

    def ack(self, delivered: object) -> None:
        """Add the ack of a message or a batch, and reserve it at its consumer.

        Raises LocalProtocolError or NotLeased.
        """
        owner = ack_owner_of(delivered)
        if owner.log_id is not None and getattr(owner, "core", None) is not self.core:
            require_same_log(owner, self.core.log_id)
        self.buffer.actions += owner.ack_actions(delivered)
        self._acked.append((owner, delivered))

    def position(self) -> BundlePosition:
        """Return the present length."""
        return BundlePosition(self.buffer.position(), len(self._acked))

    def truncate(self, position: BundlePosition) -> None:
        """Withdraw the sends and acks behind a position."""
        self.buffer.truncate(position.buffer)
        self._finish_acks(position.acked, committed=False)

    def finish(self, *, committed: bool | None) -> None:
        """Settle the acks at the end of the transaction; None = the outcome is unknown.

        A stored bundle has reserved the messages that it acks. After a rollback the
        broker delivers them again, so the consumer does not hold them any more.
        """
        self.buffer.clear()
        self._finish_acks(0, committed=committed or (None if self.sent else committed))

    def store(self, description: BundleDescription, deadline: float) -> BundleReceipt:
        """Build and send all parts, and wait until the broker has made them durable.

        Raises as `await_receipt`.
        """
        self.build(description, deadline)
        self.send()
        return self.await_receipt()

    def build(self, description: BundleDescription, deadline: float) -> None:
        """Build the parts, to be stored by `deadline`; look unknown topics up first."""
        self._description, self._deadline = description, deadline
        self._upload = BundleUpload(self.core, self._parts(), deadline)

    def send(self) -> None:
        """Send all parts.

        BrokerUnavailable is the only error after which the broker certainly has
        nothing.
        """
        assert self._upload is not None, "build() comes before send()"
        telemetry = self.core.settings.telemetry
        if telemetry is not None:
            self._operation = telemetry.store(self.buffer.items, decided=self.decided_by_seal)
        try:
            self._upload.send()
        except BaseException as error:
            self._end_operation(error)
            raise
        self.sent = True

    def _end_operation(self, error: BaseException | None = None) -> None:
        if self._operation is not None:
            self._operation.end(None, error)
            self._operation = None

    def extend_deadline(self, deadline: float) -> None:
        """Set a later deadline for the receipt."""
        assert self._upload is not None, "send() comes before extend_deadline()"
        self._deadline = self._upload.deadline = deadline

    def await_receipt(self) -> BundleReceipt:
        """Wait until the broker has made the bundle durable.

        If topics have grown meanwhile, the parts that are not stored are built anew.
        Raises the broker's refusal, ConnectionLost, RequestTimeout, or
        TransactionAborted if the bundle was rolled back meanwhile.
        """
        assert self._upload is not None, "send() comes before await_receipt()"
        try:
            receipt = self._await_receipt()
        except BaseException as error:
            self._end_operation(error)
            if isinstance(error, RequestRejected):
                self.sent = self._upload.part_count > 1  # some parts may be stored
            raise
        self._end_operation()
        if receipt.state == BundleState.ROLLED_BACK:
            raise TransactionAborted(
                f"Transaction {self.token} was rolled back before it was complete",
                hint="it took too long, or an operator decided so: see `txmq tx show`",
            )
        return receipt

    def _await_receipt(self) -> BundleReceipt:
        assert self._upload is not None, "send() comes before await_receipt()"
        while True:
            try:
                return self._upload.await_receipt()
            except StaleTopic as stale:
                stored = self._upload.stored_parts
                if stored is None or time.monotonic() >= self._deadline:
                    raise
                self.core.topics.refresh(str(stale.detail.get("topic", "")))
            parts = self._parts(stored=self._upload.parts[:stored])
            self._upload = BundleUpload(self.core, parts, self._deadline, stored)
            self._upload.send()

    def abandon(self) -> None:
        """Stop waiting for the receipt."""
        self._end_operation()
        if self._upload is not None:
            self._upload.abandon()

    def send_decision(self, outcome: Decision) -> None:
        """Send the decision without waiting for the answer.

        If the decision is lost, the broker learns it by a check-back or from recovery.
        """
        try:
            self._decision = send_decision(self.core, self.token, outcome)
        except ClientClosed as closed:
            log_undelivered(self.token, outcome, closed)

    def move_to_outbox(self) -> None:
        """Leave the messages to the outbox.

        They get a new token if the broker may have the bundle under the old one.
        """
        if self.sent:
            self.send_decision(ROLLBACK)
            self.token, self.sent, self._decision = new_token(), False, None
        self.in_outbox, self._built = True, BuiltBatches([], [])

    def wait_published(self, deadline: float) -> None:
        """Wait until consumers can see the messages.

        Raises RequestTimeout or TransactionAborted.
        """
        if (
            self.published
            or not (self._built.batches or self.in_outbox)
            or self._decision_was_published(deadline)
        ):
            return
        state = await_state(self.core, self.token, BundleState.PUBLISHED, deadline, check=True)
        if state is BundleState.ROLLED_BACK:
            raise TransactionAborted(
                f"Transaction {self.token} was rolled back",
                hint="`txmq tx show` tells who rolled it back",
            )
        if state is not BundleState.PUBLISHED:
            raise RequestTimeout(
                f"Transaction {self.token} is not published in time, but "
                f"{state.name if state else 'UNKNOWN'}",
                hint=f"see `txmq tx show {self.token}`",
            )

    def receipts(self) -> list[Receipt]:
        """Return the receipts in the order of the sends; see TransactionOperations."""
        if not self._built.batches:
            return []
        shown = self.core.call("tx.show", {"token": self.token.hex}, repeat=True)
        offsets = [batch["offset"] for batch in shown["batches"]]
        return self._built.receipts(self.token, offsets, self.first_number)

    def _parts(self, stored: Sequence[BundlePart] = ()) -> list[BundlePart]:
        """Build the parts for the topics' partitions as they are cached now, but for
        those that are `stored`.
        """
        assert self._description is not None, "build() sets it"
        before = self._built.first(batch_count(stored)) if stored else None
        built = self.buffer.build(self.token, self.first_number, stored=before)
        parts = split_into_parts(self.token, self._description, built.batches, stored=stored)
        self._built = BuiltBatches(
            [batch._replace(batch=b"") for batch in built.batches], built.message_indexes
        )
        return parts

    def _decision_was_published(self, deadline: float) -> bool:
        if self._decision is None:
            return False
        try:
            payload = self._decision.result(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, TxmqError):
            return False
        return is_published(payload)

    def _finish_acks(self, start: int, *, committed: bool | None) -> None:
        acked, self._acked[start:] = self._acked[start:], []
        for owner, delivered in acked:
            owner.transaction_ended(delivered, committed=committed)
