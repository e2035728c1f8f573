"""Pages and actions of letters, plans, transactions and traces, in memory."""

from __future__ import annotations

import json
import re
from itertools import count
from typing import Any
from urllib.parse import quote, unquote

import pytest

from tests.admin.console_support import ConsoleInMemory
from tests.broker.access.support import VERIFIER
from tests.broker.calls.test_letter_calls import Office
from tests.broker.calls.test_retry_calls import RetryOffice
from txmq.admin.console import forms, life
from txmq.batch import encode, verify
from txmq.broker.calls import letters as letter_calls
from txmq.core.state.plans import Plan
from txmq.core.topics.sends import StoreBatch
from txmq.core.users import SetUser
from txmq.errors import Throttled
from txmq.model.message import Message, message_id
from txmq.model.units import SECOND


@pytest.fixture
def console() -> ConsoleInMemory:
    office = Office(40)
    office.broker.start()
    office.send(Message(b'{"sum": 12345678901234567890.10}', "k-json"))
    made = ConsoleInMemory(office.broker)
    office.broker.ask("dlq.save", name="bees", select={"error_type": "B"}, operator="ada")
    return made


def test_groups_with_letters_lead_to_their_letters_by_error(console: ConsoleInMemory) -> None:
    assert "letters/g" in console.get("/letters").body
    assert "That match 8" in console.get("/letters?filter=group:g%20error:B").text
    assert "begin with group:NAME" in console.get("/letters?filter=error:B").text
    assert "UnknownGroup" in console.get("/letters?filter=group:h").text
    page = console.get("/letters/g")
    assert page.status == 200, page.text
    assert "That match 40" in page.text
    assert "By error" in page.text
    assert "filter=fingerprint%3Af0" in page.body
    assert "letters/g/t/0/39" in page.body
    assert "bees" in page.text


def test_a_list_shows_what_went_wrong_and_not_where_a_traceback_begins() -> None:
    office = Office(1)
    office.kill(1, "Traceback (most recent call last):\n  File x.py\nB: order {} is gone\n")
    page = ConsoleInMemory(office.broker).get("/letters/g")
    assert "B order 1 is gone" in page.text
    assert "B no 0 here" in page.text
    assert "Traceback" not in page.text


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("error:B", "That match 8"),
        ("error:B key:k7", "letters have to be read"),
        ('text:"no 7 here"', "letters/g/t/0/7"),
        ("error:none", "No letter of this group matches this filter"),
        ("errr:B", "there is no property"),
        ("group:other", "this page is of group g"),
        ("topic:no-such", "does not exist"),
    ],
)
def test_a_filter_finds_letters_or_says_what_is_wrong(
    console: ConsoleInMemory, written: str, expected: str
) -> None:
    page = console.get(f"/letters/g?filter={quote(written)}")
    assert expected in page.body or expected in page.text, page.text


