"""The bundle of a transaction at one broker, without the requests that store it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, Protocol, TypeVar
from uuid import UUID

from txmq.client.protocol.sender.topics import TopicCache
from txmq.client.protocol.settings import ClientSettings
from txmq.client.protocol.transaction.acks import AckOwner, ack_owner_of, require_same_log
from txmq.client.protocol.transaction.buffer import Buffer, BufferPosition, BuiltBatches
from txmq.client.protocol.transaction.parts import batch_count, split_into_parts
from txmq.wire.bundle import BundleDescription, BundlePart

if TYPE_CHECKING:  # OpenTelemetry is for those who ask for it
    from txmq.client.protocol.telemetry.tracing import Operation


class BundleCore(Protocol):
    """The shared state of the client of a bundle's broker."""

    settings: ClientSettings
    topics: TopicCache

    @property
    def known_log_id(self) -> UUID | None:
        """The log of the broker if it is known without asking."""


class BundlePosition(NamedTuple):
    """The length of a bundle's buffer and of its acks at a savepoint."""

    buffer: BufferPosition
    acked: int


NOT_BUILT = BuiltBatches([], [])  # Buffer.build makes lists of its own
BUNDLE_START = BundlePosition(BufferPosition(0, 0), 0)
K = TypeVar("K", bound=BundleCore)


class Bundle(Generic[K]):
    """A transaction's messages and acks at one broker.

    `decided_by_seal`: the request that completes it commits it.
    """

    decided_by_seal: ClassVar[bool] = False

    # Seconds for a call in the block, because row locks wait; None = the client's.
    patience: float | None = None
    first_number = 0  # of its messages, whose ids are TOKEN-NUMBER
    sent = False  # the broker may have it
    published = False  # known to be visible to consumers
    in_outbox = False  # it waits in the database instead
    _built = NOT_BUILT
    _part_count = 0
    _deadline = 0.0
    _description: BundleDescription | None = None
    _operation: Operation | None = None  # that stores it, for telemetry

    def __init__(self, core: K, token: UUID) -> None:
        self.core, self.token = core, token
        self.buffer = Buffer(core.topics)
        self._acked: list[tuple[AckOwner, object]] = []

    def ack(self, delivered: object) -> None:
        """Add the ack of a message or a batch, and reserve it at its consumer.

        Raises LocalProtocolError or NotLeased.
        """
        owner = ack_owner_of(delivered)
        if owner.log_id is not None and getattr(owner, "core", None) is not self.core:
            require_same_log(owner, self._log_id())
        self.buffer.actions += owner.ack_actions(delivered)
        self._acked.append((owner, delivered))

    def _log_id(self) -> UUID | None:
        """Return the id of the broker's log, or None where that is not known."""
        return self.core.known_log_id

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

    def _parts(self, stored: Sequence[BundlePart] = ()) -> list[BundlePart]:
        """Build the parts for the topics' partitions as they are cached now, but for
        those that are `stored`.
        """
        assert self._description is not None, "build() sets it"
        before = self._built.first(batch_count(stored)) if stored else None
        built = self.buffer.build(self.token, self.first_number, stored=before)
        parts = split_into_parts(self.token, self._description, built.batches, stored=stored)
        self._built = built
        self._part_count = len(parts)
        return parts

    def _begin_operation(self) -> None:
        telemetry = self.core.settings.telemetry
        if telemetry is not None:
            self._operation = telemetry.store(self.buffer.items, decided=self.decided_by_seal)

    def _end_operation(self, error: BaseException | None = None) -> None:
        if self._operation is not None:
            self._operation.end(None, error)
            self._operation = None

    def _finish_acks(self, start: int, *, committed: bool | None) -> None:
        acked, self._acked[start:] = self._acked[start:], []
        for owner, delivered in acked:
            owner.transaction_ended(delivered, committed=committed)
