"""Forms of the console: where one may come from, what it may be, and what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.admin.console_support import FORM, OWN, ConsoleInMemory
from tests.broker.access.test_needs import arguments
from txmq import admin
from txmq.admin.console import plans
from txmq.admin.console.action import DANGEROUS
from txmq.admin.console.actions import ACTIONS
from txmq.admin.console.page import ANSWER_S
from txmq.admin.http import MAX_FORM_BYTES
from txmq.core.consumers.commands import JoinGroup
from txmq.errors.base import MAY_BE_DONE
from txmq.model.units import DAY
from txmq.wire.calls.registry import CALLS

TEMPLATES = Path(admin.__file__).parent / "templates" / "console"
PAUSE = "/act/group.pause"
BODY = b"csrf=TOKEN&group=billing"


@pytest.fixture
def console() -> ConsoleInMemory:
    found = ConsoleInMemory()
    found.broker.ask("topic.create", name="orders", partitions=1)
    join(found)
    return found


def join(console: ConsoleInMemory, group: str = "billing") -> None:
    console.broker.do(JoinGroup(group, "m", "i", "concurrent", ("orders",)))


@pytest.mark.parametrize(
    ("headers", "body", "status", "error"),
    [
        ({"Origin": "http://evil.example"}, BODY, 403, "WrongOrigin"),
        ({"Origin": "null"}, BODY, 403, "WrongOrigin"),
        ({"Sec-Fetch-Site": "cross-site"}, BODY, 403, "WrongOrigin"),
        ({"Sec-Fetch-Site": "same-site"}, BODY, 403, "WrongOrigin"),
        ({"Sec-Fetch-Site": "none"}, BODY, 403, "WrongOrigin"),
        ({"Origin": "", "Sec-Fetch-Site": ""}, BODY, 403, "WrongOrigin"),
        ({"Host": "evil.example"}, BODY, 421, "WrongHost"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, BODY, 421, "WrongHost"),
        ({"Content-Type": "text/plain"}, b'{"csrf": "TOKEN"}', 415, "BadRequest"),
        ({"Content-Type": "application/json"}, b"{}", 415, "BadRequest"),
        ({"Content-Type": "multipart/form-data; boundary=x"}, BODY, 415, "BadRequest"),
        ({"Content-Type": ""}, BODY, 415, "BadRequest"),
        ({"Cookie": ""}, BODY, 403, "WrongOrigin"),
        ({"Cookie": "txmq_x=1; COOKIEx"}, BODY, 403, "WrongOrigin"),
        ({}, b"group=billing", 403, "WrongOrigin"),
        ({}, b"csrf=&group=billing", 403, "WrongOrigin"),
        ({}, b"csrf=TOKENx&group=billing", 403, "WrongOrigin"),
        ({}, b"csrf=%C3%A9&group=billing", 403, "WrongOrigin"),
        ({}, b"csrf=TOKEN&group=%ff", 400, "BadRequest"),
        ({}, b"csrf=TOKEN&group=\xff", 400, "BadRequest"),
        ({}, BODY + b"&topic=x" * 1_001, 400, "BadRequest"),
        ({}, BODY + b"&operator=root", 400, "WrongForm"),
        ({}, BODY + b"&__class__=x", 400, "WrongForm"),
        ({}, BODY + b"&group=other", 400, "WrongForm"),
        ({}, b"csrf=TOKEN&group=a%0d%0ab", 400, "BadRequest"),
        ({}, b"csrf=TOKEN&group=no-such", 409, "UnknownGroup"),
        ({"Content-Length": str(MAX_FORM_BYTES + 1)}, BODY, 413, ""),
        ({"Content-Length": "2000000000"}, BODY, 413, ""),
        ({"Transfer-Encoding": "chunked", "Content-Length": ""}, b"5\r\ncsrf=\r\n", 413, ""),
    ],
)  # fmt: skip
def test_only_a_form_of_a_page_of_the_console_acts(
    console: ConsoleInMemory, headers: dict[str, str], body: bytes, status: int, error: str
) -> None:
    cookie, token = console.credentials()
    headers = {**OWN, "Cookie": cookie, "Content-Type": FORM} | headers
    headers["Cookie"] = headers["Cookie"].replace("COOKIE", cookie)
    before = console.broker.engine.store.end
    if "Transfer-Encoding" in headers:  # the sender's own length is none
        head = {name: value for name, value in headers.items() if name != "Content-Length"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        reply = console.send(
            f"POST {PAUSE} HTTP/1.1\r\nHost: localhost:7651\r\n{lines}\r\n".encode() + body
        )
    else:
        reply = console.request("POST", PAUSE, headers, body.replace(b"TOKEN", token.encode()))
    assert reply.status == status
    assert error in reply.body
    assert console.broker.engine.store.end == before
    if status != 413:
        assert "default-src 'none'" in reply.header("Content-Security-Policy")
        assert reply.header("Cache-Control") == "no-store"


def test_an_action_that_is_not_answered_may_have_been_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = ConsoleInMemory()
    credentials, passing = console.credentials(), console.broker.pass_time
    monkeypatch.setattr(console, "credentials", lambda _user: credentials)
    monkeypatch.setattr(console.parts.calls, "ask", lambda *_args: None)
    monkeypatch.setattr(console.broker, "pass_time", lambda _seconds: passing(1.5 * ANSWER_S))
    reply = console.act("group.pause", group="billing")
    assert (reply.status, MAY_BE_DONE in reply.text) == (504, True), reply.text


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_no_other_method_acts(console: ConsoleInMemory, method: str) -> None:
    cookie, token = console.credentials()
    before = console.broker.engine.store.end
    path = f"{PAUSE}?csrf={token}&group=billing&sure=yes"
    reply = console.request(method, path, {**OWN, "Cookie": cookie})
    assert reply.status in (404, 405)
    assert console.broker.engine.store.end == before


def test_a_form_acts_and_the_audit_says_that_it_came_by_the_console() -> None:
    console = ConsoleInMemory(users=True)
    console.broker.ask("topic.create", name="orders", partitions=1)
    join(console)
    reply = console.act("group.pause", "ops", group="billing", reason="too <b>fast</b>")
    assert reply.status == 200, reply.text
    assert "done" in reply.text
    [entry] = console.broker.ask("audit.list", call="group.pause")["entries"]
    assert entry["operator"] == "ops"
    assert entry["via"] == "console"
    assert entry["reason"] == "too <b>fast</b>"


def test_a_form_of_one_user_is_no_use_to_another_and_none_outlives_the_broker() -> None:
    console = ConsoleInMemory(users=True)
    cookie, token = console.credentials("ops")
    headers = {**OWN, "Cookie": cookie, "Content-Type": FORM}
    body = f"csrf={token}&name=orders&partitions=1".encode()
    for user in ("root", "shop"):
        reply = console.request("POST", "/act/topic.create", headers, body, user)
        assert (reply.status, "WrongOrigin" in reply.body) == (403, True)
    assert console.request("POST", "/act/topic.create", headers, body).status == 401
    console.restart()
    reply = console.request("POST", "/act/topic.create", headers, body, "ops")
    assert "load the page again" in reply.text


def test_the_cookie_is_sent_by_this_site_only(console: ConsoleInMemory) -> None:
    cookie = console.get("/").header("Set-Cookie")
    assert "; HttpOnly; SameSite=Strict" in cookie
    assert console.get("/").header("Referrer-Policy") == "same-origin"


def test_what_cannot_be_undone_is_asked_first(console: ConsoleInMemory) -> None:
    before = console.broker.engine.store.end
    reply = console.act("topic.delete", sure=False, name="orders")
    assert reply.status == 200
    assert "cannot be undone" in reply.text
    assert 'name="sure" value="yes"' in reply.body
    reply = console.act("tx.decide", token="0" * 32, outcome="COMMIT")
    assert "required" in reply.body, "a reason is asked for"
    assert console.broker.engine.store.end == before


def test_what_takes_away_for_good_looks_so_where_it_is_offered_and_where_it_is_confirmed(
    console: ConsoleInMemory,
) -> None:
    console.broker.ask("topic.create", name="doomed", partitions=1)
    page = console.get("/topics/doomed").body
    says = ACTIONS["topic.delete"].says
    assert f'<button class="danger" title="{says}">Delete the topic</button>' in page
    asked = console.act("topic.delete", sure=False, name="doomed").body
    assert '<button class="main danger">Delete the topic</button>' in asked
    console.broker.ask("plan.create", name="p", group="g")
    harmless = console.act("plan.freeze", sure=False, name="p").body
    assert '<button class="main">Complete the plan</button>' in harmless


def test_what_is_said_to_be_for_good_looks_dangerous_and_is_asked_first() -> None:
    for_good = ("cannot be", "cannot go on", "lost", "for good", "final", "forgotten", "retention")
    said = {call for call, row in ACTIONS.items() if any(word in row.ask for word in for_good)}
    named = {call for call in ACTIONS if call.endswith((".delete", ".forget", ".reset"))}
    assert said | named == DANGEROUS
    assert all(ACTIONS[call].ask for call in DANGEROUS)


FORMS: dict[str, dict[str, Any]] = {
    "topic.create": {"name": "t", "partitions": 1},
    "topic.grow": {"name": "t", "partitions": 2},
    "group.clone": {"group": "g", "to": "h"},
    "group.reset": {"group": "g", "topic": "t", "to": "first"},
    "acl.grant": {"name": "u", "what": "read", "resource": "topic:t"},
    "acl.revoke": {"name": "u", "what": "read", "resource": "topic:t"},
    "tx.decide": {"outcome": "COMMIT"},
    "dlq.try": {"member": "m"},
    "dlq.edit": {"edits": 0, "body": "x"},
    "dlq.note": {"fingerprint": "f", "text": "x"},
    "dlq.redrive": {"to": "t"},
    "clock.confirm": {"force": "yes"},
}
NAMES = {
    "group": "g", "name": "n", "token": "0" * 32, "topic": "t", "partition": 0, "offset": 0,
    "letters": "t/0/0",
}  # fmt: skip


def test_an_action_on_all_that_match_ends_with_the_rights_of_its_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    console = ConsoleInMemory(users=True)
    seen: list[tuple[str, ...]] = []

    make = console.parts.calls.ask
    fewer = {"name": "ops", "roles": ["auditor"], "operator": "root"}

    def ask(call: str, args: Any, answer: Any, rights: Any, via: str) -> None:
        if call != "dlq.abandon":  # of the page with the form
            make(call, args, answer, rights, via)
            return
        seen.append(rights.roles)
        make("user.set", dict(fewer), lambda _reply: None)
        console.broker.pass_time(0)
        answer({"done": [1], "refused": [], "next": None if len(seen) > 1 else "more"})

    monkeypatch.setattr(console.parts.calls, "ask", ask)
    console.act("dlq.abandon", "ops", group="billing", filter="", matching="yes", reason="old")
    assert seen == [("operator",), ("auditor",)]


def test_every_action_is_denied_to_a_user_without_permissions() -> None:
    console = ConsoleInMemory(users=True)
    assert ACTIONS.keys() <= CALLS.keys()
    before = console.broker.engine.store.end
    for call, action in ACTIONS.items():
        given = {name: value for name, value in NAMES.items() if name in action.fields}
        needed = {
            name for name, field in CALLS[call].model_fields.items() if field.is_required()
        } - {"operator", "reason"}
        form = given | FORMS.get(call, {})
        assert needed <= form.keys(), call
        assert arguments(call)
        for sure in (False, True):
            reply = console.act(call, "nobody", sure=sure, reason="why", **form)
            assert reply.status == 403, (call, reply.text)
            assert "txmq acl grant nobody" in reply.text, (call, reply.text)
    assert console.broker.engine.store.end - before < 20_000, "nothing but denials"


def test_every_action_has_a_button() -> None:
    pages = "".join(file.read_text("utf-8") for file in TEMPLATES.glob("*.html"))
    of_plans = {f"plan.{act}" for acts in plans.VERBS.values() for act in acts}
    assert {call for call in ACTIONS if f'"{call}"' not in pages} <= of_plans


def test_a_clock_that_jumped_is_confirmed_by_a_button() -> None:
    console = ConsoleInMemory()
    assert "Confirm the clock" not in console.get("/").text
    console.broker.wall_wrong = DAY
    console.broker.pass_time(10)
    assert "Confirm the clock" in console.get("/").text
    assert "done" in console.act("clock.confirm", reason="it is right", force="yes").text


def test_whoever_logs_out_is_asked_for_a_password_again() -> None:
    console = ConsoleInMemory(users=True)
    assert 'href="./logout"' in console.get("/", "root").body
    left = console.get("/logout", "root")
    assert (left.status, left.header("WWW-Authenticate")[:5]) == (401, "Basic")
    assert "you are logged out" in left.body
    assert console.get("/", "root").status == 200, "it is the browser that forgets"
    assert ConsoleInMemory().get("/logout").status == 404
