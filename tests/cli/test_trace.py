"""`txmq trace`, `txmq audit` and what shows their parts, against a broker in memory."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.broker.calls.test_letter_calls import Office
from tests.cli.support import run
from tests.tx.postgres.support import rows
from txmq.batch import encode, verify
from txmq.broker.calls import audit as audit_calls
from txmq.broker.search import everywhere
from txmq.client.protocol.life_events import events_of, sequence_of
from txmq.core.audit import Audited, AuditEntry
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions.xa import DecideByHand
from txmq.errors import RequestRejected
from txmq.model.message import Decision, Message, message_id
from txmq.store.log.segment import segment_path

HOSTILE = "\"'><img src=x onerror=1></script>\x1b[2J\u202e\r\nforged\x00 $title ${rows}"
BY = {"operator": "kim", "reason": HOSTILE}


TAGS = {"html", "head", "meta", "title", "style", "body", "h1", "p", "svg", "text", "line"}
TAGS |= {"circle", "table", "thead", "tr", "th", "tbody", "td"}


class InProcessClient:
    """A client whose broker is in this process."""

    def __init__(self, office: Office) -> None:
        self.office = office
        self.calls: list[str] = []

    def call(self, name: str, /, **args: object) -> dict[str, Any]:
        self.calls.append(name)
        given = {key: value for key, value in args.items() if value is not None}
        reply = self.office.broker.ask(name, **given)
        if isinstance(reply, RequestRejected):
            raise reply
        assert isinstance(reply, dict)
        return reply

    def send(self, *_args: object, **_options: object) -> Any:
        raise AssertionError("no command here sends")

    def close(self) -> None:
        pass


@pytest.fixture
def office(monkeypatch: pytest.MonkeyPatch) -> Office:
    """A broker with ten dead letters; message 3 has the key k3 and was replayed. A
    transaction with the key k3 is undecided, and one was decided by hand.
    """
    office = Office(10)
    client = InProcessClient(office)
    monkeypatch.setattr("txmq.cli.command.connect", lambda _url: client)
    office.client.call("dlq.replay", group="g", letters=[["t", 0, 3]], **BY)
    broker = office.broker
    broker.do(CreateTopic("elsewhere", 2))
    data = encode([Message(b"x", "k3")], producer_id=b"q" * 16, epoch=0, sequence=0, born_at=1)
    broker.do(StoreBatch("elsewhere", 0, 1, data, verify(data)))
    broker.half(1, Message(b"undecided", "k3"))
    token = bytes.fromhex(broker.half(2, Message(b"decided", "other")))
    entry = AuditEntry("kim", "tx.decide", f"tx:{token.hex()}", HOSTILE, {})
    log_id = broker.log.log_id.bytes
    broker.do(Audited(DecideByHand(token, Decision.ROLLBACK, "kim", HOSTILE, log_id), entry))
    return office


def output(*arguments: str, status: int = 0) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def test_a_key_is_followed_through_all_topics(office: Office) -> None:
    del office
    told = output("trace", "--key", "k3")
    places = [(m["topic"], m["partition"], m["offset"], m["state"]) for m in told["messages"]]
    assert sorted(places, key=str) == [
        ("elsewhere", 1, 0, "published"),
        ("t", 0, 3, "published"),
        ("t", 0, None, "undecided"),
    ]
    assert told["more"] is False
    [replayed] = [one for one in told["messages"] if one["offset"] == 3]
    [group] = replayed["life"]["groups"]
    assert (group["group"], group["failures"], group["replays"]) == ("g", 1, 1)
    assert [attempt["error_text"] for attempt in group["history"]] == ["no 3 here"]
    [entry] = replayed["audit"]
    assert (entry["call"], entry["operator"], entry["reason"]) == ("dlq.replay", "kim", HOSTILE)
    words = [event["what"] for event in told["events"] if event["message"] == "t/0/3"]
    assert words == [
        "sent", "published", "delivered", "failed", "dead letter", "dlq.replay", "state"
    ]  # fmt: skip
    times = [event["at"] for event in told["events"] if event["at"] is not None]
    assert times == sorted(times)


def test_a_message_is_found_by_its_id_in_any_topic(office: Office) -> None:
    del office
    plain = message_id(b"q" * 16, 0)
    [message] = output("trace", "--id", plain)["messages"]
    assert (message["topic"], message["offset"]) == ("elsewhere", 0)
    assert output("message", "show", plain)["topic"] == "elsewhere"
    nobody = message_id(b"z" * 16, 0)
    assert output("trace", "--id", nobody, status=1)["messages"] == []
    assert output("message", "show", nobody, status=1) == {"message": None}


def test_a_message_of_a_transaction_has_its_half_and_its_decision(office: Office) -> None:
    [waiting] = [
        [(event["what"], event["who"]) for event in told["events"]]
        for told in [output("trace", "--key", "k3")]
    ]
    assert ("half stored", "shop") in waiting
    assert ("undecided", "") in waiting
    broker = office.broker
    token = bytes.fromhex(broker.half(3, Message(b"decided", "mine")))
    log_id = broker.log.log_id.bytes
    broker.do(DecideByHand(token, Decision.COMMIT, "kim", "it is in the books", log_id))
    told = output("trace", "--id", message_id(token, 0))
    events = [(event["what"], event["who"]) for event in told["events"]]
    assert ("half stored", "shop") in events
    [decided] = [event for event in told["events"] if "in the books" in event["text"]]
    assert (decided["what"], "kim" in decided["who"]) == ("committed", True)
    assert told["messages"][0]["offset"] == 10


def test_a_search_in_small_steps_finds_the_same(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    del office
    whole = output("trace", "--key", "k3")["messages"]
    for name in ("STEPS", "STEP_BATCHES", "PARTITIONS_PER_STEP"):
        monkeypatch.setattr(everywhere, name, 1)
    assert output("trace", "--key", "k3")["messages"] == whole


def test_damage_is_named_and_hides_only_itself(office: Office) -> None:
    state, topic = office.broker.engine.state, office.broker.engine.state.topics["t"]
    rows_of_topic: Any = state.entries.range(topic.topic_id.to_bytes(4, "big"))
    position = list(rows_of_topic)[2][1][0]
    damage(office, position)
    page = office.broker.ask("message.search", key="k3")
    assert [message["offset"] for message in page["messages"]] == [None, 3, 0]
    assert [list(place) for place in page["damaged"]] == [["t", 0, 2]]


def damage(office: Office, position: int) -> None:
    """Change a bit in the body of the batch at a position."""
    file = office.broker.fs.open(segment_path("/data", 0), write=True)
    (byte,) = file.pread(1, position + 84)
    file.pwrite([bytes([byte ^ 16])], position + 84)


def test_a_letter_outlives_its_topics_batch(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    office.broker.engine.state.topics["t"].start_offsets[0] = 10
    monkeypatch.setattr(everywhere, "PARTITIONS_PER_STEP", 1)
    found = [(one["offset"], one["state"]) for one in output("trace", "--key", "k4")["messages"]]
    assert (4, "removed by retention") in found


def test_new_entries_are_printed_as_they_come(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(range(3))

    def wait(_seconds: float) -> None:
        if next(looks, None) is None:
            raise KeyboardInterrupt
        office.client.call("group.pause", group="g", operator="ada", reason="late")
        office.client.call("group.resume", group="g", operator="ada")

    # Not the module's own sleep: other threads of the process sleep, too.
    monkeypatch.setattr("txmq.cli.commands.audit.time", SimpleNamespace(sleep=wait))
    lines = run("audit", "--follow", "--limit", "1", "--json").stdout.splitlines()
    assert [json.loads(line)["call"] for line in lines] == [
        "tx.decide",
        *["group.pause", "group.resume"] * 3,
    ]
    assert "ada group.pause group:g late" in run("audit", "-f").stdout


def test_a_limit_says_that_there_is_more(office: Office) -> None:
    del office
    told = output("trace", "--key", "k3", "--limit", "2")
    assert (len(told["messages"]), told["more"]) == (2, True)


def test_the_inbox_tells_what_has_an_effect(office: Office, database: str) -> None:
    group = output("trace", "--key", "k3")["messages"][0]["life"]
    log_id, topic_id = office.broker.log.log_id, group["topic_id"]
    rows(
        database,
        "INSERT INTO txmq_inbox (grp, log_id, topic_id, partition, epoch, applied)"
        " VALUES ('g', %s, %s, 0, 1, '{[2,4)}')",
        str(log_id),
        topic_id,
    )
    told = output("trace", "--key", "k3", "--dsn", database)
    applied = [message.get("inbox") for message in told["messages"]]
    assert applied[0] == [{"group": "g", "epoch": 1, "applied": True}]
    assert sorted(applied[1:], key=str) == [None, []]
    assert ("inbox", "g", "effect of epoch 1: applied") in [
        (event["what"], event["who"], event["text"]) for event in told["events"]
    ]


class Page(HTMLParser):
    """The tags of a page, and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [name for name, _value in attributes if name in ("src", "href")]


