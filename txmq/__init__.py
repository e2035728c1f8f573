"""txmq: transactional messaging for Python services that keep their data in PostgreSQL.

    txmq.connect(url)                       a client: sends, transactions, consumers
    txmq.aio, txmq.twisted                  the same for asyncio, and for Twisted
    txmq.Options, txmq.ConsumerOptions      arguments of `connect` and `consumer`
    txmq.TransactionOptions, txmq.XaOptions arguments of `transaction` and `xa`
    txmq.errors                             all errors, below TxmqError
    txmq.postgres, txmq.psycopg, txmq.asyncpg   connections whose COMMIT takes
                                            messages along
    txmq.sqlalchemy, txmq.django            the same for these frameworks
    txmq.kombu, txmq.taskiq, txmq.starlette Celery, taskiq and FastAPI on txmq
    txmq.testing.plugin                     fixtures of pytest

The names below are loaded at their first use. Some parts need an extra, which their
import names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from txmq import errors
from txmq.model.message import (
    COMMIT,
    ROLLBACK,
    UNKNOWN,
    Decision,
    Message,
    Receipt,
    ReceivedMessage,
    delay_level,
)
from txmq.model.retry import RetryPolicy
from txmq.version import __version__

if TYPE_CHECKING:
    from txmq import aio as aio
    from txmq import asyncpg as asyncpg
    from txmq import django as django
    from txmq import postgres as postgres
    from txmq import psycopg as psycopg
    from txmq import selector as selector
    from txmq import sqlalchemy as sqlalchemy
    from txmq import twisted as twisted
    from txmq.client.blocking.client import Client
    from txmq.client.blocking.cluster import Cluster
    from txmq.client.blocking.connect import connect
    from txmq.client.blocking.consumer.consumer import Consumer, Consumers
    from txmq.client.blocking.plans import ReplayPlan
    from txmq.client.blocking.reader import Reader, Readers
    from txmq.client.blocking.transaction.enlisted import EnlistedTransaction
    from txmq.client.blocking.transaction.half import HalfTransaction
    from txmq.client.blocking.transaction.jobs import Job
    from txmq.client.blocking.transaction.transaction import Transaction
    from txmq.client.blocking.transaction.xa import XaTransaction
    from txmq.client.blocking.transaction.xa_resource import XaResource
    from txmq.client.blocking.typed import TypedTopic
    from txmq.client.protocol.audit import AuditEntry
    from txmq.client.protocol.consumer.fetched import DeliveredMessage, ReceivedBatch
    from txmq.client.protocol.consumer.settings import ConsumerOptions
    from txmq.client.protocol.letter_changes import (
        ChangedLetters,
        ExportedLetters,
        ImportedLetters,
        Trial,
    )
    from txmq.client.protocol.letters import DeadLetter
    from txmq.client.protocol.lives import Trace
    from txmq.client.protocol.message_search import FoundMessage
    from txmq.client.protocol.offsets import FileOffsets, OffsetStore
    from txmq.client.protocol.plans import PlannedLetter, PlanStatus
    from txmq.client.protocol.reader import Found
    from txmq.client.protocol.sender.batches import StoredBatch
    from txmq.client.protocol.settings import Options
    from txmq.client.protocol.telemetry.tracing import Telemetry
    from txmq.client.protocol.transaction.checks import Half
    from txmq.client.protocol.transaction.half_message import HalfMessage
    from txmq.client.protocol.transaction.options import TransactionOptions, XaOptions
    from txmq.model.cluster import ClusterView, NodeView
    from txmq.tx.postgres.emit import emit

__all__ = [
    "COMMIT",
    "ROLLBACK",
    "UNKNOWN",
    "AuditEntry",
    "ChangedLetters",
    "Client",
    "Cluster",
    "ClusterView",
    "Consumer",
    "ConsumerOptions",
    "Consumers",
    "DeadLetter",
    "Decision",
    "DeliveredMessage",
    "EnlistedTransaction",
    "ExportedLetters",
    "FileOffsets",
    "Found",
    "FoundMessage",
    "Half",
    "HalfMessage",
    "HalfTransaction",
    "ImportedLetters",
    "Job",
    "Message",
    "NodeView",
    "OffsetStore",
    "Options",
    "PlanStatus",
    "PlannedLetter",
    "Reader",
    "Readers",
    "Receipt",
    "ReceivedBatch",
    "ReceivedMessage",
    "ReplayPlan",
    "RetryPolicy",
    "StoredBatch",
    "Telemetry",
    "Trace",
    "Transaction",
    "TransactionOptions",
    "Trial",
    "TypedTopic",
    "XaOptions",
    "XaResource",
    "XaTransaction",
    "__version__",
    "connect",
    "delay_level",
    "emit",
    "errors",
]

_LAZY = {
    "AuditEntry": "txmq.client.protocol.audit",
    "ChangedLetters": "txmq.client.protocol.letter_changes",
    "Client": "txmq.client.blocking.client",
    "Cluster": "txmq.client.blocking.cluster",
    "ClusterView": "txmq.model.cluster",
    "Consumer": "txmq.client.blocking.consumer.consumer",
    "ConsumerOptions": "txmq.client.protocol.consumer.settings",
    "Consumers": "txmq.client.blocking.consumer.consumer",
    "DeadLetter": "txmq.client.protocol.letters",
    "DeliveredMessage": "txmq.client.protocol.consumer.fetched",
    "EnlistedTransaction": "txmq.client.blocking.transaction.enlisted",
    "ExportedLetters": "txmq.client.protocol.letter_changes",
    "FileOffsets": "txmq.client.protocol.offsets",
    "Found": "txmq.client.protocol.reader",
    "FoundMessage": "txmq.client.protocol.message_search",
    "Half": "txmq.client.protocol.transaction.checks",
    "HalfMessage": "txmq.client.protocol.transaction.half_message",
    "HalfTransaction": "txmq.client.blocking.transaction.half",
    "ImportedLetters": "txmq.client.protocol.letter_changes",
    "Job": "txmq.client.blocking.transaction.jobs",
    "NodeView": "txmq.model.cluster",
    "OffsetStore": "txmq.client.protocol.offsets",
    "Options": "txmq.client.protocol.settings",
    "PlanStatus": "txmq.client.protocol.plans",
    "PlannedLetter": "txmq.client.protocol.plans",
    "Reader": "txmq.client.blocking.reader",
    "Readers": "txmq.client.blocking.reader",
    "ReceivedBatch": "txmq.client.protocol.consumer.fetched",
    "ReplayPlan": "txmq.client.blocking.plans",
    "StoredBatch": "txmq.client.protocol.sender.batches",
    "Telemetry": "txmq.client.protocol.telemetry.tracing",
    "Trace": "txmq.client.protocol.lives",
    "Transaction": "txmq.client.blocking.transaction.transaction",
    "TransactionOptions": "txmq.client.protocol.transaction.options",
    "Trial": "txmq.client.protocol.letter_changes",
    "TypedTopic": "txmq.client.blocking.typed",
    "XaOptions": "txmq.client.protocol.transaction.options",
    "XaResource": "txmq.client.blocking.transaction.xa_resource",
    "XaTransaction": "txmq.client.blocking.transaction.xa",
    "connect": "txmq.client.blocking.connect",
    "emit": "txmq.tx.postgres.emit",
}

# as the documents name them, without an import of their own; some need extras
_PARTS = frozenset(
    ("aio", "asyncpg", "django", "postgres", "psycopg", "selector", "sqlalchemy", "twisted")
)


if not TYPE_CHECKING:  # a checker would take any name

    def __getattr__(name: str) -> object:
        """Import a name of the client, or a part as `txmq.aio`, at its first use."""
        if name in _LAZY:
            value = globals()[name] = getattr(import_module(_LAZY[name]), name)
            return value
        if name in _PARTS:
            return import_module(f"txmq.{name}")
        raise AttributeError(f"module 'txmq' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """Return all names, for `help(txmq)` and for shells that complete them."""
        return sorted({*globals(), *__all__})
