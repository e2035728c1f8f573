"""The names that users rely on, with their arguments.

What is listed may grow, at the end and with a default. Nothing of it is renamed. The
names of the commands are in tests/cli/test_every_command.py.
"""

from __future__ import annotations

import ast
import inspect
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from twisted.internet.testing import MemoryReactorClock

import txmq
import txmq.aio
import txmq.django
import txmq.sqlalchemy
import txmq.twisted
from txmq.client.protocol.audit import AuditOptions
from txmq.client.protocol.consumer.settings import ConsumerOptions
from txmq.client.protocol.letters import LetterOptions
from txmq.client.protocol.message_search import FindOptions, TraceOptions
from txmq.client.protocol.sender.rows import Fields
from txmq.client.protocol.settings import Options
from txmq.client.protocol.transaction.options import TransactionOptions, XaOptions
from txmq.errors import ConfigError

PARTS = (
    *("aio", "asyncpg", "django", "errors", "kombu", "postgres", "psycopg", "selector"),
    *("sqlalchemy", "starlette", "taskiq", "testing", "twisted"),
)
TWISTED = (txmq.twisted.Client, txmq.twisted.Cluster)
AIO = (txmq.aio.Client, txmq.aio.Cluster)
CLIENTS = (txmq.Client, txmq.Cluster, *TWISTED, *AIO)
CONSUMERS = (
    txmq.Consumer,
    txmq.Consumers,
    txmq.twisted.Consumer,
    txmq.twisted.Consumers,
    txmq.aio.Consumer,
    txmq.aio.Consumers,
)
READERS = (
    txmq.Reader,
    txmq.Readers,
    txmq.twisted.Reader,
    txmq.twisted.Readers,
    txmq.aio.Reader,
    txmq.aio.Readers,
)
TRANSACTIONS = (
    txmq.Transaction,
    txmq.HalfTransaction,
    txmq.XaTransaction,
    txmq.EnlistedTransaction,
)
ON_TWISTED = (
    txmq.twisted.Transaction,
    txmq.twisted.HalfTransaction,
    txmq.twisted.XaTransaction,
)
ON_LOOPS = (
    txmq.aio.PostgresTransaction,
    txmq.aio.HalfTransaction,
    txmq.aio.XaTransaction,
    txmq.aio.EnlistedTransaction,
)
OWN = (txmq.Client, txmq.twisted.Client, txmq.aio.Client)  # of one broker
CALLS = {
    (txmq,): {
        "RetryPolicy": "delays retries jitter dead postpone",
        "caused_by": "message",
        "connect": "url service partition_map **Options",
        "delay_level": "level",
        "FileOffsets": "directory",
    },
    (txmq.twisted,): {"connect": "reactor url service partition_map **Options"},
    (txmq.aio,): {"connect": "url service partition_map **Options", "outcome_of": "error"},
    (txmq, txmq.aio): {"emit": "connection topic body key tag headers partition"},
    CLIENTS: {
        "send": "topic body partition **Fields",
        "send_batch": "topic messages partition",
        "send_many": "topic bodies keys tags partition",
        "send_one_way": "topic body partition **Fields",
        "flush": "timeout",
        "consumer": "group topics **ConsumerOptions",
        "read": "topic partition offset wait",
        "reader": "name topics offsets start",
        "transaction": "connection checker **TransactionOptions",
        "xa": "*connections **XaOptions",
        "register_checker": "name checker",
        "find": "topic **FindOptions",
        "letters": "group saved bodies **LetterOptions",
        "plan": "name",
        "audit": "**AuditOptions",
        "trace": "key limit **TraceOptions",
        "describe_cluster": "",
        "recall": "message",
        "call": "name **args",
        "close": "",
    },
    (txmq.Client, txmq.Cluster): {
        "send_async": "topic body partition timeout **Fields",
        "half_async": "topic body checker partition check_after timeout **Fields",
        "xa_resource": "owner",
        "job": "token",
        "enlist": "connection **TransactionOptions",
    },
    (txmq.EnlistedTransaction, txmq.aio.EnlistedTransaction): {
        "pending": "",
        "before_commit": "",
        "commit_with": "commit",
        "after_commit": "",
        "after_rollback": "",
    },
    (txmq.django,): {
        "client": "",
        "enlist": "using **TransactionOptions",
        "send": "topic body using partition **Fields",
    },
    (txmq.sqlalchemy,): {
        "install": "engine",
        "enlist": "session client bind_arguments **TransactionOptions",
    },
    (*CLIENTS, txmq.aio.Client, txmq.aio.Cluster): {"topic": "name model **TopicOptions"},
    (txmq.TypedTopic, txmq.aio.TypedTopic): {
        "send": "value partition **Fields",
        "send_async": "value partition **Fields",
        "send_one_way": "value partition **Fields",
        "send_batch": "values partition",
        "send_many": "values keys tags partition",
        "within": "transaction",
        "message": "value **Fields",
        "value": "message",
        "set_schema": "compatibility force dry_run operator reason",
    },
    OWN: {
        "edit_letter": "letter body headers model operator reason",
        "revert_letter": "letter operator reason",
        "replay_letters": "group letters saved operator reason **LetterOptions",
        "abandon_letters": "group letters saved operator reason **LetterOptions",
        "retry_now": "group messages operator reason **LetterOptions",
        "bury_retries": "group messages operator reason **LetterOptions",
        "skip_retries": "group messages operator reason **LetterOptions",
        "redrive_letters": "group letters to to_group saved abandon again operator reason "
        "**LetterOptions",
        "try_letter": "letter member operator reason timeout",
        "export_letters": "group file saved mark operator reason **LetterOptions",
        "import_letters": "file to operator",
    },
    AIO: {
        "send_async": "topic body partition timeout **Fields",
        "enlist": "connection **TransactionOptions",
    },
    (*TWISTED, *AIO): {
        "half": "topic body checker partition check_after **Fields",
    },
    (*TRANSACTIONS, *ON_TWISTED, *ON_LOOPS): {
        "send": "topic body partition **Fields",
        "send_many": "topic bodies keys tags partition",
        "ack": "delivered",
        "at": "client",
        "savepoint": "",
        "set_rollback_only": "reason",
        "wait_published": "timeout",
    },
    ON_TWISTED: {"run": "function *args **kwargs"},
    (txmq.HalfTransaction, txmq.twisted.HalfTransaction, txmq.aio.HalfTransaction): {"prepare": ""},
    READERS: {
        "receive": "timeout",
        "assign": "partitions",
        "commit": "",
        "close": "",
    },
    CONSUMERS: {
        "stop_on_signals": "",
        "ack": "message wait",
        "ack_batch": "batch wait",
        "ack_many": "messages",
        "nack": "message delay error",
        "nack_batch": "batch delay error",
        "nack_many": "messages delay error",
        "dead_letter": "message reason",
        "postpone": "message delay",
        "extend": "message duration",
        "batches": "",
        "receive": "timeout",
        "pause": "*topics",
        "resume": "*topics",
        "close": "",
    },
    (txmq.Consumer, txmq.Consumers): {
        "run": "handler inbox workers batch batch_wait idle_exit stop",
        "__iter__": "",
    },
    (txmq.RetryPolicy,): {
        "exponential": "initial factor longest retries jitter dead postpone",
    },
}
FIELDS = {
    Fields: "key tag headers deliver_at expire_at delay ttl",
    Options: (
        "instance timeout retries partitioner window window_bytes delivery_timeout log_id "
        "compression"
    ),
    TransactionOptions: "timeout check_after on_unavailable",
    XaOptions: "timeout check_after node",
    AuditOptions: ("operator call about topic start end"),
    FindOptions: "message_id key partition offset start end body header",
    TraceOptions: "message_id body header",
    LetterOptions: (
        "states topic key error_type fingerprint text header min_attempts max_attempts "
        "died_from died_before"
    ),
    ConsumerOptions: (
        "mode tags selector start on_exhausted on_failure retry member static strategy "
        "consume_timeout"
    ),
    txmq.Message: "body key tag headers deliver_at expire_at delay ttl",
    txmq.Receipt: "message_id topic partition offset duplicate",
    txmq.ReceivedMessage: (
        "topic partition offset key tag headers body message_id attempt born_at stored_at"
    ),
}
ONE_BY_ONE = [
    (owner, name, takes)
    for owners, calls in CALLS.items()
    for owner in owners
    for name, takes in calls.items()
]


