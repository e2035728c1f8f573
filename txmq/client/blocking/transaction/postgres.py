"""Transactions that Postgres decides: rows and messages become one decision (PROTOCOLS
2).

The group is sent as the last step, while the row locks are held, so that the order of
the messages of a key is that of its rows. While the broker brings it to disk, the
token's row is written: the proof of the commit. Whatever happens to this process, the
broker's resolver finds out by that row. With several brokers each has a group and a row
of its own; the rows are written together, so that one COMMIT decides all groups, each
of which is then published by itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from txmq.client.blocking.core import Core
from txmq.client.blocking.transaction.broker_part import Share
from txmq.client.blocking.transaction.decisions import await_state
from txmq.client.blocking.transaction.fallback import Fallback
from txmq.client.blocking.transaction.transaction import Stage, Transaction
from txmq.client.log import get_logger
from txmq.crashpoints import crashpoint
from txmq.errors import (
    BrokerUnavailable,
    ConnectionLost,
    InDoubt,
    RequestTimeout,
    TransactionAborted,
    TxmqError,
)
from txmq.model.bundle import GroupState
from txmq.model.message import COMMIT, ROLLBACK, Decision
from txmq.tx.postgres.caller import begin, is_idle, require_healthy, roll_back, savepoint
from txmq.tx.postgres.commit import guarded_commit
from txmq.tx.postgres.identity import ServerIdentity, require_supported, server_of
from txmq.tx.postgres.session import Connection
from txmq.tx.postgres.tokens import insert_token

log = get_logger()


class PostgresTransaction(Transaction):
    """The rows written on `connection` in the block and the messages sent in it exist
    together, or not at all.

    The block returns after COMMIT. It raises TransactionAborted, DatabaseConflict or
    DatabaseUnavailable where neither exists, and InDoubt with the token where that
    could not be found out in time: the broker's resolver will.
    """

    def __init__(
        self,
        core: Core,
        connection: Connection,
        *,
        timeout: float,
        check_after: float,
        allow_weak_commit: bool,
        outbox: bool = False,
    ) -> None:
        super().__init__(core, timeout=timeout, check_after=check_after)
        self._fallback = Fallback(connection, outbox)
        self._connection = connection
        self._allow_weak_commit = allow_weak_commit

    def __enter__(self) -> Self:
        self._require(Stage.NEW)
        begin(self._connection)
        return super().__enter__()

    def _commit(self) -> None:
        shares = self._taking_part()
        if not shares:
            self._commit_alone()
            return
        self._store_groups(shares)
        sent = self._fallback.sent(shares)
        self._commit_rows(sent)
        crashpoint("tx.after_commit")
        self._tell(sent, COMMIT)
        crashpoint("tx.after_decide")

    def _abort(self) -> None:
        roll_back(self._connection)

    def _store_groups(self, shares: list[Share]) -> None:
        """The groups and the token's rows, all before COMMIT. Where it raises, none of
        them counts any more.
        """
        try:
            require_healthy(self._connection)
            self._fallback.look(shares)
            self._send_groups(shares)
            crashpoint("tx.after_group")
            logs = [share.core.log_id for share in shares]
            insert_token(
                self._connection, self.token, logs, allow_weak_commit=self._allow_weak_commit
            )
            crashpoint("tx.after_token")
            self._await_groups(shares)
            crashpoint("tx.before_commit")
        except BaseException as error:
            roll_back(self._connection)
            self._take_back(shares)
            if isinstance(error, ConnectionLost | RequestTimeout):
                text = f"a broker did not confirm the messages: {error.message}; the transaction was rolled back"
                raise BrokerUnavailable(text, hint="run the transaction again") from error
            raise

    def _send_groups(self, shares: list[Share]) -> None:
        decider = ("postgres", *_identity(self._connection), None)
        deadline = time.monotonic() + self._timeout
        for share in self._fallback.sent(shares):
            with self._fallback.reaching(share):
                share.prepare(self._description(share, decider), deadline)
        crashpoint("tx.before_group")
        for n, share in enumerate(self._fallback.sent(shares)):
            if n:
                crashpoint("tx.between_groups")
            with self._fallback.reaching(share):
                share.send()

    def _await_groups(self, shares: list[Share]) -> None:
        for share in self._fallback.sent(shares):
            with self._fallback.reaching(share):
                share.receipt()
        self._fallback.write()
        if len(shares) == 1:
            self.token = shares[0].token  # the outbox may have needed another one

    def _take_back(self, shares: list[Share]) -> None:
        for share in shares:
            share.give_up()
        self._tell([share for share in shares if share.sent], ROLLBACK)

    def _commit_rows(self, shares: list[Share]) -> None:
        try:
            outcome = guarded_commit(self._connection, self.token)
        except InDoubt as doubt:
            self._find_out(shares, doubt)
            return
        except TxmqError:
            roll_back(self._connection)
            self._tell(shares, ROLLBACK)
            raise
        if not outcome.replicated:
            log.warning("transaction.not_replicated", token=str(self.token))

    def _find_out(self, shares: list[Share], doubt: InDoubt) -> None:
        """COMMIT was not answered: a broker is asked, whose resolver asks the database.
        Raises `doubt` at last.

        One broker's answer is that of all: their token rows were written together, and
        a fence against one of them stops the whole transaction.
        """
        deadline = time.monotonic() + self._core.settings.timeout
        for n, share in enumerate(shares):
            now = time.monotonic()
            ends = now + (deadline - now) / (len(shares) - n)
            state = await_state(share.core, self.token, GroupState.COMMITTED, ends, ask=True)
            if state is GroupState.ROLLED_BACK:
                raise TransactionAborted(
                    f"{doubt.message}; the database says that it rolled back"
                ) from doubt
            if state is not None and state >= GroupState.COMMITTED:
                log.warning(
                    "transaction.found_committed", token=str(self.token), after=doubt.message
                )
                return
        raise doubt

    def _commit_alone(self) -> None:
        """No messages: an ordinary commit, but one that is believed only for good
        reason.
        """
        if is_idle(self._connection):
            return
        try:
            guarded_commit(self._connection, self.token)
        except InDoubt as doubt:
            hint = "there were no messages, so only its rows can tell"
            raise InDoubt(doubt.message, token=str(self.token), hint=hint) from doubt

    def _tell(self, shares: list[Share], outcome: Decision) -> None:
        for n, share in enumerate(shares):
            if n:
                crashpoint("tx.between_decides")
            share.tell(outcome)

    @contextmanager
    def _nested(self) -> Iterator[None]:
        with savepoint(self._connection):
            yield


def _identity(connection: Connection) -> ServerIdentity:
    server = server_of(connection)
    require_supported(server)
    return server.identity
