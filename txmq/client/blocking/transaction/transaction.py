"""Transactions: messages and other work that take effect together, by one decision.

Sends and acks are buffered until the end of the block. The decider makes the kind of
transaction: a database (`postgres`), the broker alone (`local`), a service that answers
check-backs (`half`), or a home broker for several databases (`xa`). Where a database or
a home broker decides, messages may go to several brokers: see `Transaction.at`.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import ClassVar, Self, Unpack
from uuid import UUID

from txmq.client.blocking.core import BlockingCore, HasCore, core_of
from txmq.client.blocking.transaction.broker_bundle import (
    BUNDLE_START,
    BrokerBundle,
    BundlePosition,
)
from txmq.client.blocking.transaction.unrouted_bundle import UnroutedBundle
from txmq.client.protocol.sender.routing import Routing
from txmq.client.protocol.sender.rows import Fields, column_rows, micros_now
from txmq.client.protocol.transaction.lifecycle import Stage, wrong_stage
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import BrokerUnavailable, LocalProtocolError, TransactionAborted, TxmqError
from txmq.model.actions import BundleAction
from txmq.model.decider import Decider, Participant
from txmq.model.message import Message, Receipt
from txmq.model.units import SECOND
from txmq.wire.bundle import BundleDescription


class TransactionOperations(ABC):
    """Sends and acks at one broker that take effect with a transaction."""

    def __init__(self, bundle: BrokerBundle) -> None:
        self._bundle = bundle

    def send(
        self, topic: str, body: bytes, *, partition: int | None = None, **fields: Unpack[Fields]
    ) -> None:
        """Send a message if the transaction commits.

        Raises LocalProtocolError or MessageTooLarge.
        """
        self._require(Stage.OPEN)
        born_at = time.time_ns() // 1_000
        self._bundle.buffer.add(topic, Message(body, **fields), born_at, partition)

    def send_many(
        self,
        topic: str,
        bodies: Sequence[bytes],
        keys: Sequence[str | None] | None = None,
        tags: Sequence[str | None] | None = None,
        *,
        partition: int | None = None,
    ) -> None:
        """Send messages given as columns, which is faster for many messages.

        The columns must not be changed before the end of the block.
        """
        self._require(Stage.OPEN)
        self._bundle.buffer.add_columns(
            topic, column_rows(bodies, keys, tags, micros_now()), partition
        )

    def ack(self, delivered: object) -> None:
        """Ack a message or a batch of one of this process's consumers with the commit.

        Raises LocalProtocolError for a message of another broker, NotLeased if the
        consumer does not hold the message any more.
        """
        self._require(Stage.OPEN)
        self._bundle.ack(delivered)

    def act(self, action: BundleAction) -> None:
        """Add an action that takes effect with the decision (docs/FORMATS.md 2.1)."""
        self._require(Stage.OPEN)
        self._bundle.buffer.actions.append(action)

    def receipts(self) -> list[Receipt]:
        """Return the receipts of the messages sent here, in the order of the sends.

        Offsets are None until the messages are published. Messages that went through
        the outbox have no receipts.
        """
        return self._bundle.receipts()

    @abstractmethod
    def _require(self, stage: Stage) -> None:
        """Raise ClientClosed or LocalProtocolError unless the transaction is there."""


class TransactionAtBroker(TransactionOperations):
    """A transaction at another broker than that of its own client."""

    def __init__(self, transaction: Transaction, bundle: BrokerBundle) -> None:
        super().__init__(bundle)
        self._transaction = transaction

    def _require(self, stage: Stage) -> None:
        self._transaction._require(stage)  # noqa: SLF001


# Of the error of a client with a spool.
NO_SPOOL = (
    "transactions do not use the spool: with a database, "
    'transaction(connection, on_unavailable="outbox") lets their messages wait there'
)


class Transaction(TransactionOperations):
    """A `with` block whose sends and acks take effect together, or not at all.

    For one thread and one use. `token` names the transaction in the database, at the
    brokers and in errors.
    """

    _bundle_type: ClassVar[type[BrokerBundle]] = BrokerBundle
    # The hint of the error where a kind of transaction allows one broker only.
    _one_broker_hint: ClassVar[str] = ""

    def __init__(self, core: BlockingCore, *, timeout: float, check_after: float = 0.0) -> None:
        self.token: UUID = new_token()
        super().__init__(self._bundle_type(core, self.token))
        self._bundles = [self._bundle]
        self._home = self._bundle  # the client's own, which decides an XA transaction
        self._unrouted: UnroutedBundle | None = None  # of a transaction over a cluster
        self._core = core
        self._timeout = timeout
        self._check_after = int(check_after * SECOND)
        self._stage = Stage.NEW
        self._committed = False
        self._rollback_only = ""  # the reason, if it may only roll back
        self._pid = os.getpid()

    def _spread(self, cores: Sequence[BlockingCore], routing: Routing) -> UnroutedBundle:
        """Let each message go to its broker of a cluster. Called before the block."""
        unrouted = UnroutedBundle(cores, routing, self.token, self._bundle_of)
        self._bundle, self._bundles, self._unrouted = unrouted, [unrouted], unrouted
        return unrouted

    def _route(self) -> None:
        """Give the messages to the brokers of a cluster, before anything is stored."""
        if self._unrouted is None:
            return
        self._unrouted.place(self._bundles)
        number = 0
        for bundle in self._bundles:  # the ids of messages at different brokers differ
            bundle.first_number = number
            number += bundle.buffer.message_count

    def set_rollback_only(self, reason: str = "") -> None:
        """Let the end of the block roll back and raise TransactionAborted."""
        if self._stage is not Stage.STORED:
            self._require(Stage.OPEN)
        self._rollback_only = self._rollback_only or reason or "no reason was given"

    def at(self, client: HasCore) -> TransactionOperations:
        """Return the same transaction at another client's broker, to send and ack
        there.

        Asks the brokers for the ids of their logs if need be. Raises as a call does,
        and LocalProtocolError for a kind of transaction that allows one broker only.
        """
        self._require(Stage.OPEN)
        return TransactionAtBroker(self, self._bundle_of(core_of(client)))

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Open a block whose sends and acks are withdrawn if it raises."""
        self._require(Stage.OPEN)
        mark = self._mark()
        try:
            with self._database_savepoint():
                yield
        except BaseException:
            self._withdraw_behind(mark)
            raise

    def _mark(self) -> Mapping[BrokerBundle, BundlePosition]:
        """Return the present position of the sends and acks."""
        return {bundle: bundle.position() for bundle in self._bundles}

    def _withdraw_behind(self, mark: Mapping[BrokerBundle, BundlePosition]) -> None:
        """Withdraw the sends and acks behind a position."""
        for bundle in self._bundles:
            bundle.truncate(mark.get(bundle, BUNDLE_START))

    def wait_published(self, timeout: float = 5.0) -> None:
        """Wait until consumers can see the messages.

        That takes until all earlier transactions on their keys are decided. Raises
        RequestTimeout, or TransactionAborted if the transaction was rolled back.
        """
        if not self._committed:
            raise LocalProtocolError(
                f"Transaction {self.token} has not been committed",
                hint="call wait_published after the block",
            )
        deadline = time.monotonic() + timeout
        for bundle in self._bundles:
            bundle.wait_published(deadline)

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
        if self._is_of_parent():
            if error is None:
                raise self._of_parent()
            return
        committed: bool | None = None  # None = unknown
        try:
            if error is None and not self._rollback_only:
                try:
                    self._route()
                except BaseException:
                    self._abort()
                    raise
                self._commit()
                committed = self._committed = True
            else:
                committed = False
                self._abort()
            if error is None and self._rollback_only:
                raise TransactionAborted(
                    f"The transaction was marked to be rolled back: {self._rollback_only}",
                    hint="nothing of it exists, as the block has asked for",
                )
        except TxmqError as failure:
            committed = None if failure.outcome == "unknown" else False
            self._note_failure(failure)
            raise
        finally:
            self._stage = Stage.OVER
            for bundle in self._bundles:
                bundle.finish(committed=committed)

    def _note_failure(self, failure: TxmqError) -> None:
        """Leave a broker alone that is away; name the outbox to those with a spool."""
        if self._unrouted is not None:
            self._unrouted.avoid_after(failure)
        if isinstance(failure, BrokerUnavailable) and self._core.settings.spool is not None:
            raise BrokerUnavailable(failure.message, hint=NO_SPOOL) from failure

    def _of_parent(self) -> LocalProtocolError:
        return LocalProtocolError(
            f"The block of transaction {self.token} is that of process {self._pid}, from "
            "which this one was forked: nothing was done",
            hint="leave the child by os._exit(), or begin transactions in the child, on "
            "connections of its own",
        )

    def _is_of_parent(self) -> bool:
        """Return whether this is a copy of the block, in the child of a fork: an error
        that ends the child must not roll back what goes on in the parent.
        """
        return self._pid != os.getpid()

    @abstractmethod
    def _commit(self) -> None:
        """Commit at the end of the block; return only if it is committed."""

    @abstractmethod
    def _abort(self) -> None:
        """Roll back what has been done so far."""

    @contextmanager
    def _database_savepoint(self) -> Iterator[None]:
        """Wrap the block of a savepoint in one of the database."""
        yield

    def _nonempty_bundles(self) -> list[BrokerBundle]:
        """Return the bundles of the brokers at which something is sent or acked."""
        return [bundle for bundle in self._bundles if not bundle.buffer.empty]

    @property
    def _only_bundle(self) -> BrokerBundle | None:
        """The bundle, where there is one broker; None = nothing is in it."""
        bundles = self._nonempty_bundles()
        return bundles[0] if bundles else None

    def _description(
        self,
        bundle: BrokerBundle,
        decider: Decider,
        participants: tuple[Participant, ...] = (),
    ) -> BundleDescription:
        service = bundle.core.settings.service or ""
        return BundleDescription(
            decider, service, tuple(bundle.buffer.actions), self._check_after, participants
        )

    def _bundle_of(self, core: BlockingCore) -> BrokerBundle:
        """Return the bundle at a broker: one for all clients of that broker."""
        routed = [bundle for bundle in self._bundles if bundle is not self._unrouted]
        for bundle in routed:
            if bundle.core is core:
                return bundle
        if self._unrouted is None or core not in self._unrouted.cores:
            for bundle in routed:
                if bundle.core.log_id == core.log_id:
                    return bundle
        if self._one_broker_hint and routed:
            raise LocalProtocolError(
                f"Transaction {self.token} cannot have a second broker",
                hint=self._one_broker_hint,
            )
        self._bundles.append(self._bundle_type(core, self.token))
        return self._bundles[-1]

    def _require(self, stage: Stage) -> None:
        if self._stage is not stage:
            raise wrong_stage(self.token, self._stage)