def test_a_page_of_a_slow_search_has_what_was_found_and_goes_on(
    console: ConsoleInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(letter_calls, "MAX_SCANNED", 1)
    monkeypatch.setattr("txmq.core.consumers.letter_selection.LEAPS_PER_STEP", 4)
    path = f"/letters/g?filter={quote('text:no')}"
    whole = console.get(path).body.count('name="letters"')
    monkeypatch.setattr("txmq.admin.console.letters.SCAN", -1)
    page = console.get(path)
    assert 0 < page.body.count('name="letters"') < whole
    assert "cursor=" in page.body


def test_names_in_a_filter_are_completed(console: ConsoleInMemory) -> None:
    def offers(written: str) -> list[str]:
        reply = console.get(f"/complete/letters?group=g&filter={quote(written)}&at={len(written)}")
        found: list[str] = json.loads(reply.body)["offers"]
        return found

    assert "error:" in offers("er")
    assert offers("state:op") == ["state:open"]
    assert sorted(offers("attempts>3 fingerprint:")) == [
        f"attempts>3 fingerprint:f{n}" for n in range(4)
    ]
    assert offers("group:") == ["group:g"]
    assert json.loads(console.get("/complete/letters?group=no&filter=error:").body) == {
        "offers": []
    }


def test_filters_and_notes_are_kept_and_removed(console: ConsoleInMemory) -> None:
    assert console.act("dlq.save", name="every", filter="").status == 200
    saved = {one["name"]: one["select"] for one in console.broker.ask("dlq.saved")["selections"]}
    assert saved["every"] == {}
    assert console.act("dlq.save", name="every").status == 200
    assert "every" not in console.get("/letters/g").text
    assert console.act("dlq.note", group="g", fingerprint="f1", text="ask ada").status == 200
    assert "ask ada" in console.get("/letters/g").text
    assert console.act("dlq.note", group="g", fingerprint="f1", text="").status == 200
    assert "ask ada" not in console.get("/letters/g").text
    too_long = console.act("dlq.abandon", group="g", letters="t/0/1", reason="x" * 5_000)
    assert (too_long.status, "reason" in too_long.text) == (400, True)


def test_a_letter_shows_its_life_and_pages_go_on(console: ConsoleInMemory) -> None:
    page = console.get("/letters/g/t/0/3")
    assert page.status == 200, page.text
    for part in ("no 3 here", "xxxxxxxxxx", "Attempts", "Life", "Replay", "blue"):
        assert part in page.text, part
    assert console.get("/letters/g/t/0/999").status == 404
    assert console.get("/letters/g/t/0/x").status == 400
    first = console.get("/letters/g?limit=30")
    assert "Next page" in first.text


def test_letters_are_delivered_again_one_by_one_and_all_that_match(
    console: ConsoleInMemory,
) -> None:
    reply = console.act("dlq.replay", group="g", letters=["t/0/1", "t/0/999"])
    assert "1 refused" in reply.text
    assert "t/0/999" in reply.text
    reply = console.act("dlq.abandon", group="g", filter="error:B", matching="yes", sure=False)
    assert "closed for good" in reply.text
    assert "parked behind them is delivered" in reply.text
    reply = console.act("dlq.abandon", group="g", filter="error:B", matching="yes", reason="poison")
    assert "done 7" in reply.text, reply.text
    assert "no letters are chosen" in console.act("dlq.replay", group="g").text
    reply = console.act("dlq.replay", group="g", filter="errr:B", matching="yes")
    assert (reply.status, "InvalidFilter" in reply.text) == (400, True)


def test_an_action_on_very_many_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "SELECTION_S", 0.0)
    monkeypatch.setattr(letter_calls, "MAX_LETTERS", 3)
    office = Office(5)
    office.broker.start()
    console = ConsoleInMemory(office.broker)
    first = console.act("dlq.abandon", group="g", filter="", matching="yes", reason="old")
    assert "done so far" in first.text
    assert "done 3" in first.text
    cursor = re.search('name="cursor" value="([^"]*)"', first.body)
    assert cursor is not None
    rest = console.act("dlq.abandon", group="g", filter="", matching="yes", reason="old",
                       cursor=cursor[1])  # fmt: skip
    assert "done 2" in rest.text
    assert "Go on" not in rest.text


def test_what_was_done_before_a_refusal_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_calls, "MAX_LETTERS", 3)
    office = Office(5)
    office.broker.start()
    console = ConsoleInMemory(office.broker)
    ask = console.parts.calls.ask
    seen: list[str] = []

    def second_refused(name: str, args: Any, answer: Any, *rest: Any) -> None:
        seen.append(name)
        if seen.count("dlq.abandon") == 2:
            answer(Throttled("the disk is behind", hint="wait a second"))
        else:
            ask(name, args, answer, *rest)

    monkeypatch.setattr(console.parts.calls, "ask", second_refused)
    reply = console.act("dlq.abandon", group="g", matching="yes", reason="old")
    assert "It stopped: the disk is behind" in reply.text
    assert "done 3" in reply.text


