"""Control calls: each is documented in docs/FORMATS.md, wrong arguments are named."""

from __future__ import annotations

import importlib.util
import re
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


def test_each_call_has_a_row() -> None:
    section = FORMATS.partition("\n### 2.3 ")[2].partition("\n## 3. ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \|", section, re.MULTILINE)
    assert sorted(name for row in rows for name in re.findall("`([a-z_.]+)`", row)) == sorted(CALLS)


def test_the_script_prints_the_arguments_of_a_call(script: ModuleType) -> None:
    assert [name for name in CALLS if not script.told(name).startswith(f"{name}: ")] == []
    told = script.told("consumer.nack").partition("\n")[0]
    assert told.startswith("consumer.nack: group, member, generation, topic, partition, offset, ")
    assert "error? ({type?, text?, fingerprint?, bases?})" in told
    assert 'mode = "concurrent" ("concurrent", "ordered", "broadcast")' in script.told(
        "consumer.join"
    )


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
