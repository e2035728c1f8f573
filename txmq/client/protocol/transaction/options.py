"""Options of transactions, checked before anything is sent."""

from __future__ import annotations

from typing import Literal, TypedDict

from txmq.client.protocol.settings import MAX_TIMEOUT_S
from txmq.errors import ConfigError

STORE_TIMEOUT_S = 2.0  # row locks are held for as long, should the broker not answer
CHECK_AFTER_S = 6.0  # RocketMQ's first check


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

    timeout: float
    check_after: float
    on_unavailable: Literal["fail", "outbox"]
    allow_weak_commit: bool


class XaOptions(TypedDict, total=False):
    """Keyword arguments of `client.xa`.

    `timeout`: seconds within which the brokers have to store the messages once the
    branches are prepared, 2. `check_after`: seconds until the home broker rolls an
    undecided transaction back, 6; preparing the branches has to take less. `node`: the
    name in the gids of the branches, up to 18 characters; by default the service, cut.
    """

    timeout: float
    check_after: float
    node: str


def require_seconds(name: str, value: float) -> float:
    """Return the value of an option that is a span of time. Raises ConfigError."""
    if not 0 < value <= MAX_TIMEOUT_S:
        raise ConfigError(
            name,
            f"{value!r} is not accepted",
            hint=f"give seconds, more than 0 and up to {MAX_TIMEOUT_S:.0f}",
        )
    return value
