"""Transactions: messages, and whatever else, as one decision. Sends are kept until the
end of the block.

Which kind it is depends on who decides: a Postgres transaction (`postgres`), the broker
alone (`local`), or the service that answers for it (`half`). Where the database
decides, messages may go to several brokers: `at`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self, Unpack
from uuid import UUID

from txmq.client.blocking.core import Core
from txmq.client.blocking.sender.producer import Fields, micros_now
from txmq.client.blocking.transaction.broker_part import NOTHING, Share
from txmq.client.protocol.sender.rows import columns
from txmq.client.protocol.transaction.buffer import Action
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ClientClosed, LocalProtocolError, TransactionAborted, TxmqError
from txmq.model.message import Message, Receipt
from txmq.wire.group import Description, Participant

if TYPE_CHECKING:
    from txmq.client.blocking.client import Client

MICROSECONDS = 1_000_000


class Stage(Enum):
    """Where a transaction is in its life."""

    NEW = "has not begun"
    OPEN = "is open"
    STORED = "is stored"  # of a half message whose local work goes on
    OVER = "is over"


class Face(ABC):
    """What a block can do at one broker, and all of it takes effect with the
    transaction.
    """

    def __init__(self, share: Share) -> None:
        self._share = share

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Sends a message if the transaction commits. Raises LocalProtocolError or
        MessageTooLarge.
        """
        self._require(Stage.OPEN)
        self._share.buffer.add(topic, Message(body, **fields), micros_now(), partition)

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> None:
        """Sends messages given as columns, the fast path for volumes; nobody may change
        them before the end.
        """
        self._require(Stage.OPEN)
        self._share.buffer.add_columns(topic, columns(bodies, keys, tags, micros_now()), partition)

    def ack(self, delivered: object) -> None:
        """Acks a message, or a batch, of one of this process's consumers if the
        transaction commits.

        Raises LocalProtocolError where it is none of this broker's, NotLeased where it
        is not in hand any more.
        """
        self._require(Stage.OPEN)
        self._share.ack(delivered)

    def act(self, action: Action) -> None:
        """Lets an action take effect with the decision: an ack or a replay as
        docs/FORMATS.md has it.
        """
        self._require(Stage.OPEN)
        self._share.buffer.actions.append(action)

    def receipts(self) -> list[Receipt]:
        """The receipts of the messages sent here, in the order of their sends; offsets
        are None until it is published. There are none for what went through the outbox.
        """
        return self._share.receipts()

    @abstractmethod
    def _require(self, stage: Stage) -> None:
        """Raises ClientClosed or LocalProtocolError where the transaction is not
        there.
        """


class Elsewhere(Face):
    """A transaction at another broker than its own client's."""

    def __init__(self, transaction: Transaction, share: Share) -> None:
        super().__init__(share)
        self._transaction = transaction

    def _require(self, stage: Stage) -> None:
        self._transaction._require(stage)  # its other face


class Transaction(Face):
    """A `with` block whose sends and acks take effect together, or not at all. For one
    thread, and for one use.

    `token` names it everywhere: in the database, at the brokers, in errors.
    """

    _share_type: ClassVar[type[Share]] = Share
    _one_broker: ClassVar[str] = (
        ""  # why there is no second one, with what to do instead; empty: there may be more
    )

    def __init__(self, core: Core, *, timeout: float, check_after: float = 0.0) -> None:
        self.token: UUID = new_token()
        super().__init__(self._share_type(core, self.token))
        self._shares = [self._share]
        self._core = core
        self._timeout = timeout
        self._check_after = int(check_after * MICROSECONDS)
        self._stage = Stage.NEW
        self._committed = False
        self._rollback_only = ""  # why, if so

    def set_rollback_only(self, reason: str = "") -> None:
        """Lets nothing of it be committed, whatever the rest of the block does: its end
        raises TransactionAborted.
        """
        if self._stage is not Stage.STORED:
            self._require(Stage.OPEN)
        self._rollback_only = self._rollback_only or reason or "no reason was given"

    def at(self, client: Client) -> Face:
        """The same transaction at another client's broker: what is sent and acked there
        is part of it.

        Asks the brokers which logs they have where that is not known yet. Raises as a
        call does, and LocalProtocolError for a kind of transaction that has one broker.
        """
        self._require(Stage.OPEN)
        return Elsewhere(self, self._share_of(client.core))

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """A block whose sends and acks are taken back where it raises; the error goes
        on.
        """
        self._require(Stage.OPEN)
        marks = {share: share.mark() for share in self._shares}
        try:
            with self._nested():
                yield
        except BaseException:
            for share in self._shares:
                share.back_to(marks.get(share, NOTHING))
            raise

    def wait_published(self, timeout: float = 5.0) -> None:
        """Returns once consumers can see the messages: all earlier transactions on
        their keys are decided.

        Raises RequestTimeout where that takes longer, TransactionAborted where somebody
        rolled it back.
        """
        if not self._committed:
            raise LocalProtocolError(
                f"transaction {self.token} was not committed here", hint="wait behind its block"
            )
        deadline = time.monotonic() + timeout
        for share in self._shares:
            share.wait_published(deadline)

    def __enter__(self) -> Self:
        self._require(Stage.NEW)
        self._stage = Stage.OPEN
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        known: bool | None = None
        try:
            if error is None and not self._rollback_only:
                self._commit()
                known = self._committed = True
            else:
                known = False
                self._abort()
            if error is None and self._rollback_only:
                raise TransactionAborted(f"it was marked to be rolled back: {self._rollback_only}")
        except TxmqError as failure:
            known = None if failure.outcome == "unknown" else False
            raise
        finally:
            self._stage = Stage.OVER
            for share in self._shares:
                share.over(committed=known)

    @abstractmethod
    def _commit(self) -> None:
        """Called at the end of the block; returns only if the transaction is
        committed.
        """

    @abstractmethod
    def _abort(self) -> None:
        """Called when the block has raised."""

    @contextmanager
    def _nested(self) -> Iterator[None]:
        """Around the block of a savepoint."""
        yield

    def _taking_part(self) -> list[Share]:
        """The shares of the brokers that something is sent to or acked at."""
        return [share for share in self._shares if not share.empty]

    def _description(
        self, share: Share, decider: tuple[object, ...], participants: tuple[Participant, ...] = ()
    ) -> Description:
        service = share.core.settings.service or ""
        return Description(
            decider, service, tuple(share.buffer.actions), self._check_after, participants
        )

    def _share_of(self, core: Core) -> Share:
        """Two clients of one broker are one participant."""
        for share in self._shares:
            if share.core is core or share.core.log_id == core.log_id:
                return share
        if self._one_broker:
            raise LocalProtocolError(
                f"transaction {self.token} has one broker", hint=self._one_broker
            )
        self._shares.append(self._share_type(core, self.token))
        return self._shares[-1]

    def _require(self, stage: Stage) -> None:
        if self._stage is stage:
            return
        if self._stage is Stage.OVER:
            raise ClientClosed(
                f"transaction {self.token} is over",
                hint="begin another one with client.transaction",
            )
        raise LocalProtocolError(
            f"transaction {self.token} {self._stage.value}", hint="use it inside its `with` block"
        )
