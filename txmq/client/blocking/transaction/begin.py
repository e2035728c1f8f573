"""The kind of a transaction, chosen by the arguments of its call."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.half import HalfTransaction
from txmq.client.blocking.transaction.local import LocalTransaction
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.client.protocol.transaction.options import (
    CHECK_AFTER_S,
    STORE_TIMEOUT_S,
    TransactionOptions,
    XaOptions,
    require_seconds,
)
from txmq.errors import ConfigError, LocalProtocolError
from txmq.tx.xid import node_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from txmq.client.blocking.transaction.enlisted import EnlistedTransaction
    from txmq.client.blocking.transaction.postgres import PostgresTransaction
    from txmq.client.blocking.transaction.xa import XaTransaction
    from txmq.client.protocol.sender.routing import Routing
    from txmq.tx.postgres.session import Connection

DEFAULT_NODE = "txmq"  # the node of clients without a service


def begin(
    core: BlockingCore,
    connection: Connection | None,
    checker: str | None,
    options: TransactionOptions,
    kind: Callable[[], type[PostgresTransaction]] | None = None,
) -> Transaction:
    """Return a transaction that is not entered yet; with a database, of that `kind`.

    Raises ConfigError or LocalProtocolError.
    """
    if options and (unknown := options.keys() - TransactionOptions.__optional_keys__):
        raise ConfigError(
            "transaction", f"there is no option {min(unknown)!r}", hint="see TransactionOptions"
        )
    timeout = core.settings.timeout if connection is None else STORE_TIMEOUT_S
    if "timeout" in options:
        timeout = require_seconds("timeout", options["timeout"])
    check_after = CHECK_AFTER_S
    if "check_after" in options:
        check_after = require_seconds("check_after", options["check_after"])
    policy = options.get("on_unavailable", "fail")
    if policy not in ("fail", "outbox"):
        raise ConfigError(
            "on_unavailable", f"there is no policy {policy!r}", hint="give 'fail' or 'outbox'"
        )
    if policy == "outbox" and connection is None:
        raise LocalProtocolError(
            "on_unavailable='outbox' needs a database, in which the messages wait",
            hint="give the connection: client.transaction(connection)",
        )
    if connection is not None and checker is not None:
        raise LocalProtocolError(
            "A transaction has a connection or a checker, not both",
            hint="leave the checker out: the database decides the transaction",
        )
    if checker is not None:
        return HalfTransaction(core, checker, timeout=timeout, check_after=check_after)
    if connection is None:
        return LocalTransaction(core, timeout=timeout)
    return (kind or _postgres_transaction)()(
        core,
        connection,
        timeout=timeout,
        check_after=check_after,
        allow_weak_commit=options.get("allow_weak_commit", False),
        outbox=policy == "outbox",
    )


def enlist(
    cores: Sequence[BlockingCore],
    connection: Connection,
    options: TransactionOptions,
    routing: Routing | None = None,
) -> EnlistedTransaction:
    """Return the messages of a connection's open transaction: new ones, or those that
    the same client has begun.

    `routing` is that of a cluster, whose cores these are. Raises ConfigError,
    LocalProtocolError, or as `require_usable`.
    """
    # Programs without a database need not load psycopg2.
    from txmq.client.blocking.transaction.enlisted import (  # noqa: PLC0415
        EnlistedTransaction,
        enlisted_in,
    )

    known = enlisted_in(connection)
    if known is not None:
        known.require_joinable(cores[0], options)
        return known
    transaction = begin(cores[0], connection, None, options, lambda: EnlistedTransaction)
    assert isinstance(transaction, EnlistedTransaction), "of that kind"
    if routing is not None:
        transaction._spread(cores, routing)  # noqa: SLF001  # not the user's call
    transaction.join(options)
    return transaction


@cache
def _postgres_transaction() -> type[PostgresTransaction]:
    # Programs without a database need not load psycopg2.
    from txmq.client.blocking.transaction.postgres import PostgresTransaction  # noqa: PLC0415

    return PostgresTransaction


def begin_xa(
    core: BlockingCore, connections: Sequence[Connection], options: XaOptions
) -> XaTransaction:
    """Return an XA transaction that is not entered yet.

    Raises ConfigError or LocalProtocolError.
    """
    if unknown := options.keys() - XaOptions.__optional_keys__:
        raise ConfigError("xa", f"there is no option {min(unknown)!r}", hint="see XaOptions")
    # Programs without a database need not load psycopg2.
    from txmq.client.blocking.transaction.xa import XaTransaction  # noqa: PLC0415

    return XaTransaction(
        core,
        connections,
        node=options.get("node", node_of(core.settings.service or DEFAULT_NODE)),
        timeout=require_seconds("timeout", options.get("timeout", STORE_TIMEOUT_S)),
        check_after=require_seconds("check_after", options.get("check_after", CHECK_AFTER_S)),
    )
