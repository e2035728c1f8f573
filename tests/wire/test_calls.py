"""Control calls: each is documented in docs/FORMATS.md, wrong arguments are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from txmq.errors import RemoteProtocolError
from txmq.wire.calls.encoding import encode_call
from txmq.wire.calls.registry import CALLS, decode_call

FORMATS = (Path(__file__).parents[2] / "docs" / "FORMATS.md").read_text("utf-8")
ROWS = [
    line.split("|")[1:3] for line in FORMATS.splitlines() if re.match(r"\| `[a-z]+\.[a-z]+`", line)
]
OF_EACH_MEMBER = {"instance"}  # told once, of all calls of a member
TOPIC = set(CALLS["topic.alter"].model_fields)


def test_each_call_has_a_row() -> None:
    told = {name for names, _args in ROWS for name in re.findall(r"`([a-z]+\.[a-z]+)`", names)}
    assert told == set(CALLS)


def test_each_argument_is_documented() -> None:
    left_out = {
        (name, field)
        for names, args in ROWS
        if len(found := re.findall(r"`([a-z]+\.[a-z]+)`", names)) == 1
        for name in found
        for field in set(CALLS[name].model_fields)
        - OF_EACH_MEMBER
        - (TOPIC if name == "topic.create" else set())
        if not re.search(rf"\b{field}\b", args)
    }
    assert left_out == set()


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("topic.show", {}, "topic.show: name: is missing"),
        ("topic.show", {"name": "a", "nme": 1}, "topic.show: nme: there is no such argument"),
        (
            "topic.show",
            {"name": "a b"},
            "topic.show: name: invalid name: use 1 to 127 letters, digits and . _ -, not a",
        ),
        ("message.show", {"id": "x"}, "message.show: id: invalid message id 'x'"),
        ("group.show", {"group": "a@b@c"}, "group.show: group: invalid name of a consumer group"),
        ("tx.list", {"limit": 0}, "tx.list: limit: Input should be greater than or equal to 1"),
    ],
)
def test_a_wrong_argument_is_named_in_plain_words(
    name: str, args: dict[str, object], told: str
) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_call(encode_call(name, args))
    assert caught.value.message.startswith(told)
    assert "FORMATS" in caught.value.hint
