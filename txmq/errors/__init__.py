"""The errors of txmq.

    TxmqError
    ├─ ConfigError
    ├─ ProtocolError
    │  ├─ LocalProtocolError
    │  │  └─ BodyMismatch, InvalidSelector
    │  └─ RemoteProtocolError
    ├─ BrokerUnavailable
    ├─ LogChanged
    ├─ ConnectionLost
    ├─ RequestTimeout
    ├─ ClientClosed
    ├─ RequestRejected            (one class per status on the wire: txmq.wire.status)
    ├─ StoreError
    │  ├─ CorruptRecord, UnsupportedFormat, DiskFull, StoreClosed, DirectoryInUse,
    │  │  StoreFull, ForeignStore, InvalidExport, SpoolFull, BackupDamaged,
    │  │  BackupMismatch, RestoreUnfinished
    ├─ DatabaseError
    │  ├─ DatabaseUnavailable, DatabaseConflict, SchemaMissing, InboxMismatch,
    │  │  UnsupportedServer, SynchronousCommitOff, TwoPhaseOff, TwoPhaseFull,
    │  │  WalLevelTooLow, LeaseRefused, SlotMissing, SlotInUse, SlotLost,
    │  │  SlotRewound
    └─ TransactionError
       ├─ UnknownTransaction, AlreadyResolved, TransactionAborted, TransactionEnded,
          TokenFenced, InDoubt, HeuristicMixed

`MissingExtra`, for a part whose packages are not installed, is in `txmq.errors.extras`.

Errors towards a foreign transaction manager are in `txmq.errors.xa`.

`retriable`: the same call may succeed if it is made again. `outcome`: the effect of the
call that raised: "not done", or "unknown" where it may have happened (a send that timed
out may have been stored).
"""

from __future__ import annotations

from txmq.errors.base import (
    BackupDamaged,
    BackupMismatch,
    BodyMismatch,
    BrokerUnavailable,
    ClientClosed,
    ConfigError,
    ConnectionLost,
    CorruptRecord,
    DirectoryInUse,
    DiskFull,
    ForeignStore,
    InvalidExport,
    InvalidSelector,
    LocalProtocolError,
    LogChanged,
    Outcome,
    ProtocolError,
    RemoteProtocolError,
    RequestTimeout,
    RestoreUnfinished,
    SpoolFull,
    StoreClosed,
    StoreError,
    StoreFull,
    TxmqError,
    UnsupportedFormat,
)
from txmq.errors.database import (
    DatabaseConflict,
    DatabaseError,
    DatabaseUnavailable,
    InboxMismatch,
    LeaseRefused,
    SchemaMissing,
    SlotInUse,
    SlotLost,
    SlotMissing,
    SlotRewound,
    SynchronousCommitOff,
    TwoPhaseFull,
    TwoPhaseOff,
    UnsupportedServer,
    WalLevelTooLow,
)
from txmq.errors.refusals import (
    AccessDenied,
    BadRequest,
    BrokerFailed,
    Conflict,
    DigestMismatch,
    DuplicateXid,
    GroupMismatch,
    HeuristicOutcome,
    IncompatibleSchema,
    LoginFailed,
    MessagesDamaged,
    MessageTooLarge,
    NoResolver,
    NotLeased,
    NotPermitted,
    OffsetOutOfRange,
    OtherLog,
    ProducerFenced,
    ReadOnly,
    RecallTooLate,
    RequestRejected,
    SequenceGap,
    StaleGeneration,
    StaleTopic,
    Throttled,
    TopicClosed,
    TopicExists,
    TopicReplaced,
    UnknownGroup,
    UnknownLetter,
    UnknownMember,
    UnknownPartition,
    UnknownPlan,
    UnknownProducer,
    UnknownTopic,
    UnknownUser,
)
from txmq.errors.transactions import (
    AlreadyResolved,
    HeuristicMixed,
    InDoubt,
    TokenFenced,
    TransactionAborted,
    TransactionEnded,
    TransactionError,
    UnknownTransaction,
)

__all__ = (
    "AccessDenied",
    "AlreadyResolved",
    "BackupDamaged",
    "BackupMismatch",
    "BadRequest",
    "BodyMismatch",
    "BrokerFailed",
    "BrokerUnavailable",
    "ClientClosed",
    "ConfigError",
    "Conflict",
    "ConnectionLost",
    "CorruptRecord",
    "DatabaseConflict",
    "DatabaseError",
    "DatabaseUnavailable",
    "DigestMismatch",
    "DirectoryInUse",
    "DiskFull",
    "DuplicateXid",
    "ForeignStore",
    "GroupMismatch",
    "HeuristicMixed",
    "HeuristicOutcome",
    "InDoubt",
    "InboxMismatch",
    "IncompatibleSchema",
    "InvalidExport",
    "InvalidSelector",
    "LeaseRefused",
    "LocalProtocolError",
    "LogChanged",
    "LoginFailed",
    "MessageTooLarge",
    "MessagesDamaged",
    "NoResolver",
    "NotLeased",
    "NotPermitted",
    "OffsetOutOfRange",
    "OtherLog",
    "Outcome",
    "ProducerFenced",
    "ProtocolError",
    "ReadOnly",
    "RecallTooLate",
    "RemoteProtocolError",
    "RequestRejected",
    "RequestTimeout",
    "RestoreUnfinished",
    "SchemaMissing",
    "SequenceGap",
    "SlotInUse",
    "SlotLost",
    "SlotMissing",
    "SlotRewound",
    "SpoolFull",
    "StaleGeneration",
    "StaleTopic",
    "StoreClosed",
    "StoreError",
    "StoreFull",
    "SynchronousCommitOff",
    "Throttled",
    "TokenFenced",
    "TopicClosed",
    "TopicExists",
    "TopicReplaced",
    "TransactionAborted",
    "TransactionEnded",
    "TransactionError",
    "TwoPhaseFull",
    "TwoPhaseOff",
    "TxmqError",
    "UnknownGroup",
    "UnknownLetter",
    "UnknownMember",
    "UnknownPartition",
    "UnknownPlan",
    "UnknownProducer",
    "UnknownTopic",
    "UnknownTransaction",
    "UnknownUser",
    "UnsupportedFormat",
    "UnsupportedServer",
    "WalLevelTooLow",
)
