"""Hostile input where letters are looked at, mended and replayed; the numbers are those
of docs/FAULTS.md, section 4.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.broker.calls.test_letter_edits import EditOffice
from tests.broker.calls.test_letter_redrives import GivingOffice
from txmq.cli.commands.audit import text_line
from txmq.cli.life_page import page
from txmq.client.protocol.calls import calls_by
from txmq.client.protocol.lives import Trace, trace_messages
from txmq.core.consumers.failures import MAX_TEXT_BYTES
from txmq.errors import RemoteProtocolError
from txmq.faces import run
from txmq.model import limits

FORMULA = "=cmd|' /C calc'!A0"
MARKUP = "</title></table><script>alert(1)</script><img src=x onerror=alert(1)>"
FORGED = {
    "attempt": 0, "replays": 0, "number": 1, "plan": 0, "given_by": "g", "message_id": "0" * 32,
    "offset_of_copy": 1, "deaths": 0, "dead_at": 1, "__class__": "x",
}  # fmt: skip


class Tags(HTMLParser):
    """The tags of a page, and its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _value in attrs)))


def trace(office: EditOffice, **wanted: Any) -> Trace:
    def call(name: str, **args: Any) -> dict[str, Any]:
        given = {key: value for key, value in args.items() if value is not None}
        reply: dict[str, Any] = office.call(name, **given)
        assert isinstance(reply, dict), reply
        return reply

    return run(
        trace_messages(calls_by(call), {"key": wanted.get("key"), "id": wanted.get("message")}, 20)
    )


def test_hostile_48_no_call_takes_the_history_of_a_letter_from_its_caller() -> None:
    office, place = EditOffice(1), {"topic": "t", "partition": 0, "offset": 0}
    letters: dict[str, Any] = {"group": "g", "letters": [["t", 0, 0]]}
    by = {"operator": "eve", "reason": "r"}
    least: dict[str, dict[str, Any]] = {
        "dlq.edit": {"group": "g", **place, "edits": 0, "body": "eA==", **by},
        "dlq.try": {"group": "g", **place, "member": "a", **by},
        "dlq.redrive": letters | by | {"to": "t"},
        "dlq.replay": letters | by,
        "plan.add": {"name": "p", "letters": letters["letters"]},
    }
    for name, args in least.items():
        for field, value in FORGED.items():
            with pytest.raises(RemoteProtocolError):
                office.call(name, **args | {field: value})
    assert (office.show(0)["number"], office.show(0)["edits"]) == (1, 0)


@pytest.mark.parametrize("text", [FORMULA, MARKUP])
def test_hostile_50_and_75_no_text_of_a_message_or_an_operator_becomes_markup(text: str) -> None:
    office = EditOffice(1)
    office.edit(0, body=text.encode(), headers={text: text}, reason=text)
    office.replay(0)
    office.fetch()
    office.nack(0, {"type": text, "text": text, "fingerprint": text})
    traced = trace(office, message=office.show(0)["message_id"])
    assert text in json.dumps([event.text for event in traced.events])[1:-1].replace('\\"', '"')
    shown = page(text, text, traced.events)
    tags = Tags()
    tags.feed(shown)
    names = {tag for tag, _attributes in tags.found}
    assert not names & {"script", "img", "iframe", "a", "form", "object"}
    assert not [name for _tag, attributes in tags.found for name in attributes if name[:2] == "on"]
    assert "default-src 'none'" in shown


def test_hostile_67_a_huge_reason_is_cut_or_refused() -> None:
    office = EditOffice(1)
    with pytest.raises(RemoteProtocolError):
        office.edit(0, body=b"x", reason="r" * 4_097)
    office.replay(0)
    office.fetch()
    office.nack(0, {"type": "E" * 10_000, "text": "€" * (1 << 20), "fingerprint": "f" * 10_000})
    shown = office.show(0)
    assert len(shown["error_text"].encode()) <= MAX_TEXT_BYTES
    assert max(len(shown["error_type"]), len(shown["fingerprint"])) <= 256
    assert sum(len(one["error_text"]) for one in shown["history"]) < limits.MESSAGE


def test_hostile_68_letters_that_are_given_in_a_circle_are_not_multiplied() -> None:
    office = GivingOffice()
    assert len(office.give(0)["done"]) == 1
    office.fetch("h", "b")
    office.nack_of_other(0)
    back = {"group": "h", "to_group": "g", "operator": "eve", "reason": "r"}
    for again in (False, True):
        reply = office.call("dlq.redrive", **back, letters=[["t", 0, 0]], again=again)
        assert reply["done"] == ()
        assert "has it as a failed message" in reply["refused"][0][3]
    assert office.give(0, again=True)["done"] == ()
    rows = [office.call("dlq.list", group=name, select={})["letters"] for name in ("g", "h")]
    assert [len(found) for found in rows] == [4, 1]
    events = trace(office, message=office.show(0)["message_id"]).events
    assert "dead, given by group g" in {one.text for one in events if one.what == "state"}


def test_hostile_78_a_line_of_the_audit_topic_is_one_line() -> None:
    office = EditOffice(1)
    forged = "ok\n2026-01-01 00:00:00 root dlq.abandon\x1b[2K\r\u202e"
    office.edit(0, body=b"x", reason=forged)
    [entry] = office.call("audit.list")["entries"]
    assert entry["reason"] == forged
    line = text_line(entry)
    assert line.isprintable(), line
