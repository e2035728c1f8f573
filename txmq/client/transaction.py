"""Transactions: messages, and whatever else, as one decision. Sends are kept until the end of the block.

Which kind it is depends on who decides: a Postgres transaction (`postgres`), the broker alone (`local`), or the service
that answers for it (`half`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import TracebackType
from typing import Protocol, Self, Unpack, runtime_checkable
from uuid import UUID

from txmq.client.buffer import Action, Buffer, Built
from txmq.client.core import Core
from txmq.client.decisions import await_state
from txmq.client.groups import PART_BYTES, Storing, parts_of
from txmq.client.producer import Fields, micros_now
from txmq.client.rows import columns
from txmq.client.tokens import new_token
from txmq.errors import ClientClosed, LocalProtocolError, RequestTimeout, StaleTopic, TransactionAborted, TxmqError
from txmq.message import Message, Receipt
from txmq.tx.group import GroupState
from txmq.wire.group import Description, GroupReceipt, Part

MICROSECONDS = 1_000_000


@runtime_checkable
class AckOwner(Protocol):
    """A consumer, as a transaction sees it: `delivered` is a message or batch of its own, whose parcel names it."""

    def ack_actions(self, delivered: object) -> Sequence[Action]:
        """The actions that ack it if the transaction commits. From here on it is the transaction's. May raise."""

    def transaction_over(self, delivered: object, *, committed: bool | None) -> None:
        """It was acked, or is in hand again; None = nobody knows, the broker will deliver it again if it was not."""


class Stage(Enum):
    """Where a transaction is in its life."""

    NEW = "has not begun"
    OPEN = "is open"
    STORED = "is stored"  # of a half message whose local work goes on
    OVER = "is over"


class Transaction(ABC):
    """A `with` block whose sends and acks take effect together, or not at all. For one thread, and for one use.

    `token` names it everywhere: in the database, at the broker, in errors.
    """

    def __init__(self, core: Core, *, timeout: float, check_after: float = 0.0) -> None:
        self._core = core
        self._timeout = timeout
        self._check_after = int(check_after * MICROSECONDS)
        self._buffer = Buffer(core.topics)
        self._acked: list[tuple[AckOwner, object]] = []
        self._stage = Stage.NEW
        self._built = Built([], [])
        self._committed = False
        self.token: UUID = new_token()

    def send(self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]) -> None:
        """Sends a message if the transaction commits. Raises LocalProtocolError or MessageTooLarge."""
        self._require(Stage.OPEN)
        self._buffer.add(topic, Message(body, **fields), micros_now(), partition)

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> None:
        """Sends messages given as columns, the fast path for volumes; nobody may change them before the end."""
        self._require(Stage.OPEN)
        self._buffer.add_columns(topic, columns(bodies, keys, tags, micros_now()), partition)

    def ack(self, delivered: object) -> None:
        """Acks a message, or a batch, of one of this process's consumers if the transaction commits."""
        self._require(Stage.OPEN)
        owner = getattr(getattr(delivered, "parcel", None), "owner", None)
        if not isinstance(owner, AckOwner):
            hint = "ack what a consumer of this process delivered, as it delivered it"
            raise LocalProtocolError(f"{type(delivered).__name__} cannot be acked in a transaction", hint=hint)
        self._buffer.actions += owner.ack_actions(delivered)
        self._acked.append((owner, delivered))

    def act(self, action: Action) -> None:
        """Lets an action take effect with the decision: an ack or a replay as docs/FORMATS.md has it."""
        self._require(Stage.OPEN)
        self._buffer.actions.append(action)

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """A block whose sends and acks are taken back where it raises; the error goes on."""
        self._require(Stage.OPEN)
        mark, acked = self._buffer.mark(), len(self._acked)
        try:
            with self._nested():
                yield
        except BaseException:
            self._buffer.back_to(mark)
            self._release(acked, committed=False)
            raise

    def wait_published(self, timeout: float = 5.0) -> None:
        """Returns once consumers can see the messages: all earlier transactions on their keys are decided.

        Raises RequestTimeout where that takes longer, TransactionAborted where somebody rolled it back.
        """
        if not self._committed:
            raise LocalProtocolError(f"transaction {self.token} was not committed here")
        deadline = time.monotonic() + timeout
        if not self._built.batches or self._known_published(deadline):
            return
        state = await_state(self._core, self.token, GroupState.PUBLISHED, deadline, ask=True)
        if state is GroupState.ROLLED_BACK:
            raise TransactionAborted(f"transaction {self.token} was rolled back", hint="txmq tx show tells by whom")
        if state is not GroupState.PUBLISHED:
            told = state.name if state else "UNKNOWN"
            raise RequestTimeout(f"transaction {self.token} is {told} after {timeout} s, not yet published")

    def receipts(self) -> list[Receipt]:
        """The receipts of the messages in the order of their sends; offsets are None until it is published."""
        if not self._built.batches:
            return []
        shown = self._core.call("tx.show", {"token": self.token.hex}, repeat=True)
        return self._built.receipts(self.token, [batch["offset"] for batch in shown["batches"]])

    def __enter__(self) -> Self:
        self._require(Stage.NEW)
        self._stage = Stage.OPEN
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        known: bool | None = None
        try:
            if error is None:
                self._commit()
                known = self._committed = True
            else:
                known = False
                self._abort()
        except TxmqError as failure:
            known = None if failure.outcome == "unknown" else False
            raise
        finally:
            self._stage = Stage.OVER
            self._buffer.clear()
            self._release(0, committed=known)

    @abstractmethod
    def _commit(self) -> None:
        """Called at the end of the block; returns only if the transaction is committed."""

    @abstractmethod
    def _abort(self) -> None:
        """Called when the block has raised."""

    @contextmanager
    def _nested(self) -> Iterator[None]:
        """Around the block of a savepoint."""
        yield

    def _known_published(self, deadline: float) -> bool:
        """Whether it is published for all that is known here."""
        return False

    def _description(self, *decider: object) -> Description:
        service = self._core.settings.service or ""
        return Description(decider, service, tuple(self._buffer.actions), self._check_after)

    def _parts(self, description: Description, most: int = PART_BYTES) -> list[Part]:
        """The parts of the group, by what is known of the topics now."""
        built = self._buffer.build(self.token)
        parts = parts_of(self.token, description, built.batches, most)
        self._built = Built([batch._replace(batch=b"") for batch in built.batches], built.places)
        return parts

    def _storing(self, description: Description, deadline: float) -> Storing:
        return Storing(self._core, self._parts(description), deadline)

    def _receipt(self, storing: Storing, description: Description, deadline: float) -> GroupReceipt:
        """Waits for the group; stores it anew where a topic has grown, if no part of it can be there."""
        for _ in range(self._core.settings.retries):
            try:
                return storing.receipt()
            except StaleTopic as stale:
                if storing.parts > 1:
                    raise
                self._core.topics.refresh(str(stale.detail.get("topic", "")))
            storing = self._storing(description, deadline)
            storing.send()
        return storing.receipt()

    def _release(self, start: int, *, committed: bool | None) -> None:
        acked, self._acked[start:] = self._acked[start:], []
        for owner, delivered in acked:
            owner.transaction_over(delivered, committed=committed)

    def _require(self, stage: Stage) -> None:
        if self._stage is stage:
            return
        if self._stage is Stage.OVER:
            raise ClientClosed(f"transaction {self.token} is over", hint="begin another one with client.transaction")
        raise LocalProtocolError(f"transaction {self.token} {self._stage.value}", hint="use it inside its `with` block")