def test_an_edit_is_compared_before_it_acts(console: ConsoleInMemory) -> None:
    place: dict[str, Any] = {"group": "g", "topic": "t", "partition": 0, "offset": 5, "edits": 0}
    form = console.get("/letters/g/t/0/5/edit")
    assert "xxxxxxxxxx</textarea>" in form.body
    change: dict[str, Any] = {**place, "body": "mended\r\nbody"}
    asked = console.act("dlq.edit", sure=False, **change)
    assert "-xxxxxxxxxx" in asked.text
    assert "+mended" in asked.text
    done = console.act("dlq.edit", reason="typo", **change)
    assert done.status == 200, done.text
    shown = console.get("/letters/g/t/0/5")
    assert "mended\nbody" in shown.body
    assert "typo" in shown.text
    assert console.act("dlq.edit", reason="typo", **change).status == 409
    place["edits"] = 1
    assert console.act("dlq.edit", reason="typo", **place, body='{"a": 1}').status == 200
    place["edits"] = 2
    broken = console.act("dlq.edit", reason="typo", **place, body='{"a": 1')
    assert (broken.status, "the body is no JSON" in broken.text) == (409, True)
    told = console.act("dlq.edit", reason="typo", **place, body='{"a": 1', any_format="yes")
    assert told.status == 200, told.text
    back: dict[str, Any] = {**place, "edits": 3, "revert": "yes"}
    assert "+xxxxxxxxxx" in console.act("dlq.edit", sure=False, **back).text


def test_a_plan_is_made_checked_started_and_ended(console: ConsoleInMemory) -> None:
    assert "There are no plans" in console.get("/plans").text
    counted = console.get("/plan/new?group=g&filter=fingerprint:f3&name=p-1")
    assert "of group g to replay" in counted.text
    made = console.act("plan.create", name="p-1", group="g", filter="fingerprint:f3", rate="0.5",
                       canary="1", pause="yes")  # fmt: skip
    assert made.status == 200, made.text
    console.broker.pass_time(1)
    page = console.get("/plans/p-1")
    assert "planned" in page.text, page.text
    assert "Would be delivered" in console.get("/plans/p-1/check").text
    assert console.act("plan.start", name="p-1").status == 200
    console.broker.pass_time(1)
    assert "canary" in console.get("/plans/p-1").text
    assert console.get("/plans/p-1?outcome=delivered").status == 200
    assert console.act("plan.pause", name="p-1").status == 200
    assert console.act("plan.resume", name="p-1").status == 200
    assert console.act("plan.cancel", name="p-1").status == 200
    assert "cancelled" in console.get("/plans").text
    assert console.act("plan.start", name="p-1").status == 409


