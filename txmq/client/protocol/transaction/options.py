"""Options of transactions, checked before anything is sent."""

from __future__ import annotations

from enum import Enum
from typing import Final, Literal, TypedDict

from txmq.client.protocol.settings import ClientSettings, require_seconds
from txmq.errors import ConfigError, LocalProtocolError
from txmq.errors.validation import check_options
from txmq.model.durations import Duration
from txmq.tx.xid import node_of

STORE_TIMEOUT_S = 2.0  # row locks are held for as long, should the broker not answer
CHECK_AFTER_S = 6.0  # RocketMQ's first check
DEFAULT_NODE = "txmq"  # the node of clients without a service


class Nobody(Enum):
    """The default of a connection that may be left out."""

    CONNECTION = "no connection is given"


# None is none: a framework's connection is None before its first use, and a transaction
# without one has the messages only.
NO_CONNECTION: Final = Nobody.CONNECTION


class TransactionOptions(TypedDict, total=False):
    """Keyword arguments of `client.transaction`.

    `timeout`: seconds within which the broker has to store the messages; 2 with a
    database, else the client's time-out. `check_after`: seconds until the broker's
    first check-back, 6.

    With a database: `on_unavailable` = "fail" rolls the transaction back while the
    broker is away, "outbox" lets its messages wait in the database (docs/PROTOCOL.md
    2.3). `allow_weak_commit` accepts `synchronous_commit` off or local: a crash of the
    database may then take back a transaction whose messages were published.
    """

    timeout: Duration
    check_after: Duration
    on_unavailable: Literal["fail", "outbox"]
    allow_weak_commit: bool


class XaOptions(TypedDict, total=False):
    """Keyword arguments of `client.xa`.

    `timeout`: seconds within which the brokers have to store the messages once the
    branches are prepared, 2. `check_after`: seconds until the home broker rolls an
    undecided transaction back, 6; preparing the branches has to take less. `node`: the
    name in the gids of the branches, up to 18 characters; by default the service, cut.
    """

    timeout: Duration
    check_after: Duration
    node: str


class CheckedOptions(TypedDict):
    """The options of one transaction, with the defaults of those left out."""

    timeout: float
    check_after: float
    allow_weak_commit: bool
    outbox: bool


def checked_options(
    settings: ClientSettings, connection: object, checker: str | None, options: TransactionOptions
) -> CheckedOptions:
    """Return the options of a transaction with that connection or checker, if any.

    Raises ConfigError or LocalProtocolError.
    """
    if options:
        check_options("transaction", options, TransactionOptions.__optional_keys__)
    if connection is None:
        raise LocalProtocolError(
            "None is no connection to send messages with",
            hint="open it first: Django does in connection.ensure_connection(); for messages "
            "alone leave the argument out",
        )
    timeout = settings.timeout if connection is NO_CONNECTION else STORE_TIMEOUT_S
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
    if policy == "outbox" and connection is NO_CONNECTION:
        raise LocalProtocolError(
            "on_unavailable='outbox' needs a database, in which the messages wait",
            hint="give the connection: client.transaction(connection)",
        )
    if connection is not NO_CONNECTION and checker is not None:
        raise LocalProtocolError(
            "A transaction has a connection or a checker, not both",
            hint="leave the checker out: the database decides the transaction",
        )
    return {
        "timeout": timeout,
        "check_after": check_after,
        "allow_weak_commit": options.get("allow_weak_commit", False),
        "outbox": policy == "outbox",
    }


class CheckedXaOptions(TypedDict):
    """The options of one XA transaction, with the defaults of those left out."""

    node: str
    timeout: float
    check_after: float


def checked_xa_options(settings: ClientSettings, options: XaOptions) -> CheckedXaOptions:
    """Return the options of an XA transaction. Raises ConfigError."""
    check_options("xa", options, XaOptions.__optional_keys__)
    return {
        "node": options.get("node", node_of(settings.service or DEFAULT_NODE)),
        "timeout": require_seconds("timeout", options.get("timeout", STORE_TIMEOUT_S)),
        "check_after": require_seconds("check_after", options.get("check_after", CHECK_AFTER_S)),
    }
