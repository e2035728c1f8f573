"""Messages in a transaction that somebody else begins and ends.

`txmq.client.protocol.awaited.enlisted` has the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Never

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.broker_bundle import BrokerBundle
from txmq.client.blocking.transaction.postgres import PostgresTransaction
from txmq.client.protocol.awaited.enlisted import EnlistedSteps, PendingMessage
from txmq.client.protocol.transaction.lifecycle import Stage
from txmq.client.protocol.transaction.options import TransactionOptions
from txmq.errors import LocalProtocolError
from txmq.faces import run
from txmq.tx.postgres.driver import BlockingConnection
from txmq.tx.postgres.enlist import EnlistedBlock

__all__ = ["EnlistedTransaction", "PendingMessage", "enlisted_in"]


class EnlistedTransaction(EnlistedSteps[BrokerBundle, BlockingCore], PostgresTransaction):
    """Sends and acks that take effect with the COMMIT of somebody else.

    Made by `client.enlist(connection)`. An `EnlistConnection` does the rest. On
    other connections, enlisted with `hooks=True`, a framework whose COMMIT can be
    wrapped calls `commit_with(commit)`. One that has hooks only calls
    `before_commit()` in the moment before COMMIT, and afterwards `after_commit()` or
    `after_rollback()`. What those say is not believed: they have
    the broker look at the token row at once. Without them it looks by itself, a little
    later.
    """

    def __init__(self, core: BlockingCore, connection: BlockingConnection, **settings: Any) -> None:  # noqa: ANN401  # of PostgresTransaction
        super().__init__(core, connection, **settings)
        self._block: EnlistedBlock = EnlistedBlock(self._driver, self.token, self._sends)
        self._begin_enlisted()

    def join(self, options: TransactionOptions, *, hooks: bool) -> None:
        """Join the transaction of the connection."""
        self._join(self, options, hooks=hooks)

    def __enter__(self) -> Never:
        raise LocalProtocolError(
            "An enlisted transaction has no block: it ends with the transaction of its connection",
            hint="call tx.send(...), and let the framework commit; or use "
            "`with client.transaction(connection) as tx`",
        )

    def before_commit(self) -> None:
        """Store the messages and write the token row, in the moment before COMMIT.

        After an error the transaction is rolled back. Raises as the block of
        `client.transaction` does before its COMMIT.
        """
        self._require_storable()
        run(self._store_all())

    def commit_with(self, commit: Callable[[], object]) -> None:
        """Take part in `commit`, which sends COMMIT and waits for its answer.

        Return only if the transaction is committed. Raises as `before_commit`, the
        driver's own error where the server refuses COMMIT, InDoubt, or
        TransactionAborted.
        """
        if self._stage is not Stage.STORED:
            self.before_commit()

        async def send_commit() -> None:
            commit()

        run(self._commit_all(send_commit))


def enlisted_in(connection: BlockingConnection) -> EnlistedTransaction | None:
    """Return the messages in a connection's open transaction."""
    found = getattr(connection, "enlisted", None)
    return found if isinstance(found, EnlistedTransaction) else None
