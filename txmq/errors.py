"""Every error a user of txmq can meet.

    TxmqError
    ├─ ConfigError
    ├─ ProtocolError
    │  ├─ LocalProtocolError
    │  │  └─ InvalidSelector
    │  └─ RemoteProtocolError
    ├─ BrokerUnavailable
    ├─ LogChanged
    ├─ ConnectionLost
    ├─ RequestTimeout
    ├─ ClientClosed
    ├─ RequestRejected            (one class per status on the wire: txmq.wire.status)
    ├─ StoreError
    │  ├─ CorruptRecord, UnsupportedFormat, DiskFull, StoreClosed, DirectoryInUse
    ├─ DatabaseError
    │  ├─ DatabaseUnavailable, DatabaseConflict, SchemaMissing, UnsupportedServer, SynchronousCommitOff,
    │  │  TwoPhaseOff, TwoPhaseFull, WalLevelTooLow, SlotMissing, SlotInUse, SlotLost, SlotRewound
    └─ TransactionError
       ├─ UnknownTransaction, AlreadyResolved, IllegalTransition, TransactionAborted, TokenFenced, InDoubt,
          HeuristicMixed

What a resource tells a foreign transaction manager are the kinds of `txmq.errors_xa.XaError`.

`retriable`: the same call may succeed if made again. `outcome`: what is known of the effect of the call that raised:
"not done", or "unknown" where it may have happened (a timed-out send may have been stored).
"""

from __future__ import annotations

from typing import ClassVar, Literal

Outcome = Literal["not done", "unknown"]


class TxmqError(Exception):
    """Root of the tree. `hint` says what to do about it; the text of the error ends with it."""

    retriable: ClassVar[bool] = False
    outcome: Outcome = "not done"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


