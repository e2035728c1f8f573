"""Errors of a business database."""

from __future__ import annotations

from txmq.errors.base import TxmqError


class DatabaseError(TxmqError):
    """PostgreSQL refused or failed.

    `sqlstate` is its code, None where the connection itself broke.
    """

    def __init__(self, message: str, *, hint: str = "", sqlstate: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.sqlstate = sqlstate


class DatabaseUnavailable(DatabaseError):
    """No usable connection to PostgreSQL; an open transaction on it is gone."""

    retriable = True


class DatabaseConflict(DatabaseError):
    """A serialization failure, a deadlock or a lock time-out.

    Roll back, and run the whole transaction again.
    """

    retriable = True


class SchemaMissing(DatabaseError):
    """The database lacks txmq's tables, or has another version of them."""


class InboxMismatch(DatabaseError):
    """An inbox does not fit the broker's log: it may be that of another topic or log,
    or the log was restored to the past.
    """


class LeaseRefused(DatabaseError):
    """Another copy of the broker's data works on the database, or it is a copy."""


class UnsupportedServer(DatabaseError):
    """The PostgreSQL server is too old, or is one that txmq must not write to."""


class SynchronousCommitOff(DatabaseError):
    """The session commits without waiting for the disk.

    A crash could take back a transaction whose messages went out.
    """


class TwoPhaseOff(DatabaseError):
    """The server prepares no transactions: its `max_prepared_transactions` is 0."""


class TwoPhaseFull(DatabaseError):
    """The server can hold no more prepared transactions; this one is rolled back."""

    retriable = True


class WalLevelTooLow(DatabaseError):
    """The server's `wal_level`, `found`, is too low for logical messages."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"wal_level is {found}",
            hint="set wal_level = logical in postgresql.conf and restart PostgreSQL",
        )
        self.found = found


class SlotMissing(DatabaseError):
    """There is no such replication slot, or a relay cannot read it."""


class SlotInUse(DatabaseError):
    """Another process reads the replication slot; only one at a time can."""

    retriable = True


class SlotLost(DatabaseError):
    """PostgreSQL has removed log that the slot still needed.

    Messages of transactions committed since then are not in the broker.
    """


class SlotRewound(DatabaseError):
    """The database was restored to a position before the broker's watermark for it."""
