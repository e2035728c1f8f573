"""Transactions: messages and other work that take effect together, by one decision.

Sends and acks are buffered until the end of the block. The decider makes the kind of
transaction: a database (`postgres`), the broker alone (`local`), a service that answers
check-backs (`half`), or a home broker for several databases (`xa`). Where a database or
a home broker decides, messages may go to several brokers: see `Transaction.at`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import ClassVar, Self
from uuid import UUID

from txmq.client.blocking.core import BlockingCore, HasCore, core_of
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle, UnroutedBundle
from txmq.client.protocol.awaited.block import BlockSteps
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.client.protocol.transaction.operations import BundleOperations
from txmq.faces import block, run
from txmq.model.durations import Duration
from txmq.model.message import Receipt


class TransactionOperations(BundleOperations[BrokerBundle]):
    """Sends and acks at one broker that take effect with a transaction."""

    def receipts(self) -> list[Receipt]:
        """Return the receipts of the messages sent here, in the order of the sends.

        Offsets are None until the messages are published. Messages that went through
        the outbox have no receipts.
        """
        return run(self._bundle.receipts())


class TransactionAtBroker(TransactionOperations):
    """A transaction at another broker than that of its own client."""

    def __init__(self, transaction: Transaction, bundle: BrokerBundle) -> None:
        super().__init__(bundle)
        self._transaction = transaction

    def _require(self, stage: Stage) -> None:
        self._transaction._require(stage)  # noqa: SLF001


class Transaction(TransactionOperations, BlockSteps[BrokerBundle, BlockingCore]):
    """A `with` block whose sends and acks take effect together, or not at all.

    For one thread and one use. `token` names the transaction in the database, at the
    brokers and in errors.
    """

    _bundle_type: ClassVar[type[BrokerBundle]] = BrokerBundle
    _unrouted_type: ClassVar[type[UnroutedBundle]] = UnroutedBundle

    def _log_id_of(self, core: BlockingCore) -> UUID:
        return core.log_id

    def at(self, client: HasCore) -> TransactionOperations:
        """Return the same transaction at another client's broker, to send and ack
        there.

        Asks the brokers for the ids of their logs if need be. Raises as a call does,
        and LocalProtocolError for a kind of transaction that allows one broker only.
        """
        self._require(Stage.OPEN)
        return TransactionAtBroker(self, self._bundle_of(core_of(client)))

    def savepoint(self) -> AbstractContextManager[None]:
        """Open a block whose sends and acks are withdrawn if it raises."""
        return block(self._savepoint())

    def wait_published(self, timeout: Duration = 5.0) -> None:
        """Wait until consumers can see the messages.

        That takes until all earlier transactions on their keys are decided. Raises
        RequestTimeout, or TransactionAborted if the transaction was rolled back.
        """
        run(self._wait_published(timeout))

    def __enter__(self) -> Self:
        self._require(Stage.NEW)
        run(self._begin())
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
        with self._leaving(error):
            run(self._finish(error))