class ConfigError(TxmqError):
    """A setting is missing or wrong. `path` names it within the settings file."""

    def __init__(self, path: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: {message}", hint=hint)
        self.path = path


class ProtocolError(TxmqError):
    """The conversation broke a rule of the protocol."""


class LocalProtocolError(ProtocolError):
    """We tried something the protocol forbids: a bug on this side, or input out of range."""


class InvalidSelector(LocalProtocolError):
    """A selector that is none; `position` is where in its text, from 0."""

    def __init__(self, message: str, position: int, *, hint: str = "") -> None:
        super().__init__(f"in the selector, at {position}: {message}", hint=hint)
        self.position = position


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; the connection is of no more use and is closed."""


class BrokerUnavailable(TxmqError):
    """No connection to any broker could be made within the time allowed."""

    retriable = True


class LogChanged(TxmqError):
    """The broker has another log than before: nothing that this client knows of it holds any more."""


class ConnectionLost(TxmqError):
    """The connection ended while the request was under way: it may have been carried out."""

    retriable = True
    outcome = "unknown"


class RequestTimeout(TxmqError):
    """No reply within the time allowed: the request may have been carried out."""

    retriable = True
    outcome = "unknown"


class ClientClosed(TxmqError):
    """The client, consumer or transaction was closed before this call."""


class RequestRejected(TxmqError):
    """The broker refused the request; nothing was done. `detail` holds the fields behind the message."""

    def __init__(self, message: str, *, hint: str = "", detail: dict[str, object] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.detail = detail or {}


class BadRequest(RequestRejected):
    """The request is malformed or a value in it is out of range."""


class UnknownTopic(RequestRejected):
    """The topic does not exist and the broker does not create topics on first use."""


class UnknownPartition(RequestRejected):
    """The topic has no such partition."""


class StaleTopic(RequestRejected):
    """The sender knew an older shape of the topic (its partition count grew); fetch the metadata and send again."""

    retriable = True


class TopicExists(RequestRejected):
    """A topic of that name exists with other settings."""


class RecallTooLate(RequestRejected):
    """The message does not wait for its time of delivery: it has been published already, or is not known at all."""


class UnknownGroup(RequestRejected):
    """The consumer group does not exist."""


class UnknownMember(RequestRejected):
    """The member is not, or no longer, part of the consumer group; join again."""

    retriable = True


class StaleGeneration(RequestRejected):
    """The member's generation is over: the partitions or leases it speaks of may belong to others now."""


class GroupMismatch(RequestRejected):
    """The consumer group exists with another mode or other settings."""


class NotLeased(RequestRejected):
    """The message is not leased to this member: acked before, moved, or its lease ran out."""


class OffsetOutOfRange(RequestRejected):
    """The offset is below what is retained or above the end of the partition."""


class TopicClosed(RequestRejected):
    """An operator has closed the topic for writing, or for reading."""


class MessagesDamaged(RequestRejected):
    """Messages that were stored cannot be read any more; `detail` tells which, and the `next` offset after them."""


class MessageTooLarge(RequestRejected):
    """A message or frame exceeds the broker's limit."""


class Throttled(RequestRejected):
    """The broker is over a budget; try again after a pause."""

    retriable = True


class ReadOnly(RequestRejected):
    """The broker's disk is full; it serves reads and refuses writes until there is space."""

    retriable = True


class SequenceGap(RequestRejected):
    """A producer's sequence skipped numbers: an earlier send is missing."""


class UnknownProducer(RequestRejected):
    """A repeated send of a producer that the broker has forgotten."""

    outcome = "unknown"


class ProducerFenced(RequestRejected):
    """A newer incarnation of this producer instance has taken over; this one sends nothing any more."""


class NoResolver(RequestRejected):
    """No resolver of the broker is configured for the database that decides this transaction."""


class NotPermitted(RequestRejected):
    """The login does not allow this call on this resource."""


class UnknownLetter(RequestRejected):
    """There is no such dead letter."""


class Conflict(RequestRejected):
    """The transaction has the other outcome already; the contradiction was recorded."""


class HeuristicOutcome(Conflict):
    """Somebody decided the transaction by hand, and otherwise; `detail` tells the outcome, and it is recorded."""


class DuplicateXid(RequestRejected):
    """The Xid is that of another transaction (XAER_DUPID)."""


class OtherLog(RequestRejected, LogChanged):
    """The question is for a broker with another log: this one's answer would mean nothing."""


class DigestMismatch(RequestRejected):
    """The same token was used before for other contents."""


class BrokerFailed(RequestRejected):
    """The broker met an error of its own while it worked on the request; its log says which."""

    outcome = "unknown"


class StoreError(TxmqError):
    """The log or one of its companions cannot be used."""


class CorruptRecord(StoreError):
    """Durable data is damaged at `position` of the file `path`."""

    def __init__(self, path: str, position: int, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: damaged at position {position}: {reason}", hint=hint)
        self.path, self.position, self.reason = path, position, reason


class UnsupportedFormat(StoreError):
    """A file was written by another version of txmq."""

    def __init__(self, path: str, found: object, known: object) -> None:
        super().__init__(
            f"{path}: format version {found}, this txmq knows {known}",
            hint="it was written by another version of txmq: run that version, or restore a backup",
        )
        self.path, self.found, self.known = path, found, known


class DiskFull(StoreError):
    """There is no space for the log to grow."""

    retriable = True


class StoreClosed(StoreError):
    """The store was closed, or it failed earlier and refuses further work until it is recovered by a restart."""


class DirectoryInUse(StoreError):
    """Another process holds the data directory."""


class DatabaseError(TxmqError):
    """PostgreSQL refused or failed. `sqlstate` is its code, None where the connection itself broke."""

    def __init__(self, message: str, *, hint: str = "", sqlstate: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.sqlstate = sqlstate


class DatabaseUnavailable(DatabaseError):
    """No usable connection to PostgreSQL; an open transaction on it is gone."""

    retriable = True


class DatabaseConflict(DatabaseError):
    """A serialization failure, deadlock or lock time-out: roll back and run the whole transaction again."""

    retriable = True


class SchemaMissing(DatabaseError):
    """The database lacks txmq's tables, or has those of another version."""


class UnsupportedServer(DatabaseError):
    """The PostgreSQL server is too old, or is one that txmq must not write to."""


class SynchronousCommitOff(DatabaseError):
    """The session commits without waiting for the disk: a crash could take back a transaction whose messages went
    out.
    """


class TwoPhaseOff(DatabaseError):
    """The server prepares no transactions: its `max_prepared_transactions` is 0."""


class TwoPhaseFull(DatabaseError):
    """The server has as many prepared transactions as it can hold; this one was rolled back."""

    retriable = True


class WalLevelTooLow(DatabaseError):
    """The server writes too little into its log for logical messages; `found` is its wal_level."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"wal_level is {found}", hint="set wal_level = logical in postgresql.conf and restart PostgreSQL"
        )
        self.found = found


class SlotMissing(DatabaseError):
    """There is no such replication slot, or not one that a relay can read."""


class SlotInUse(DatabaseError):
    """Another process reads the replication slot; only one can."""

    retriable = True


class SlotLost(DatabaseError):
    """PostgreSQL has removed log that the slot still needed: what was committed since is not in the broker."""


class SlotRewound(DatabaseError):
    """The database's log goes on from an earlier place than the broker has taken it over to: it was restored."""


class TransactionError(TxmqError):
    """A transaction cannot do what was asked."""


class UnknownTransaction(RequestRejected, TransactionError):
    """The broker knows no such transaction: never stored here, or older than the outcomes it keeps."""


class AlreadyResolved(TransactionError):
    """The transaction has been decided; `decision` tells how."""

    def __init__(self, message: str, *, decision: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.decision = decision


class IllegalTransition(TransactionError):
    """A state machine was asked for a step that does not exist."""

    def __init__(self, transaction: str, state: str, event: str) -> None:
        super().__init__(f"transaction {transaction} is {state}: {event} is not possible")
        self.transaction, self.state, self.event = transaction, state, event


class TransactionAborted(TransactionError):
    """The transaction was rolled back, or could not be committed: none of its rows and messages exist."""


class TokenFenced(TransactionError):
    """A resolver decided ROLLBACK for the token before its row was written; the transaction must be rolled back."""


class InDoubt(TransactionError):
    """It is not known whether the transaction committed; `token` names it. The resolver finds out."""

    outcome = "unknown"

    def __init__(self, message: str, *, token: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.token = token


class HeuristicMixed(TransactionError):
    """Somebody ended branches of the transaction by hand, and otherwise than it was decided: its rows disagree.

    `token` names it, `decision` ("COMMIT" or "ROLLBACK") holds for all but `branches`, their gids.
    """

    outcome = "unknown"

    def __init__(self, message: str, *, token: str, decision: str, branches: tuple[str, ...], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.token, self.decision, self.branches = token, decision, branches
