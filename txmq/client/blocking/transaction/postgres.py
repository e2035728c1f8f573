"""Transactions that PostgreSQL decides by its COMMIT (docs/PROTOCOL.md 2).

The bundle goes out at the end of the block, while the row locks are held: the messages
of a key thus have the order of its rows. While the broker syncs the bundle, the
transaction writes the token row, which proves its commit. If this process dies, the
broker's resolver reads that row. With several brokers each has a bundle and a token
row. The rows are written together, so that one COMMIT decides all bundles.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle
from txmq.client.blocking.transaction.caller_transaction import CallerTransaction
from txmq.client.blocking.transaction.decisions import await_state
from txmq.client.blocking.transaction.outbox_fallback import OutboxFallback
from txmq.client.log import get_logger
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.crashpoints import crashpoint
from txmq.errors import (
    BrokerUnavailable,
    ConnectionLost,
    DatabaseUnavailable,
    InDoubt,
    NoResolver,
    RequestTimeout,
    TransactionAborted,
    TxmqError,
)
from txmq.model.bundle import BundleState
from txmq.model.decider import ByPostgres
from txmq.model.message import COMMIT, ROLLBACK, Decision
from txmq.tx.postgres.blocking import guarded_commit, insert_token, may_have_reported, server_of
from txmq.tx.postgres.caller import blocking_savepoint, require_healthy
from txmq.tx.postgres.caller_block import CallerBlock
from txmq.tx.postgres.commit import CommitOutcome
from txmq.tx.postgres.driver import BlockingConnection, run
from txmq.tx.postgres.drivers import blocking_driver
from txmq.tx.postgres.identity import (
    NamedServer,
    Server,
    forget_server,
    note_server,
    require_supported,
)
from txmq.tx.postgres.tokens import InsertedToken

log = get_logger()


class PostgresTransaction(CallerTransaction):
    """Rows written on `connection` and messages sent in the block, both or neither.

    The block returns after COMMIT. After TransactionAborted, DatabaseConflict or
    DatabaseUnavailable neither exists. InDoubt, with the token, says that the outcome
    could not be found out in time; the broker's resolver will find it.
    """

    def __init__(
        self,
        core: BlockingCore,
        connection: BlockingConnection,
        *,
        timeout: float,
        check_after: float,
        allow_weak_commit: bool,
        outbox: bool = False,
    ) -> None:
        super().__init__(core, timeout=timeout, check_after=check_after)
        self._driver = blocking_driver(connection)
        self._fallback = OutboxFallback(self._driver, outbox)
        self._block = CallerBlock(self._driver, self.token, self._sends)
        self._allow_weak_commit = allow_weak_commit
        self._inserted: InsertedToken | None = None

    def __enter__(self) -> Self:
        self._require(Stage.NEW)
        run(self._block.begin())
        return super().__enter__()

    def _give_back(self) -> None:
        run(self._block.give_back())

    def _commit(self) -> None:
        self._block.end()
        bundles = self._nonempty_bundles()
        if not bundles:
            self._commit_alone()
            return
        self._store_bundles(bundles)
        self._commit_stored(bundles)

    def _commit_stored(self, bundles: list[BrokerBundle]) -> None:
        sent = self._fallback.sent_directly(bundles)
        replicated = self._commit_rows(sent)
        crashpoint("tx.after_commit")
        if replicated:
            self._send_decisions(sent, COMMIT)
        crashpoint("tx.after_decide")

    def _abort(self) -> None:
        if not run(self._block.roll_back()):
            raise self._block.ended()

    def _store_bundles(self, bundles: list[BrokerBundle]) -> None:
        """Store the bundles and write the token rows.

        After an error none of them counts any more.
        """
        try:
            require_healthy(self._driver)
            self._fallback.check_queues(bundles)
            server = self._server()
            self._send_bundles(bundles, server)
            crashpoint("tx.after_group")
            logs = [bundle.core.log_id for bundle in bundles]
            self._inserted = insert_token(
                self._driver,
                self.token,
                logs,
                allow_weak_commit=self._allow_weak_commit,
                block=self._block,
            )
            self._require_server(server, self._inserted.server)
            self._fallback.check_stamps(bundles, self._inserted.outbox_stamps)
            crashpoint("tx.after_token")
            self._await_bundles(bundles)
            self._require_leases(bundles, server, self._inserted)
            crashpoint("tx.before_commit")
        except BaseException as error:
            run(self._block.roll_back())
            self._fallback.forget_stamps(bundles)
            self._withdraw(bundles)
            if isinstance(error, ConnectionLost | RequestTimeout):
                raise BrokerUnavailable(
                    f"A broker did not confirm the messages: {error.message}; "
                    "the transaction was rolled back",
                    hint="run the transaction again",
                ) from error
            raise

    def _server(self) -> Server:
        server = server_of(self._driver)
        require_supported(server)
        return server

    def _require_server(self, named: Server, found: NamedServer) -> None:
        """Require that the transaction runs on the server that its bundles name.

        A pooler may have switched over since this process asked.
        """
        if named.identity[:2] != found[:2]:
            forget_server(self._driver)
            raise DatabaseUnavailable(
                f"the database has switched over from cluster {named.identity.system_id}, "
                f"timeline {named.identity.timeline}, to {found.system_id}, {found.timeline}",
                hint="run the transaction again",
            )

    def _require_leases(
        self, bundles: list[BrokerBundle], server: Server, inserted: InsertedToken
    ) -> None:
        """Require that no broker's resolver leads to a copy of this database.

        A broker reports to its databases when it starts. Where it says that it has
        reported to this one, and this one does not show it, the two look at different
        servers. Usually the token's INSERT has shown the report already.
        """
        for bundle in self._fallback.sent_directly(bundles):
            core = bundle.core
            shown = inserted.boot_epochs.get(core.log_id) or 0
            if shown >= core.boot_epoch or not core.takes_positions:
                continue
            identity = server.identity
            lease = core.call(
                "tx.lease",
                {"system_id": identity.system_id, "database_oid": identity.database_oid},
                repeat=True,
            )
            if lease["held"] and not may_have_reported(self._driver, core.log_id, core.boot_epoch):
                raise NoResolver(
                    "the broker's resolver leads to a copy of this database",
                    hint="point its [[resolver]] section at the server that this transaction uses",
                )

    def _send_bundles(self, bundles: list[BrokerBundle], server: Server) -> None:
        deadline = time.monotonic() + self._timeout
        for bundle in self._fallback.sent_directly(bundles):
            with self._fallback.covering(bundle):
                position = server.position if bundle.core.takes_positions else None
                decider = ByPostgres(*server.identity, xid=None, position=position)
                bundle.build(self._description(bundle, decider), deadline)
        crashpoint("tx.before_group")
        for n, bundle in enumerate(self._fallback.sent_directly(bundles)):
            if n:
                crashpoint("tx.between_groups")
            with self._fallback.covering(bundle):
                bundle.send()

    def _await_bundles(self, bundles: list[BrokerBundle]) -> None:
        for bundle in self._fallback.sent_directly(bundles):
            with self._fallback.covering(bundle):
                bundle.await_receipt()
        self._fallback.write_rows()
        if len(bundles) == 1:
            self.token = bundles[0].token  # a row of the outbox may have a new one

    def _withdraw(self, bundles: list[BrokerBundle]) -> None:
        for bundle in bundles:
            bundle.abandon()
        self._send_decisions([bundle for bundle in bundles if bundle.sent], ROLLBACK)

    def _commit_rows(self, bundles: list[BrokerBundle]) -> bool:
        """Commit; return whether the decision may go out.

        Where no synchronous standby has confirmed the commit, a failover could undo it.
        The resolver decides once one has.
        """
        try:
            outcome = self._guarded_commit()
        except InDoubt as doubt:
            run(self._block.close())
            self._resolve_doubt(bundles, doubt)
            return True
        except TxmqError:
            run(self._block.roll_back())
            self._send_decisions(bundles, ROLLBACK)
            raise
        run(self._block.close())
        if not outcome.replicated:
            log.warning("transaction.not_replicated", token=str(self.token))
        elif self._inserted is not None:
            note_server(self._driver, self._inserted.server)
        return outcome.replicated

    def _guarded_commit(self) -> CommitOutcome:
        return guarded_commit(self._driver, self.token)

    def _resolve_doubt(self, bundles: list[BrokerBundle], doubt: InDoubt) -> None:
        """Find out by the brokers' resolvers whether an unanswered COMMIT succeeded.

        One broker's answer is enough: the token rows were written together, and a fence
        against one of them stops the whole transaction. Raises `doubt` in the end.
        """
        deadline = time.monotonic() + self._core.settings.timeout
        for n, bundle in enumerate(bundles):
            now = time.monotonic()
            poll_until = now + (deadline - now) / (len(bundles) - n)
            state = await_state(
                bundle.core, self.token, BundleState.COMMITTED, poll_until, check=True
            )
            if state is BundleState.ROLLED_BACK:
                raise TransactionAborted(
                    f"{doubt.message}; the database has rolled the transaction back"
                ) from doubt
            if state is not None and state >= BundleState.COMMITTED:
                log.warning(
                    "transaction.found_committed", token=str(self.token), after=doubt.message
                )
                return
        raise doubt

    def _commit_alone(self) -> None:
        """Commit a transaction without messages, and verify that it did commit."""
        try:
            run(self._block.prove())
            guarded_commit(self._driver, self.token)
        except TxmqError as error:
            run(self._block.roll_back())
            if not isinstance(error, InDoubt):
                raise
            hint = "look for the transaction's rows: without messages nothing else can tell"
            raise InDoubt(error.message, token=str(self.token), hint=hint) from error
        run(self._block.close())

    def _send_decisions(self, bundles: list[BrokerBundle], outcome: Decision) -> None:
        for n, bundle in enumerate(bundles):
            if n:
                crashpoint("tx.between_decides")
            bundle.send_decision(outcome)

    @contextmanager
    def _database_savepoint(self) -> Iterator[None]:
        with blocking_savepoint(self._driver):
            yield