ANNOTATIONS = {
    txmq: (
        "Client Cluster Consumer Consumers Reader Readers Transaction HalfTransaction "
        "XaTransaction EnlistedTransaction XaResource Job Half HalfMessage DeadLetter "
        "FoundMessage StoredBatch Message "
        "Receipt Found ReceivedMessage DeliveredMessage ReceivedBatch Decision RetryPolicy "
        "OffsetStore FileOffsets "
        "AuditEntry ChangedLetters ExportedLetters ImportedLetters Trace Trial "
        "ClusterView NodeView Options ConsumerOptions TransactionOptions XaOptions"
    ),
    txmq.aio: (
        "Client Cluster Consumer Consumers Reader Readers Transaction PostgresTransaction "
        "HalfTransaction XaTransaction EnlistedTransaction Found Half HalfMessage DeadLetter "
        "FoundMessage StoredBatch DeliveredMessage ReceivedBatch ClusterView NodeView"
    ),
    txmq.twisted: (
        "Client Cluster Consumer Consumers Reader Readers Transaction HalfTransaction "
        "XaTransaction Found Half HalfMessage DeadLetter FoundMessage StoredBatch "
        "DeliveredMessage ReceivedBatch AuditEntry ChangedLetters ExportedLetters "
        "ImportedLetters Trace Trial ClusterView NodeView"
    ),
}


