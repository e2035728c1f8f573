"""How a transaction is asked for: which kind, and on what terms."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal, TypedDict

from txmq.client.blocking.core import Core
from txmq.client.blocking.transaction.half import HalfTransaction
from txmq.client.blocking.transaction.local import LocalTransaction
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.client.protocol.settings import LONGEST_S
from txmq.errors import ConfigError, LocalProtocolError
from txmq.tx.xid import node_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from txmq.client.blocking.transaction.postgres import PostgresTransaction
    from txmq.client.blocking.transaction.xa import XaTransaction
    from txmq.tx.postgres.session import Connection

GROUP_S = 2.0  # rows stay locked for so long at most, should the broker not answer
CHECK_AFTER_S = 6.0  # RocketMQ's first check
ANYBODY = "txmq"  # the node of clients without a service


class TransactionOptions(TypedDict, total=False):
    """The keyword arguments of `client.transaction`.

    `timeout`: seconds within which the broker has to have the messages, 2 for a
    database's transaction, else the client's. `check_after`: seconds until the broker
    first finds out by itself what became of it, 6. With a database: `on_unavailable`
    tells what becomes of it without the broker, "fail": it is rolled back, or "outbox":
    its messages wait in the database (see `fallback`); `allow_weak_commit` accepts
    `synchronous_commit` off or local, where a crash of the database may take back a
    transaction whose messages went out.
    """

    timeout: float
    check_after: float
    on_unavailable: Literal["fail", "outbox"]
    allow_weak_commit: bool


def begin(
    core: Core, connection: Connection | None, checker: str | None, options: TransactionOptions
) -> Transaction:
    """The transaction asked for, yet to be entered. Raises ConfigError,
    LocalProtocolError.
    """
    if options and (unknown := options.keys() - TransactionOptions.__optional_keys__):
        raise ConfigError(
            "transaction", f"there is no option {min(unknown)!r}", hint="see TransactionOptions"
        )
    check_after = seconds("check_after", options.get("check_after", CHECK_AFTER_S))
    timeout = seconds(
        "timeout", options.get("timeout", core.settings.timeout if connection is None else GROUP_S)
    )
    policy = options.get("on_unavailable", "fail")
    if policy not in ("fail", "outbox"):
        raise ConfigError("on_unavailable", f"there is no {policy!r}", hint="'fail' or 'outbox'")
    if policy == "outbox" and connection is None:
        hint = "messages wait in a database: client.transaction(connection)"
        raise LocalProtocolError("only a database's transaction has an outbox", hint=hint)
    if connection is not None and checker is not None:
        hint = "the database decides where there is one: leave the checker out"
        raise LocalProtocolError("a transaction has a connection or a checker, not both", hint=hint)
    if checker is not None:
        return HalfTransaction(core, checker, timeout=timeout, check_after=check_after)
    if connection is None:
        return LocalTransaction(core, timeout=timeout)
    return _postgres()(
        core,
        connection,
        timeout=timeout,
        check_after=check_after,
        allow_weak_commit=options.get("allow_weak_commit", False),
        outbox=policy == "outbox",
    )


@cache
def _postgres() -> type[PostgresTransaction]:
    from txmq.client.blocking.transaction.postgres import PostgresTransaction  # loads psycopg2

    return PostgresTransaction


class XaOptions(TypedDict, total=False):
    """The keyword arguments of `client.xa`.

    `timeout`: seconds within which the brokers have to have their groups once the
    branches are prepared, 2. `check_after`: seconds after which the home broker by
    itself rolls back what nobody has decided, 6: more than preparing the branches ever
    takes. `node`: in whose name the branches are prepared, at most 18 characters; by
    default that of the service, cut short if need be.
    """

    timeout: float
    check_after: float
    node: str


def begin_xa(core: Core, connections: Sequence[Connection], options: XaOptions) -> XaTransaction:
    """The transaction asked for, yet to be entered. Raises ConfigError,
    LocalProtocolError.
    """
    if unknown := options.keys() - XaOptions.__optional_keys__:
        raise ConfigError("xa", f"there is no option {min(unknown)!r}", hint="see XaOptions")
    from txmq.client.blocking.transaction.xa import XaTransaction  # loads psycopg2

    return XaTransaction(
        core,
        connections,
        node=options.get("node", node_of(core.settings.service or ANYBODY)),
        timeout=seconds("timeout", options.get("timeout", GROUP_S)),
        check_after=seconds("check_after", options.get("check_after", CHECK_AFTER_S)),
    )


def seconds(name: str, value: float) -> float:
    """An option that is a span of time. Raises ConfigError."""
    if not 0 < value <= LONGEST_S:
        raise ConfigError(
            name, f"{value!r} is not accepted", hint=f"seconds, up to {LONGEST_S:.0f}, are needed"
        )
    return value