def test_the_page_of_a_plan_says_whether_its_cleanup_is_pending(
    console: ConsoleInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    console.act("plan.create", name="p-2", group="g", filter="fingerprint:f3")
    assert "<dt>Cleanup</dt><dd>–</dd>" in console.get("/plans/p-2").body
    console.act("plan.cancel", name="p-2")
    assert "<dt>Cleanup</dt><dd>done</dd>" in console.get("/plans/p-2").body
    monkeypatch.setattr(Plan, "has_unswept", property(lambda _plan: True))
    assert "<dt>Cleanup</dt><dd>pending" in console.get("/plans/p-2").body


def test_a_policy_is_set_and_removed(console: ConsoleInMemory) -> None:
    assert "No group has a policy" in console.get("/policies").text
    set_ = console.act("policy.set", group="g", filter="error:A", after_s="3600", max_replays="2")
    assert set_.status == 200, set_.text
    assert "error:A" in console.get("/policies").text
    assert console.act("policy.set", group="g").status == 200
    assert "No group has a policy" in console.get("/policies").text


def test_a_transaction_shows_its_origin_and_is_decided_with_a_reason(
    console: ConsoleInMemory,
) -> None:
    token = console.broker.half(7, Message(b'{"a": 1}', "k-tx"))
    assert token in console.get("/transactions").body
    page = console.get(f"/transactions/{token}")
    assert "Commit by hand" in page.text, page.text
    assert '"a": 1' in page.text
    for state in ("in-doubt", "waiting", "open", "conflicts"):
        assert console.get(f"/transactions?state={state}").status == 200
    assert console.get("/transactions/xa").status == 200
    asked = console.act("tx.decide", token=token, outcome="ROLLBACK")
    assert "required" in asked.body
    done = console.act(
        "tx.decide", token=token, outcome="ROLLBACK", force="yes", reason="asked ada"
    )
    assert done.status == 200, done.text
    page = console.get(f"/transactions/{token}")
    assert "asked ada" in page.text
    assert "Commit by hand" not in page.text
    assert console.get("/transactions/" + "0" * 32).status == 404


def test_a_key_is_traced(console: ConsoleInMemory) -> None:
    assert "Type a key" in console.get("/trace").text
    page = console.get("/trace?key=k3")
    assert "t/0/3" in page.text, page.text
    assert "Time line" in page.text
    assert "No message has this key" in console.get("/trace?key=none").text


def test_a_trace_of_a_large_log_ends_in_time_and_says_what_it_left_out(
    console: ConsoleInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = console.broker
    broker.ask("topic.create", name="later", partitions=1)
    monkeypatch.setattr("txmq.broker.search.deliveries.STEP_BYTES", 1)
    times = count(broker.engine.now(), SECOND)
    monkeypatch.setattr(broker.engine, "now", lambda: next(times))
    page = console.get("/trace?key=k3")
    assert "this page stopped in topic" in page.text, page.text
    assert "t/0/3" in page.text
    assert "The log has more than this page read" in page.text
    assert "the log was not read from here on" in page.text
    page = console.get("/trace?key=none")
    assert "this page stopped in topic" in page.text
    assert "No message has this key" not in page.text
    page = console.get("/trace?key=k3&thorough=yes")
    assert "stopped" not in page.text
    assert "not read from here on" not in page.text


def test_few_thorough_traces_run_at_a_time(
    console: ConsoleInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _number in range(life.MAX_THOROUGH + 1):
        assert console.get("/trace?key=k3&thorough=yes").status == 200, "one after the other"
    monkeypatch.setattr(life, "MAX_THOROUGH", 0)
    refused = console.get("/trace?key=k3&thorough=yes")
    assert refused.status == 429
    assert "thorough traces are under way" in refused.text
    assert console.get("/trace?key=k3").status == 200


def test_one_user_has_a_part_of_the_thorough_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    console = ConsoleInMemory(users=True)
    assert console.get("/trace?key=k&thorough=yes", "root").status == 200
    monkeypatch.setattr(life, "MAX_OF_USER", 0)
    assert console.get("/trace?key=k&thorough=yes", "root").status == 429
    assert console.get("/trace?key=k", "root").status == 200


def test_whoever_may_not_read_sees_no_body() -> None:
    office = Office(3)
    for name, role in (("root", "admin"), ("ops", "operator")):
        office.broker.do(SetUser(name, (role,), tuple(VERIFIER), "test", b"x" * 32))  # type: ignore[arg-type]  # a plain tuple
    office.broker.assembly.guard.forget()
    office.broker.start()
    console = ConsoleInMemory(office.broker)
    token = console.broker.half(7, Message(b"secret of a half", "k-tx"))
    for path, body in (("/letters/g/t/0/1", "xxxxxxxxxx"), ("/letters/g/t/0/1/edit", "xxxxxxxxxx"),
                       (f"/transactions/{token}", "secret")):  # fmt: skip
        assert body in console.get(path, "root").text, path
        hidden = console.get(path, "ops")
        assert hidden.status == 200
        assert body not in hidden.text
        assert "txmq acl grant ops read" in hidden.text


def test_what_is_retried_is_listed_hastened_buried_skipped_and_edited() -> None:
    office = RetryOffice()
    console = ConsoleInMemory(office.broker)
    for path in ("/letters", "/letters/g"):
        assert "filter=state:retrying" in unquote(console.get(path).body)
    assert "Groups with dead letters, or messages that are retried: 1 of 2" in (
        console.get("/letters").text
    )
    page = console.get(f"/letters/g?filter={quote('state:retrying,replaying,local')}")
    for part in ("t/0/2", "t/0/3", "Next attempt", "Retry now", "Bury", "Skip"):
        assert part in page.text, part
    assert "act/dlq.replay" not in page.body, "they are no letters"
    letter = console.get("/letters/g/t/0/2")
    assert "act/retry.now" in letter.body
    assert "boom" in letter.text
    everything: dict[str, Any] = {
        "group": "g",
        "filter": "state:retrying key:k2",
        "matching": "yes",
    }
    assert "done 1" in console.act("retry.now", **everything).text
    asked = console.act("retry.skip", group="g", letters="t/0/3", sure=False)
    assert "closed for good" in asked.text
    console.act("dlq.edit", group="g", topic="t", partition="0", offset="3", edits="0",
                body="mended", reason="typo")  # fmt: skip
    assert "edited" in console.get(f"/letters/g?filter={quote('state:retrying')}").text
    assert "done 1" in console.act("retry.bury", group="g", letters="t/0/3", reason="bug").text
    assert "done 1" in console.act("retry.skip", group="g", letters="t/0/2", reason="test").text
    states = {at: console.broker.ask("dlq.show", group="g", topic="t", partition=0, offset=at)
              for at in (2, 3)}  # fmt: skip
    assert [one["state"] for one in states.values()] == ["abandoned", "dead"]
    office.replay(3)
    office.fetch()
    held = console.get("/letters/g/t/0/3")
    assert "a, in hand" in held.text


def test_an_order_is_found_by_what_is_in_its_messages_and_followed(
    console: ConsoleInMemory,
) -> None:
    broker = console.broker
    broker.ask("topic.create", name="bills", partitions=1)
    cause = message_id(b"p" * 16, 40)  # of the message with the key k-json
    headers = {"causation": cause, "correlation": cause}
    data = encode(
        [Message(b"bill", "b-1", headers=headers)],
        producer_id=b"r" * 16, epoch=0, sequence=0, born_at=1,
    )  # fmt: skip
    broker.do(StoreBatch("bills", 0, 0, data, verify(data)))
    body = quote("$.sum=12345678901234567890.10")
    for query in (f"body={body}", "header=" + quote(f"causation={cause}"), "key=b-1"):
        page = console.get(f"/trace?{query}")
        assert "└ bills/0/0" in page.text, page.text
        assert page.text.index("t/0/40") < page.text.index("└ bills/0/0")
    wrong = console.get("/trace?body=" + quote("$.sum"))
    assert wrong.status == 400
    assert "it has no value" in wrong.text
    listed = console.get(f"/topics/t/messages?body={body}")
    assert "0/40" in listed.text
    assert "0/39" not in listed.text
    assert "matches these fields" in console.get("/topics/t/messages?body=nowhere").text


def test_charts_tell_times_and_values(console: ConsoleInMemory) -> None:
    for _ in range(40):
        console.broker.pass_time(10)
    page = console.get("/")
    assert 'class="times"' in page.body
    [undecided] = [part for part in page.body.split("<figure")[1:] if "Undecided<" in part]
    begin, middle, end = re.findall(r">(\d\d:\d\d)</time>", undecided)
    assert begin < middle < end
    assert re.search(r"<title>[-\d]+ [:\d]+ UTC: 0</title>", undecided)