def parameters_of(call: Callable[..., Any]) -> list[str]:
    """The names of the parameters; for a TypedDict of keyword arguments, its name."""
    found = []
    for parameter in inspect.signature(call).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD and str(parameter.annotation).startswith(
            "Unpack["
        ):
            found.append(f"**{parameter.annotation.removeprefix('Unpack[').removesuffix(']')}")
        else:
            found.append(str(parameter).split(":")[0])
    return [name for name in found if name != "self"]


@pytest.mark.parametrize(("owner", "name", "takes"), ONE_BY_ONE)
def test_a_call_takes_what_is_promised(owner: Any, name: str, takes: str) -> None:
    assert set(takes.split()) <= set(parameters_of(getattr(owner, name)))


@pytest.mark.parametrize("values", FIELDS)
def test_values_and_options_have_the_fields_that_are_promised(values: Any) -> None:
    assert set(FIELDS[values].split()) <= set(inspect.get_annotations(values))


@pytest.mark.parametrize("module", ANNOTATIONS)
def test_what_users_annotate_with_is_exported(module: Any) -> None:
    assert set(ANNOTATIONS[module].split()) <= set(module.__all__)
    assert all(isinstance(getattr(module, name), type) for name in ANNOTATIONS[module].split())


def test_a_name_that_is_imported_late_comes_from_where_checkers_see_it() -> None:
    tree = ast.parse(inspect.getsource(txmq))
    [block] = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    parts = {name for name, module in seen.items() if module == "txmq"}
    assert parts == txmq._PARTS
    assert {name: seen[name] for name in seen.keys() - parts} == txmq._LAZY


def test_txmq_does_not_load_the_client_until_it_is_used() -> None:
    code = "import sys, txmq; assert not {m for m in sys.modules if m.startswith('txmq.client')}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_client_loads_nothing_of_a_broker_or_a_terminal() -> None:
    heavy = "{'asyncio', 'lmdb', 'prometheus_client', 'rich', 'structlog', 'twisted', 'typer'}"
    code = f"import sys; from txmq import connect; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_not_the_users_begins_with_an_underscore() -> None:
    url, reactor = "txmq://127.0.0.1:7650", MemoryReactorClock()
    own = (txmq.connect(url), txmq.twisted.connect(reactor, url), txmq.aio.connect(url))
    clusters = (
        txmq.connect([url]),
        txmq.twisted.connect(reactor, [url]),
        txmq.aio.connect([url]),
    )
    assert {name for client in own for name in vars(client) if name[0] != "_"} == set()
    assert {name for one in clusters for name in vars(one) if name[0] != "_"} == {"clients"}
    promised = {name for owner, name, _takes in ONE_BY_ONE if owner in CLIENTS}
    for kind in CLIENTS:
        others = {name for name in dir(kind) if name[0] != "_"} - promised
        assert others <= {"clients", "log_id", "service", "spool", "stats"}


def test_answers_of_checkers_and_errors_are_there() -> None:
    assert {txmq.COMMIT, txmq.ROLLBACK, txmq.UNKNOWN} == set(txmq.Decision)
    assert (txmq.errors.TxmqError.retriable, txmq.errors.TxmqError.outcome) == (False, "not done")
    assert all(hasattr(txmq, name) for name in txmq.__all__)


def test_what_is_not_there_yet_is_refused_not_ignored() -> None:
    with pytest.raises(ConfigError, match="spool"):
        txmq.connect(["txmq://127.0.0.1:7650"], spool="directory")


@pytest.mark.parametrize(
    "part", ["aio", "asyncpg", "django", "postgres", "psycopg", "sqlalchemy", "twisted"]
)
def test_a_part_that_documents_name_needs_no_import_of_its_own(part: str) -> None:
    assert txmq.__getattr__(part) is sys.modules[f"txmq.{part}"]


@pytest.mark.parametrize("part", PARTS)
def test_the_help_of_a_part_shows_how_it_is_used(part: str) -> None:
    shown = inspect.getdoc(import_module(f"txmq.{part}"))
    assert shown is not None
    assert re.search(r"^    \S", shown, re.MULTILINE), "an example, indented"


def test_help_lists_what_there_is() -> None:
    shown = pydoc.render_doc(txmq, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    names = {*re.findall(r"^    (?:class )?(\w+)", shown, re.MULTILINE)}
    assert set(txmq.__all__) - {"__version__"} <= names
    assert set(txmq.__all__) <= set(dir(txmq))