def test_the_page_is_one_file_and_no_text_becomes_markup(office: Office, tmp_path: Path) -> None:
    for at, text in enumerate((HOSTILE, "\x00", "]]>")):
        office.send(Message(b"x", text))
        file = tmp_path / f"{at}.html"
        run("trace", "--key", text, "--html", str(file))
        seen = file.read_text(encoding="utf-8")
        page = Page(seen)
        assert page.tags <= TAGS
        assert not page.references
        assert "default-src 'none'" in seen
        assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]|<script|<img", seen)


def test_on_a_terminal_no_text_is_a_control_sequence(office: Office) -> None:
    office.send(Message(b"x", HOSTILE))
    for arguments in (["trace", "--key", HOSTILE], ["audit"], ["dlq", "show", "g", "t/0/3"]):
        shown = run(*arguments).stdout
        assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e]", shown)


@pytest.mark.parametrize("arguments", [[], ["--key", "k", "--id", message_id(b"z" * 16, 0)]])
def test_a_trace_needs_a_key_or_an_id(office: Office, arguments: list[str]) -> None:
    del office
    assert run("trace", *arguments).exit_code == 2


def test_what_operators_did_is_listed_and_chosen(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_calls, "MAX_SCANNED", 32)
    for number in range(40):
        office.client.call("group.pause", group="g", operator="ada", reason=f"{number}")
        office.client.call("group.resume", group="g", operator="bob", reason="")
    listed = output("audit", "--limit", "5")["entries"]
    assert [(one["operator"], one["call"]) for one in listed][-2:] == [
        ("ada", "group.pause"),
        ("bob", "group.resume"),
    ]
    assert [one["offset"] for one in listed] == sorted(one["offset"] for one in listed)
    assert len(output("audit", "--operator", "ada")["entries"]) == 40
    assert [one["call"] for one in output("audit", "--call", "dlq.")["entries"]] == ["dlq.replay"]
    [decided] = output("audit", "--call", "tx.decide")["entries"]
    assert decided["result"] == {"state": "ROLLED_BACK", "repeated": False}
    assert output("audit", "--about", decided["about"])["entries"] == [decided]
    assert len(output("audit", "--group", "g")["entries"]) == 81
    assert [one["call"] for one in output("audit", "--topic", "t")["entries"]] == ["dlq.replay"]
    assert output("audit", "--operator", "nobody")["entries"] == []
    first = output("audit", "--to", "2023-11-14T22:13:20Z")["entries"]
    assert first == []


