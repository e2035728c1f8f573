"""Transactions that Postgres decides: rows and messages become one decision (PROTOCOLS 2).

The group is sent as the last step, while the row locks are held, so that the order of the messages of a key is that of
its rows. While the broker brings it to disk, the token's row is written: the proof of the commit. Whatever happens to
this process, the broker's resolver finds out by that row.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count
from typing import Self
from weakref import WeakKeyDictionary

import structlog

from txmq.client.core import Core
from txmq.client.decisions import await_state, submit
from txmq.client.groups import Storing
from txmq.client.transaction import Stage, Transaction
from txmq.crashpoints import crashpoint
from txmq.errors import (
    BrokerUnavailable,
    ClientClosed,
    ConnectionLost,
    DatabaseError,
    InDoubt,
    RequestTimeout,
    TransactionAborted,
    TxmqError,
    UnknownTransaction,
)
from txmq.message import COMMIT, ROLLBACK, Decision
from txmq.tx.group import GroupState
from txmq.tx.postgres.caller import begin, execute, is_idle, require_healthy, roll_back
from txmq.tx.postgres.commit import guarded_commit
from txmq.tx.postgres.identity import ServerIdentity, read_server, require_supported
from txmq.tx.postgres.session import Connection
from txmq.tx.postgres.tokens import insert_token
from txmq.wire.headers import unpack_decide_receipt

# By connection, not by DSN: after a failover the same DSN leads to a server of a later timeline.
_identities: WeakKeyDictionary[Connection, ServerIdentity] = WeakKeyDictionary()
_savepoints = count(1)
log = structlog.get_logger()


class PostgresTransaction(Transaction):
    """The rows written on `connection` in the block and the messages sent in it exist together, or not at all.

    The block returns after COMMIT. It raises TransactionAborted, DatabaseConflict or DatabaseUnavailable where neither
    exists, and InDoubt with the token where that could not be found out in time: the broker's resolver will.
    """

    def __init__(
        self, core: Core, connection: Connection, *, timeout: float, check_after: float, allow_weak_commit: bool
    ) -> None:
        super().__init__(core, timeout=timeout, check_after=check_after)
        self._connection = connection
        self._allow_weak_commit = allow_weak_commit
        self._decision: Future[bytes] | None = None

    def __enter__(self) -> Self:
        self._require(Stage.NEW)
        begin(self._connection)
        return super().__enter__()

    def _commit(self) -> None:
        if self._buffer.empty:
            self._commit_alone()
            return
        self._store_group()
        self._commit_rows()
        crashpoint("tx.after_commit")
        self._tell(COMMIT)
        crashpoint("tx.after_decide")

    def _abort(self) -> None:
        roll_back(self._connection)

    def _store_group(self) -> None:
        """The group and the token's row, both before COMMIT. Where it raises, neither counts any more."""
        sent = False
        try:
            require_healthy(self._connection)
            description = self._description("postgres", *_identity(self._connection), None)
            deadline = time.monotonic() + self._timeout
            storing = self._storing(description, deadline)
            crashpoint("tx.before_group")
            storing.send()
            sent = True
            crashpoint("tx.after_group")
            self._write_token(storing)
            crashpoint("tx.after_token")
            self._receipt(storing, description, deadline)
            crashpoint("tx.before_commit")
        except BaseException as error:
            roll_back(self._connection)
            if sent:
                self._tell(ROLLBACK)
            if isinstance(error, ConnectionLost | RequestTimeout):
                text = f"the broker did not confirm the messages: {error.message}; the transaction was rolled back"
                raise BrokerUnavailable(text, hint="run the transaction again") from error
            raise

    def _write_token(self, storing: Storing) -> None:
        try:
            log_id = self._core.log_id
            insert_token(self._connection, self.token, [log_id], allow_weak_commit=self._allow_weak_commit)
        except BaseException:
            storing.give_up()
            raise

    def _commit_rows(self) -> None:
        try:
            outcome = guarded_commit(self._connection, self.token)
        except InDoubt as doubt:
            self._find_out(doubt)
            return
        except TxmqError:
            roll_back(self._connection)
            self._tell(ROLLBACK)
            raise
        if not outcome.replicated:
            log.warning("transaction.not_replicated", token=str(self.token))

    def _find_out(self, doubt: InDoubt) -> None:
        """COMMIT was not answered: the broker is asked, whose resolver asks the database. Raises `doubt` at last."""
        deadline = time.monotonic() + self._core.settings.timeout
        state = await_state(self._core, self.token, GroupState.COMMITTED, deadline, ask=True)
        if state is GroupState.ROLLED_BACK:
            raise TransactionAborted(f"{doubt.message}; the database says that it rolled back") from doubt
        if state is None or state < GroupState.COMMITTED:
            raise doubt
        log.warning("transaction.found_committed", token=str(self.token), after=doubt.message)

    def _commit_alone(self) -> None:
        """No messages: an ordinary commit, but one that is believed only for good reason."""
        if is_idle(self._connection):
            return
        try:
            guarded_commit(self._connection, self.token)
        except InDoubt as doubt:
            hint = "there were no messages, so only its rows can tell"
            raise InDoubt(doubt.message, token=str(self.token), hint=hint) from doubt

    def _tell(self, outcome: Decision) -> None:
        """Sends the decision without waiting for it; should it get lost, the resolver finds out by itself."""
        try:
            self._decision = submit(self._core, self.token, outcome)
        except ClientClosed:
            log.warning("transaction.not_told", token=str(self.token), outcome=outcome.name)
            return
        self._decision.add_done_callback(lambda told: _note(told, str(self.token), outcome))

    def _known_published(self, deadline: float) -> bool:
        if self._decision is None:
            return False
        try:
            payload = self._decision.result(deadline - time.monotonic())
        except (TimeoutError, TxmqError):
            return False
        return unpack_decide_receipt(payload).state == GroupState.PUBLISHED

    @contextmanager
    def _nested(self) -> Iterator[None]:
        name = f"txmq_{next(_savepoints)}"
        execute(self._connection, f"SAVEPOINT {name}")
        try:
            yield
        except BaseException:
            with suppress(DatabaseError):  # lost: then the whole transaction is gone
                execute(self._connection, f"ROLLBACK TO SAVEPOINT {name}")
            raise
        execute(self._connection, f"RELEASE SAVEPOINT {name}")


def _identity(connection: Connection) -> ServerIdentity:
    known = _identities.get(connection)
    if known is None:
        server = read_server(connection)
        require_supported(server)
        known = _identities[connection] = server.identity
    return known


def _note(told: Future[bytes], token: str, outcome: Decision) -> None:
    """The block is over, so a decision that did not arrive is only worth a line: the resolver decides the same."""
    error = told.exception()
    if error is not None and not isinstance(error, UnknownTransaction):
        log.warning("transaction.not_told", token=token, outcome=outcome.name, error=str(error))
