"""The steps of a transaction that PostgreSQL decides by its COMMIT, in all faces.

The bundle goes out at the end of the block, while the row locks are held: the messages
of a key thus have the order of its rows. While the broker syncs the bundle, the
transaction writes the token row, which proves its commit. If this process dies, the
broker's resolver reads that row. With several brokers each has a bundle and a token
row. The rows are written together, so that one COMMIT decides all bundles
(docs/PROTOCOL.md 2).
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from uuid import UUID

from txmq.client.log import get_logger
from txmq.client.protocol.awaited.block import B, K
from txmq.client.protocol.awaited.bundle import unavailable
from txmq.client.protocol.awaited.caller_transaction import CallerSteps
from txmq.client.protocol.awaited.outbox import OutboxFallback
from txmq.crashpoints import crashpoint
from txmq.errors import (
    ConnectionLost,
    DatabaseError,
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
from txmq.tx.postgres.caller import require_healthy, savepoint
from txmq.tx.postgres.caller_block import CallerBlock
from txmq.tx.postgres.commit import guarded_commit
from txmq.tx.postgres.driver import Driver
from txmq.tx.postgres.errors import FAILED_TRANSACTION
from txmq.tx.postgres.identity import (
    SeenServer,
    Server,
    forget_server,
    server_of,
)
from txmq.tx.postgres.tokens import InsertedToken, SeenBroker, insert_token, may_have_reported

log = get_logger()


class PostgresSteps(CallerSteps[B, K]):
    """Rows written on a connection and messages sent in the block, both or neither."""

    _server: Server  # as this process knows it
    _inserted: InsertedToken

    def _use(self, driver: Driver, block: CallerBlock, *, outbox: bool, allow_weak: bool) -> None:
        """Use the connection of that driver. Called once, when the object is made."""
        self._driver, self._block = driver, block
        self._fallback = OutboxFallback(driver, enabled=outbox)
        self._allow_weak_commit = allow_weak

    async def _begin(self) -> None:
        try:
            await self._block.begin()
        except BaseException:
            await self._block.give_back()
            raise

    async def _give_back(self) -> None:
        await self._block.give_back()

    def _database_savepoint(self) -> AbstractAsyncContextManager[None]:
        return savepoint(self._driver)

    async def _commit(self) -> None:
        self._block.end()
        bundles = self._nonempty_bundles()
        if not bundles:
            await self._commit_alone()
            return
        await self._store_bundles(bundles)
        await self._commit_stored(bundles)

    async def _abort(self) -> None:
        if not await self._block.roll_back():
            raise self._block.ended()

    async def _commit_stored(self, bundles: list[B]) -> None:
        sent = self._fallback.sent_directly(bundles)
        replicated = await self._commit_rows(sent)
        crashpoint("tx.after_commit")
        if replicated:
            self._send_decisions(sent, COMMIT)
        crashpoint("tx.after_decide")

    async def _store_bundles(self, bundles: list[B]) -> None:
        """Store the bundles and write the token rows.

        After an error none of them counts any more.
        """
        try:
            require_healthy(self._driver)
            self._server = await server_of(self._driver)
            logs = await self._fallback.check_queues(bundles, self._server.identity)
            await self._send_bundles(bundles)
            crashpoint("tx.after_group")
            inserted = self._inserted = await insert_token(
                self._driver,
                self.token,
                logs,
                allow_weak_commit=self._allow_weak_commit,
                block=self._block,
            )
            self._require_server(self._server, inserted.server)
            self._fallback.check_stamps(bundles, logs, inserted.brokers)
            crashpoint("tx.after_token")
            await self._await_bundles(bundles)
            await self._require_leases(bundles, logs, inserted.brokers)
            crashpoint("tx.before_commit")
        except BaseException as error:
            await self._block.roll_back()
            self._fallback.forget_stamps(bundles)
            self._withdraw(bundles)
            if isinstance(error, ConnectionLost | RequestTimeout):
                raise unavailable(error) from error
            if isinstance(error, DatabaseError) and error.sqlstate == FAILED_TRANSACTION:
                # asyncpg does not tell it before the next statement.
                raise TransactionAborted(
                    "a statement of the transaction failed earlier",
                    hint="roll back and begin again",
                ) from error
            raise

    def _require_server(self, named: Server, seen: SeenServer) -> None:
        """Require that the transaction runs on the server that its bundles name.

        A pooler may have switched over since this process asked.
        """
        if named.identity[:2] != seen[:2]:
            forget_server(self._driver)
            raise DatabaseUnavailable(
                f"the database has switched over from cluster {named.identity.system_id}, "
                f"timeline {named.identity.timeline}, to {seen.system_id}, {seen.timeline}",
                hint="run the transaction again",
            )

    async def _require_leases(
        self, bundles: list[B], logs: list[UUID], seen: dict[UUID, SeenBroker]
    ) -> None:
        """Require that no broker's resolver leads to a copy of this database.

        A broker reports to its databases when it starts. Where it says that it has
        reported to this one, and this one does not show it, the two look at different
        servers. Usually the token's INSERT has shown the report already.
        """
        identity = self._server.identity
        for bundle, log_id in zip(bundles, logs, strict=True):
            epoch = bundle.core.boot_epoch
            if bundle.in_outbox or seen[log_id].boot_epoch >= epoch:
                continue
            lease = await bundle.call(
                "tx.lease",
                {"system_id": identity.system_id, "database_oid": identity.database_oid},
            )
            if lease["held"] and not await may_have_reported(self._driver, log_id, epoch):
                raise NoResolver(
                    "the broker's resolver leads to a copy of this database",
                    hint="point its [[resolver]] section at the server that this transaction uses",
                )

    async def _send_bundles(self, bundles: list[B]) -> None:
        deadline = self._core.seconds() + self._timeout
        decider = ByPostgres(*self._server.identity, xid=None, position=self._server.position)
        for bundle in bundles:
            description = self._description(bundle, decider)
            await self._fallback.cover(bundle, bundle.build, description, deadline)
        crashpoint("tx.before_group")
        for n, bundle in enumerate(bundles):
            if n:
                crashpoint("tx.between_groups")
            await self._fallback.cover(bundle, bundle.send)

    async def _await_bundles(self, bundles: list[B]) -> None:
        for bundle in bundles:
            await self._fallback.cover(bundle, bundle.await_receipt)
        await self._fallback.write_rows()
        if len(bundles) == 1:
            self.token = bundles[0].token  # a row of the outbox may have a new one

    def _withdraw(self, bundles: list[B]) -> None:
        for bundle in bundles:
            bundle.abandon()
        self._send_decisions([bundle for bundle in bundles if bundle.sent], ROLLBACK)

    async def _commit_rows(self, bundles: list[B]) -> bool:
        """Commit; return whether the decision may go out.

        Where no synchronous standby has confirmed the commit, a failover could undo it.
        The resolver decides once one has.
        """
        try:
            replicated = await self._guarded_commit()
        except InDoubt as doubt:
            await self._block.close()
            await self._resolve_doubt(bundles, doubt)
            return True
        except TxmqError:
            await self._block.roll_back()
            self._send_decisions(bundles, ROLLBACK)
            raise
        await self._block.close()
        if not replicated:
            log.warning("transaction.not_replicated", token=str(self.token))
        else:
            self._server.note(self._inserted.server)
        return replicated

    async def _guarded_commit(self) -> bool:
        self._deciding = True
        return await guarded_commit(self._driver, self.token)

    async def _resolve_doubt(self, bundles: list[B], doubt: InDoubt) -> None:
        """Find out by the brokers' resolvers whether an unanswered COMMIT succeeded.

        One broker's answer is enough: the token rows were written together, and a fence
        against one of them stops the whole transaction. Raises `doubt` in the end.
        """
        deadline = self._core.seconds() + self._core.settings.timeout
        for n, bundle in enumerate(bundles):
            now = self._core.seconds()
            poll_until = now + (deadline - now) / (len(bundles) - n)
            state = await bundle.await_state(BundleState.COMMITTED, poll_until, check=True)
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

    async def _commit_alone(self) -> None:
        """Commit a transaction without messages, and verify that it did commit."""
        try:
            await self._block.prove()
            self._deciding = True
            await guarded_commit(self._driver, self.token)
        except TxmqError as error:
            await self._block.roll_back()
            if not isinstance(error, InDoubt):
                raise
            hint = "look for the transaction's rows: without messages nothing else can tell"
            raise InDoubt(error.message, token=str(self.token), hint=hint) from error
        await self._block.close()

    def _send_decisions(self, bundles: list[B], outcome: Decision) -> None:
        for n, bundle in enumerate(bundles):
            if n:
                crashpoint("tx.between_decides")
            bundle.send_decision(outcome)