def test_a_letter_and_a_transaction_show_what_operators_did(office: Office) -> None:
    office.client.call("dlq.abandon", group="g", letters=[["t", 0, 5]], **BY)
    shown = output("dlq", "show", "g", "t/0/5")
    assert [entry["call"] for entry in shown["operations"]] == ["dlq.abandon"]
    assert output("dlq", "show", "g", "t/0/6")["operations"] == []
    token = output("audit", "--call", "tx.decide")["entries"][0]["about"].removeprefix("tx:")
    assert [one["operator"] for one in output("tx", "show", token)["operations"]] == ["kim"]


def test_damage_in_the_audit_topic_hides_only_itself(office: Office) -> None:
    topic_id = office.broker.engine.state.topics["_txmq.audit"].topic_id
    rows: Any = office.broker.engine.state.entries.range(topic_id.to_bytes(4, "big"))
    position = next(iter(rows))[1][0]
    damage(office, position)
    entries = office.broker.ask("audit.list")["entries"]
    assert ["damaged" in entry for entry in entries] == [True, False]


def test_the_audit_takes_how_long_ago(office: Office) -> None:
    assert office.client is not None
    assert len(output("audit", "--from", "2d")["entries"]) <= len(output("audit")["entries"])
    assert run("audit", "--from", "yesterday").exit_code == 2


def test_a_message_that_was_processed_is_not_behind_the_fence_of_its_key() -> None:
    fence = {"state": "dead", "since": 5, "partition": 0, "offset": 7, "parked": 1}
    group = {"group": "g", "state": "over", "fence": fence, "history": []}
    fenced = [
        (event.message, event.text)
        for event in events_of(
            [
                {"topic": "t", "partition": 0, "offset": at, "state": "published"}
                | {"life": {"groups": [group]}}
                for at in (6, 7, 8)
            ]
        )
        if event.what == "key fenced"
    ]
    text = "since then; now t/0/7 is dead, 1 parked behind it"
    assert fenced == [("t/0/7", text), ("t/0/8", text)]


