"""Messages in a transaction that somebody else begins and ends.

The steps are those of `client.transaction(connection)`. They run around a COMMIT that
a framework sends: the bundle and the token row before it, the decision after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Never

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle
from txmq.client.blocking.transaction.decisions import request_check
from txmq.client.blocking.transaction.postgres import PostgresTransaction
from txmq.client.protocol.transaction.lifecycle import Stage, wrong_stage
from txmq.client.protocol.transaction.options import TransactionOptions
from txmq.errors import InDoubt, LocalProtocolError, TransactionAborted, TxmqError
from txmq.model.message import ROLLBACK, Message
from txmq.tx.postgres.blocking import guarded_commit
from txmq.tx.postgres.commit import CommitOutcome
from txmq.tx.postgres.driver import BlockingConnection, run
from txmq.tx.postgres.enlist import EnlistedBlock


class PendingMessage(NamedTuple):
    """A message of an open transaction."""

    topic: str
    message: Message


class EnlistedTransaction(PostgresTransaction):
    """Sends and acks that take effect with the COMMIT of somebody else.

    Made by `client.enlist(connection)`. An `EnlistConnection` does the rest. A
    framework whose COMMIT can be wrapped calls `commit_with(commit)`. One that has
    hooks only calls `before_commit()` in the moment before COMMIT, and afterwards
    `after_commit()` or `after_rollback()`. What those say is not believed: they have
    the broker look at the token row at once. Without them it looks by itself, a little
    later.
    """

    def __init__(self, core: BlockingCore, connection: BlockingConnection, **settings: Any) -> None:  # noqa: ANN401  # of PostgresTransaction
        super().__init__(core, connection, **settings)
        self._block: EnlistedBlock = EnlistedBlock(self._driver, self.token, self._sends)
        self._options = TransactionOptions()
        self._before_send: Callable[[], object] | None = None
        self._stored: list[BrokerBundle] = []
        self._commit_call: Callable[[], object] = connection.commit
        self._refused: Exception | None = None

    def join(self, options: TransactionOptions) -> None:
        """Join the transaction of the connection."""
        self._options = options
        self._block.join(self)
        self._stage = Stage.OPEN

    def require_joinable(self, core: BlockingCore, options: TransactionOptions) -> None:
        """Require that a second caller in the transaction may use this.

        Raises LocalProtocolError.
        """
        if core is not self._core:
            raise LocalProtocolError(
                f"Transaction {self.token} has messages of another client",
                hint="send by that one: tx.at(client).send(...)",
            )
        if options and options != self._options:
            raise LocalProtocolError(
                f"Transaction {self.token} was enlisted with the options {self._options}",
                hint="give the same options, or none, to the second call",
            )

    def before_each_send(self, prepare: Callable[[], object]) -> None:
        """Have a framework begin what it has put off, as a savepoint, before each
        send.
        """
        self._before_send = prepare

    def __enter__(self) -> Never:
        raise LocalProtocolError(
            "An enlisted transaction has no block: it ends with the transaction of its connection",
            hint="call tx.send(...), and let the framework commit; or use "
            "`with client.transaction(connection) as tx`",
        )

    def pending(self) -> list[PendingMessage]:
        """Return what is to be sent with the COMMIT, in order, as tests want to know
        it.
        """
        return [
            PendingMessage(item.topic, message)
            for bundle in self._bundles
            for item in bundle.buffer.items
            for message in item.messages()
        ]

    def before_commit(self) -> None:
        """Store the messages and write the token row, in the moment before COMMIT.

        After an error the transaction is rolled back. Raises as the block of
        `client.transaction` does before its COMMIT.
        """
        if self._stage is not Stage.OPEN:
            raise wrong_stage(self.token, self._stage)
        if self._is_of_parent():
            raise self._of_parent()
        with self._ending_with_an_error(), self._rolling_back():
            self._require_commit()
            if any(not bundle.empty for bundle in self._bundles):
                self._block.require_open()
            self._route()
            self._stored = self._nonempty_bundles()
            if self._stored:
                self._block.end()
                with self._block.undisturbed():
                    self._store_bundles(self._stored)
        self._stage = Stage.STORED

    def commit_with(self, commit: Callable[[], object]) -> None:
        """Take part in `commit`, which sends COMMIT and waits for its answer.

        Return only if the transaction is committed. Raises as `before_commit`, the
        driver's own error where the server refuses COMMIT, InDoubt, or
        TransactionAborted.
        """
        if self._stage is not Stage.STORED:
            self.before_commit()
        self._commit_call = commit
        with self._ending_with_an_error():
            self._require_commit()
            if self._stored:
                self._commit_stored(self._stored)
            else:
                commit()
        self._end(committed=True)

    def after_commit(self) -> None:
        """Have the brokers look at the token row: COMMIT is said to have succeeded.

        It does not wait. Raises TransactionEnded where `before_commit` was left out:
        then the rows are committed without their messages.
        """
        if self._stage is Stage.OPEN and self._nonempty_bundles():
            self._end(committed=False)
            raise self._block.ended()
        self._committed = self._stage is Stage.STORED or self._committed
        self._after_end()

    def after_rollback(self) -> None:
        """Drop what is not stored; have the brokers look at the token row of the
        rest.
        """
        self._after_end()

    def _after_end(self) -> None:
        if self._is_of_parent() or self._stage not in (Stage.OPEN, Stage.STORED):
            return
        stored = self._stage is Stage.STORED and bool(self._stored)
        self._end(committed=None if stored else False)
        if stored:
            for bundle in self._fallback.sent_directly(self._stored):
                request_check(bundle.core, bundle.token)

    def _require(self, stage: Stage) -> None:
        super()._require(stage)
        if self._before_send is not None:
            self._before_send()

    def _require_commit(self) -> None:
        if not self._rollback_only:
            return
        run(self._block.roll_back())
        self._send_decisions(self._fallback.sent_directly(self._stored), ROLLBACK)
        raise TransactionAborted(
            f"The transaction was marked to be rolled back: {self._rollback_only}",
            hint="nothing of it exists, as tx.set_rollback_only() has asked for",
        )

    @contextmanager
    def _rolling_back(self) -> Iterator[None]:
        """Roll back after any error: whoever swallows it must not commit the rows."""
        try:
            yield
        except BaseException:
            run(self._block.roll_back())
            raise

    @contextmanager
    def _ending_with_an_error(self) -> Iterator[None]:
        try:
            yield
        except TxmqError as failure:
            self._end(committed=None if failure.outcome == "unknown" else False)
            self._note_failure(failure)
            refused, self._refused = self._refused, None
            if refused is not None and not isinstance(failure.__cause__ or failure, InDoubt):
                raise refused from None  # as its callers expect it
            raise
        except BaseException:
            self._end(committed=None)
            raise

    def _guarded_commit(self) -> CommitOutcome:
        return guarded_commit(self._driver, self.token, self._send_commit)

    async def _send_commit(self) -> None:
        try:
            self._commit_call()
        except Exception as error:
            self._refused = error
            raise

    def _end(self, *, committed: bool | None) -> None:
        self._stage = Stage.OVER
        self._committed = self._committed or committed is True
        self._block.release()
        for bundle in self._bundles:
            bundle.finish(committed=committed)


def enlisted_in(connection: BlockingConnection) -> EnlistedTransaction | None:
    """Return the messages in a connection's open transaction."""
    found = getattr(connection, "enlisted", None)
    return found if isinstance(found, EnlistedTransaction) else None
