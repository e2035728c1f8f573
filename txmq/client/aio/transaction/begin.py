"""The kind of a transaction, chosen by the arguments of its call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from txmq.client.aio.core import AioCore
from txmq.client.aio.transaction.half import HalfTransaction
from txmq.client.aio.transaction.local import LocalTransaction
from txmq.client.aio.transaction.transaction import Transaction
from txmq.client.protocol.sender.routing import Routing
from txmq.client.protocol.transaction.options import (
    NO_CONNECTION,
    TransactionOptions,
    XaOptions,
    checked_options,
    checked_xa_options,
)

if TYPE_CHECKING:  # for programs that have a database
    from txmq.client.aio.transaction.enlisted import EnlistedTransaction
    from txmq.client.aio.transaction.postgres import PostgresTransaction
    from txmq.client.aio.transaction.xa import XaTransaction


def begin(
    core: AioCore,
    connection: object,
    checker: str | None,
    options: TransactionOptions,
    kind: type[PostgresTransaction] | None = None,
) -> Transaction:
    """Return a transaction that is not entered yet; with a database, of that `kind`.

    Raises ConfigError or LocalProtocolError.
    """
    checked = checked_options(core.settings, connection, checker, options)
    timeout, check_after = checked["timeout"], checked["check_after"]
    if checker is not None:
        return HalfTransaction(core, checker, timeout=timeout, check_after=check_after)
    if connection is NO_CONNECTION:
        return LocalTransaction(core, timeout=timeout)
    if kind is None:
        from txmq.client.aio.transaction.postgres import PostgresTransaction  # noqa: PLC0415

        kind = PostgresTransaction
    return kind(core, connection, **checked)


def enlist(
    cores: Sequence[AioCore],
    connection: object,
    options: TransactionOptions,
    routing: Routing | None = None,
    *,
    hooks: bool,
) -> EnlistedTransaction:
    """Return the messages of a connection's open transaction: new ones, or those that
    the same client has begun.

    `routing` is that of a cluster, whose cores these are. Raises ConfigError,
    LocalProtocolError, or as `require_usable`.
    """
    from txmq.client.aio.transaction.enlisted import (  # noqa: PLC0415
        EnlistedTransaction,
        enlisted_in,
    )

    known = enlisted_in(connection)
    if known is not None:
        known.require_joinable(cores[0], options)
        return known
    transaction = begin(cores[0], connection, None, options, EnlistedTransaction)
    assert isinstance(transaction, EnlistedTransaction), "of that kind"
    if routing is not None:
        transaction._spread(cores, routing)  # noqa: SLF001  # not the user's call
    transaction.join(options, hooks=hooks)
    return transaction


def begin_xa(core: AioCore, connections: Sequence[object], options: XaOptions) -> XaTransaction:
    """Return an XA transaction that is not entered yet.

    Raises ConfigError or LocalProtocolError.
    """
    checked = checked_xa_options(core.settings, options)
    from txmq.client.aio.transaction.xa import XaTransaction  # noqa: PLC0415

    return XaTransaction(core, connections, **checked)