def test_the_key_of_a_parked_message_was_fenced_for_it_when_it_came() -> None:
    fence = {"state": "dead", "since": 5, "partition": 0, "offset": 7, "parked": 1}
    group = {"group": "g", "state": "parked", "fence": fence, "history": []}
    parked = {"topic": "t", "partition": 0, "offset": 8, "state": "published", "message_id": "i"}
    life = {"born_at": 8, "stored_at": 9, "life": {"groups": [group]}}
    told = [event.what for event in events_of([parked | life]) if event.at is not None]
    assert told == ["sent", "published", "key fenced"]


def test_a_failure_is_told_by_its_error_and_not_by_a_note_behind_it() -> None:
    traceback = "Traceback (most recent call last):\nValueError: 12,50\n(attempt 2 of 2 in place)\n"
    attempt = {"at": 5, "attempt": 1, "consumer": "a", "error_type": "ValueError"}
    group = {"group": "g", "state": "over", "history": [attempt | {"error_text": traceback}]}
    message = {"topic": "t", "partition": 0, "offset": 6, "state": "published"}
    told = events_of([message | {"life": {"groups": [group]}}])
    assert [event.text for event in told if event.what == "failed"] == [
        "attempt 1: ValueError: 12,50"
    ]


def test_messages_are_found_by_what_is_in_them(office: Office) -> None:
    office.send(Message(b'{"order": {"id": 17}}', "k", headers={"region": "eu"}))
    for options in (
        ("t", "--in-body", "$.order.id=17"),
        ("--in-body", "$.order.id=17"),
        ("--header", "region=eu"),
        ("--in-body", '"id": 17', "--header", "region"),
    ):
        told = output("message", "find", *options)
        assert [one["body"] for one in told["messages"]] == ['{"order": {"id": 17}}']
        assert (told["more"], told["read"] > 0) == (False, True)
    refused = run("message", "find", "--in-body", "$.order")
    assert refused.exit_code == 2
    assert "has no value" in refused.stderr
    for wrong in ((), ("--partition", "0", "--key", "k"), ("--header", "=x")):
        assert run("message", "find", *wrong).exit_code == 2


def test_a_search_ends_at_its_bound_and_says_how_to_go_on(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(everywhere, "STEPS", 1)
    monkeypatch.setattr(everywhere, "STEP_BATCHES", 2)
    del office
    args = ("message", "find", "--in-body", "nowhere", "--most-read", "3")
    told = output(*args)
    assert (told["messages"], told["more"], told["read"]) == ([], True, 3)
    shown = run(*args)
    on = ",".join(map(str, told["next"]))
    assert f"go on with --after {on}" in shown.stderr
    rest = output("message", "find", "--in-body", "nowhere", "--after", on)
    assert rest["next"] is None
    in_time = run("trace", "--in-body", "nowhere", "--within", "0s")
    assert in_time.exit_code == 1
    assert "as far as the search has come" in in_time.stdout


def test_a_trace_shows_the_sequence_of_what_followed(office: Office) -> None:
    office.send(Message(b"order 17", "k17"))
    cause = message_id(b"p" * 16, office.sequence - 1)
    headers = {"causation": cause, "correlation": cause}
    data = encode(
        [Message(b"bill", "b-1", headers=headers)],
        producer_id=b"r" * 16, epoch=0, sequence=0, born_at=1,
    )  # fmt: skip
    office.broker.do(StoreBatch("elsewhere", 0, 0, data, verify(data)))
    shown = run("trace", "--in-body", "order 17")
    lines = shown.stdout.splitlines()
    assert "sequence" in lines
    [first] = [line for line in lines if "t/0/10" in line and "k17" in line]
    [second] = [line for line in lines if "└ elsewhere/0/0" in line]
    assert lines.index(first) < lines.index(second)
    assert "b-1" in second
    steps = sequence_of(output("trace", "--key", "b-1")["messages"])
    assert [(step.name, step.depth) for step in steps] == [("t/0/10", 0), ("elsewhere/0/0", 1)]


def test_a_circle_of_causes_ends() -> None:
    made = [
        {"message_id": name, "state": "published", "headers": {"causation": cause}}
        for name, cause in (("a", "b"), ("b", "a"), ("c", "c"), ("d", "a"))
    ]
    assert [(step.name, step.depth) for step in sequence_of(made)] == [
        ("a", 0), ("b", 1), ("d", 1), ("c", 0),
    ]  # fmt: skip
