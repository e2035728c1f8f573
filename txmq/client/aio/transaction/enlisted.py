"""Messages on asyncio in a transaction that somebody else begins and ends.

`txmq.client.protocol.awaited.enlisted` has the steps.
"""

from __future__ import annotations

import asyncio
from typing import Any, Never, cast

from txmq.client.aio.core import AioCore
from txmq.client.aio.transaction.bundle import AioBundle
from txmq.client.aio.transaction.postgres import PostgresTransaction
from txmq.client.protocol.awaited.enlisted import EnlistedSteps, PendingMessage, SendCommit
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.client.protocol.transaction.options import TransactionOptions
from txmq.errors import LocalProtocolError
from txmq.tx.postgres.driver import Enlisted
from txmq.tx.postgres.enlist import EnlistedBlock

__all__ = ["EnlistedTransaction", "PendingMessage", "enlisted_in"]


class EnlistedTransaction(EnlistedSteps[AioBundle, AioCore], PostgresTransaction):
    """Sends and acks that take effect with the COMMIT of somebody else.

    Made by `client.enlist(connection)`. A connection of txmq's class for the driver
    does the rest. On others, enlisted with `hooks=True`, a framework whose COMMIT can
    be wrapped awaits `commit_with(commit)`. One that has hooks only awaits
    `before_commit()` in the moment before COMMIT, and afterwards calls `after_commit()`
    or `after_rollback()`. What those say is not believed: they have the broker look at
    the token row at once. Without them it looks by itself, a little later.
    """

    _send_by = "(await tx.at(client)).send(...)"

    def __init__(self, core: AioCore, connection: object, **settings: Any) -> None:  # noqa: ANN401  # of PostgresTransaction
        super().__init__(core, connection, **settings)
        self._block: EnlistedBlock = EnlistedBlock(self._driver, self.token, self._sends)
        self._begin_enlisted()

    def join(self, options: TransactionOptions, *, hooks: bool) -> None:
        """Join the transaction of the connection."""
        self._core.seconds()  # on this loop
        self._join(cast("Enlisted", self), options, hooks=hooks)

    async def __aenter__(self) -> Never:
        raise LocalProtocolError(
            "An enlisted transaction has no block: it ends with the transaction of its connection",
            hint="call tx.send(...), and let the framework commit; or use "
            "`async with client.transaction(connection) as tx`",
        )

    async def before_commit(self) -> None:
        """Store the messages and write the token row, in the moment before COMMIT.

        After an error the transaction is rolled back. Raises as the block of
        `client.transaction` does before its COMMIT.
        """
        self._require_storable()
        try:
            await self._in_full(self._store_all())
        except asyncio.CancelledError:
            # It may come when all is stored, too late for that to have rolled back.
            await self._in_full(self._take_back())
            raise

    async def commit_with(self, commit: SendCommit) -> None:
        """Take part in `commit`, which sends COMMIT and waits for its answer.

        Return only if the transaction is committed. Raises as `before_commit`, the
        driver's own error where the server refuses COMMIT, InDoubt, or
        TransactionAborted.
        """
        if self._stage is not Stage.STORED:
            self._require_storable()
        await self._in_full(self._store_and_commit(commit))

    async def _store_and_commit(self, commit: SendCommit) -> None:
        """Commit in the task that stores: no cancellation comes between the two."""
        if self._stage is not Stage.STORED:
            await self._store_all()
        await self._commit_all(commit)


def enlisted_in(connection: object) -> EnlistedTransaction | None:
    """Return the messages in a connection's open transaction."""
    found = getattr(connection, "enlisted", None)
    return found if isinstance(found, EnlistedTransaction) else None
