"""Control calls: each is documented in docs/FORMATS.md, wrong arguments are named."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from txmq.errors import RemoteProtocolError
from txmq.wire.calls.encoding import encode_call
from txmq.wire.calls.registry import CALLS, decode_call

ROOT = Path(__file__).parents[2]
FORMATS = (ROOT / "docs" / "FORMATS.md").read_text("utf-8")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("calls", ROOT / "scripts" / "calls.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_call_has_a_row(script: ModuleType) -> None:
    assert sorted(script.names(FORMATS)) == sorted([*CALLS, *script.OBJECTS])


def test_the_arguments_are_those_of_the_registry(script: ModuleType) -> None:
    assert script.rewritten(FORMATS) == FORMATS, "run python scripts/calls.py"


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("topic.show", {}, "topic.show: name: is missing"),
        (
            "topic.show",
            {"nme": "a"},
            "topic.show: nme: there is no such argument: did you mean name?",
        ),
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
