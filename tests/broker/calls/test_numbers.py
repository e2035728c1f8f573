"""Numbers at the ends of their types, in every argument of every call: each gets a
typed answer, and the session goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

from tests.broker.support import BrokerInMemory, send_payload
from txmq.core.topics.topics import CreateTopic
from txmq.model.message import Message
from txmq.wire.calls import registry
from txmq.wire.calls.arguments import Args
from txmq.wire.calls.encoding import encode_call
from txmq.wire.calls.registry import CALLS, decode_call
from txmq.wire.data_requests import Opcode
from txmq.wire.frames import encode_frame
from txmq.wire.json import parse
from txmq.wire.status import to_error

ENDS = [
    sign * (2**bits + more)
    for bits in (7, 15, 16, 31, 32, 52, 53, 62, 63, 64, 127)
    for more in (-1, 0, 1)
    for sign in (1, -1)
] + [0, -1, 10**400]
TEXTS = {
    "json_schema": "{}",
    "topic": "t",
    "name": "t",
    "group": "g",
    "member": "m",
    "instance": "i",
    "key": "k",
    "cursor": "0" * 96,
    "digest": "ab" * 32,
    "what": "read",
    "resource": "topic:t",
    "addresses": "broker-2:7650",
}
MESSAGE_ID = "00" * 16 + "-0"


def sample(schema: dict[str, Any], defs: dict[str, Any], name: str) -> Any:  # JSON
    """Return a value that a JSON schema accepts, where possible one of this broker."""
    if "$ref" in schema:
        return sample(defs[schema["$ref"].rpartition("/")[2]], defs, name)
    if "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if kind.get("type") != "null"]
        numbers = [kind for kind in kinds if kind.get("type") in ("integer", "number")]
        return sample((numbers or kinds)[0], defs, name)
    match schema.get("type"):
        case "object":
            fields = schema.get("properties", {})
            value: object = {key: sample(field, defs, key) for key, field in fields.items()}
        case "array":
            value = sample_list(schema, defs, name)
        case "integer" | "number":
            value = max(schema.get("minimum", 0), 5_000 if name.endswith("_ms") else 1)
        case "boolean":
            value = False
        case _:
            texts = schema.get(
                "enum", [TEXTS.get(name) or TEXTS.get(name.removesuffix("s"), "ab" * 16)]
            )
            value = schema.get("const", texts[0])
    return value


def sample_list(schema: dict[str, Any], defs: dict[str, Any], name: str) -> object:
    if "prefixItems" not in schema:
        return [sample(schema.get("items", {"type": "string"}), defs, name)]
    if schema["prefixItems"][0].get("format") == "binary":
        return MESSAGE_ID
    return [sample(field, defs, "topic") for field in schema["prefixItems"]]  # of a place


def numbers_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each number in a JSON value."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from numbers_in(inner, (*path, key))
    elif type(value) in (int, float):
        yield path


def with_number(args: Any, path: tuple[Any, ...], number: int) -> Any:
    changed = deepcopy(args)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = number
    return changed


def numbers_of(args: dict[str, Any]) -> Iterator[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Yield arguments and the path of each number in them. Dead letters are either
    named or selected.
    """
    ways: tuple[set[str], ...] = (set(),)
    if "saved" in args:
        ways = ({"saved", "select", "cursor"}, {"saved", "letters", "after"})
    for left_out in ways:
        some = {key: value for key, value in args.items() if key not in left_out}
        for path in numbers_in(some):
            yield some, path


def busy(broker: BrokerInMemory) -> None:
    """Make a topic with a message, a group with a member and a dead letter, and a
    transaction.
    """
    broker.do(CreateTopic("t", 2))
    client = broker.connect()
    client.ask(Opcode.SEND, send_payload())
    joined: Any = client.call("consumer.join", group="g", topics=["t"], member="m", instance="i")
    assert joined["member"] == "m"
    broker.half(1, Message(b"x", "k"))


def failure_of(name: str) -> str:
    """Return what goes wrong with a number in some argument of a call, "" = nothing."""
    broker = BrokerInMemory()
    busy(broker)
    schema = CALLS[name].model_json_schema()
    args = sample(schema, schema.get("$defs", {}), name)
    assert decode_call(encode_call(name, args))[0] == name, "else its numbers prove nothing"
    client, faults = broker.connect(), broker.engine.faults
    for some, path in numbers_of(args):
        for number in ENDS:
            call = encode_call(name, with_number(some, path, number))
            client.send(encode_frame(Opcode.CALL, 7, call))
            broker.pass_time(0.1)
            if faults.counts or broker.engine.failed is not None or client.closed:
                return f"{path} = {number}: {faults.last or broker.engine.failed}"
            for reply in client.replies():
                assert not reply.status or to_error(reply.status, reply.payload).message
    return ""


@pytest.mark.parametrize("name", CALLS)
def test_a_number_at_the_end_of_its_type_gets_a_typed_answer(name: str) -> None:
    assert failure_of(name) == ""


@pytest.mark.parametrize("name", ["dlq.list", "tx.pending"])
def test_a_call_whose_numbers_are_not_checked_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def unchecked(payload: bytes) -> tuple[str, Args]:
        args: Any = parse(payload)
        kind = CALLS[args["call"]]
        return args["call"], kind.model_construct(**args["args"])

    monkeypatch.setattr(registry, "decode_call", unchecked)
    assert failure_of(name) != ""
