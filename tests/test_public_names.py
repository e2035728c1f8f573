"""The names that users rely on, with their arguments; those of the commands are in
tests/cli/test_every_command.py.

What is listed may grow, at the end and with a default. Nothing of it is renamed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import txmq
import txmq.twisted
from txmq.client.blocking.consumer.consumer import Consumer
from txmq.client.blocking.sender.producer import Fields
from txmq.client.blocking.transaction.half import HalfTransaction
from txmq.client.blocking.transaction.options import TransactionOptions, XaOptions
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.client.blocking.transaction.xa import XaTransaction
from txmq.client.protocol.consumer.settings import Options as ConsumerOptions
from txmq.client.protocol.settings import Options
from txmq.client.twisted.client import Client as TwistedClient
from txmq.client.twisted.consumer import Consumer as TwistedConsumer
from txmq.errors import ConfigError, LocalProtocolError

CLIENTS = (txmq.Client, txmq.Cluster, TwistedClient)
CONSUMERS = (Consumer, TwistedConsumer)
TRANSACTIONS = (Transaction, HalfTransaction, XaTransaction)
CALLS = {
    (txmq,): {
        "connect": "url service partition_map **Options",
        "emit": "connection topic body key tag headers partition",
        "delay_level": "level",
        "FileOffsets": "directory",
    },
    (txmq.twisted,): {"connect": "reactor url service partition_map **Options"},
    CLIENTS: {
        "send": "topic body partition **Fields",
        "send_batch": "topic messages partition",
        "send_many": "topic bodies keys tags partition",
        "send_one_way": "topic body partition **Fields",
        "consumer": "group topics **ConsumerOptions",
        "close": "",
    },
    (txmq.Client, TwistedClient): {
        "transaction": "connection checker **TransactionOptions",
        "xa": "*connections **XaOptions",
        "register_checker": "name checker",
        "reader": "name topics offsets start",
        "find": "topic message_id key partition offset start end",
        "recall": "message",
        "call": "name **args",
    },
    (txmq.Client,): {
        "send_async": "topic body partition timeout **Fields",
        "half_async": "topic body checker partition check_after timeout **Fields",
        "flush": "timeout",
        "xa_resource": "owner",
        "job": "token",
    },
    (TwistedClient,): {"half": "topic body checker partition check_after **Fields"},
    TRANSACTIONS: {
        "send": "topic body partition **Fields",
        "send_many": "topic bodies keys tags partition",
        "ack": "delivered",
        "at": "client",
        "savepoint": "",
        "set_rollback_only": "reason",
        "wait_published": "timeout",
    },
    CONSUMERS: {
        "ack": "message wait",
        "ack_batch": "batch wait",
        "ack_many": "messages",
        "nack": "message delay error",
        "nack_batch": "batch delay error",
        "nack_many": "messages delay error",
        "dead_letter": "message reason",
        "postpone": "message delay",
        "extend": "message seconds",
        "batches": "",
        "receive": "timeout",
        "pause": "*topics",
        "resume": "*topics",
        "close": "",
    },
    (Consumer,): {"run": "handler inbox threads batch batch_wait idle_exit stop", "__iter__": ""},
    (txmq.RetryPolicy,): {
        "table": "*seconds attempts jitter dead postpone",
        "exponential": "initial_s factor max_s attempts jitter dead postpone",
    },
}
FIELDS = {
    Fields: "key tag headers deliver_at expire_at delay ttl",
    Options: "instance timeout retries partitioner window window_bytes delivery_timeout log_id compression",
    TransactionOptions: "timeout check_after on_unavailable",
    XaOptions: "timeout check_after node",
    ConsumerOptions: "mode tags selector start on_exhausted on_failure retry member static strategy consume_timeout_s",
    txmq.Message: "body key tag headers deliver_at expire_at delay ttl",
    txmq.Receipt: "message_id topic partition offset duplicate",
    txmq.ReceivedMessage: "topic partition offset key tag headers body message_id attempt born_at stored_at",
}
ONE_BY_ONE = [
    (owner, name, takes)
    for owners, calls in CALLS.items()
    for owner in owners
    for name, takes in calls.items()
]


def taken(call: Callable[..., Any]) -> list[str]:
    """The names of what it takes; of keyword arguments that stand in a TypedDict, that
    one's name.
    """
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
    assert set(takes.split()) <= set(taken(getattr(owner, name)))


@pytest.mark.parametrize("values", FIELDS)
def test_values_and_options_have_the_fields_that_are_promised(values: Any) -> None:
    assert set(FIELDS[values].split()) <= set(inspect.get_annotations(values))


def test_answers_of_checkers_and_errors_are_there() -> None:
    assert {txmq.COMMIT, txmq.ROLLBACK, txmq.UNKNOWN} == set(txmq.Decision)
    assert (txmq.errors.TxmqError.retriable, txmq.errors.TxmqError.outcome) == (False, "not done")
    assert all(hasattr(txmq, name) for name in txmq.__all__)


def test_what_is_not_there_yet_is_refused_not_ignored() -> None:
    with pytest.raises(ConfigError, match="spool"):
        txmq.connect("txmq://127.0.0.1:7650", spool="directory")  # type: ignore[call-overload]
    with (
        txmq.connect("txmq://127.0.0.1:7650") as client,
        pytest.raises(LocalProtocolError, match="on_failure"),
    ):
        client.consumer("billing", ["orders"], on_failure="local")  # type: ignore[arg-type]
