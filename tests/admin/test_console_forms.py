"""Forms of settings and users, and words of the console, in memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.admin.console_support import ConsoleInMemory
from tests.broker.calls.test_letter_calls import Office
from txmq.admin.console import fields
from txmq.admin.console.actions import ACTIONS
from txmq.admin.console.registry import NAVIGATION
from txmq.admin.console.words import in_words, label
from txmq.core.consumers.commands import JoinGroup
from txmq.model.units import DAY, MINUTE, SECOND
from txmq.wire.data_requests import Ack, AckedRange, Fetch, Opcode, pack_ack, pack_fetch

PASSWORD = "a long password"
OPEN = {"me", "trace"}  # they show nothing before something is asked for


def consume(office: Office, end: int) -> None:
    """Deliver what there is, and have the messages before an offset processed."""
    generation = office.joined["generation"]
    wanted = Fetch(generation, 0, 1 << 22, 10_000, "g", "a")
    assert office.client.ask(Opcode.FETCH, pack_fetch(wanted)).status == 0
    acked = Ack(generation, "g", "a", (AckedRange("t", 0, 0, end),), ())
    assert office.client.ask(Opcode.ACK, pack_ack(acked)).status == 0


@pytest.fixture
def console() -> ConsoleInMemory:
    made = ConsoleInMemory(users=True)
    made.broker.ask("topic.create", name="orders", partitions=1)
    made.broker.do(JoinGroup("billing", "m", "i", "concurrent", ("orders",)))
    return made


def settings(console: ConsoleInMemory) -> dict[str, Any]:
    found: dict[str, Any] = console.broker.ask("group.show", group="billing")["settings"]
    return found


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("retention_ms", 60_000, "1 min"),
        ("lease_us", 90 * SECOND, "90 s"),
        ("ramp_s", 2.5, "2500 ms"),
        ("expire_s", 90 * 86_400, "90 d"),
        ("bytes_per_s", 10 << 20, "10 MiB"),
        ("requests_per_s", 1_500, "1,500"),
        ("to", 1_796_000_000 * SECOND, "2026-11-30 00:53:20 UTC"),
        ("to", 7, "7"),
        ("writable", False, "no"),
        ("letters", [["orders", 0, 7], ["orders", 1, 8]], "orders/0/7, orders/1/8"),
        ("letters", {"items": 2_000}, "2,000 of them"),
        ("select", {"error_type": "ValueError"}, "error:ValueError"),
        ("select", {}, "–"),
        ("settings", {"rate": 5.0, "ramp_s": 60.0, "pause": False, "dead": []},
         "rate: 5; ramp: 1 min; pause: no"),
        ("retry", {"delays_us": [SECOND, 5 * MINUTE]}, "delays: 1 s, 5 min"),
        ("roles", [], "–"),
        ("note", "", "–"),
        ("start", "first", "first"),
    ],
)  # fmt: skip
def test_fields_of_calls_are_read_in_words(name: str, value: object, expected: str) -> None:
    assert in_words(value, name) == expected


def test_labels_have_no_units() -> None:
    names = ("consume_timeout_us", "ramp_s", "bytes_per_s", "max_parked")
    assert list(map(label, names)) == [
        "consume timeout", "ramp", "bytes per second", "max parked",
    ]  # fmt: skip


def test_every_action_says_what_it_does_where_its_button_is() -> None:
    assert [call for call, action in ACTIONS.items() if not action.says] == []


def test_a_group_s_retries_are_changed_whole_and_other_settings_one_by_one(
    console: ConsoleInMemory,
) -> None:
    page = console.get("/groups/billing", "ops")
    assert 'name="delays_us" size="44" autocomplete="off" value="10 s, 30 s, 1 min' in page.body
    assert 'placeholder="1 min"' in page.body
    retry: dict[str, Any] = {
        "delays_us": "5, 1min,2 h",
        "retries": "7",
        "jitter": "0.1",
        "dead": "a.B, c.*",
    }
    reply = console.act("group.alter", "ops", group="billing", **retry, postpone="")
    assert "done" in reply.text
    changed = settings(console)
    assert changed["retry"] == {
        "delays_us": [5 * SECOND, MINUTE, 120 * MINUTE],
        "retries": 7, "jitter": 0.1, "dead": ["a.B", "c.*"], "postpone": [],
    }  # fmt: skip
    assert changed["altered"] == ("retry",)
    others: dict[str, Any] = {"flood_keys": "0", "on_exhausted": "", "keep_until_exported": "yes"}
    assert console.act("group.alter", "ops", group="billing", **others).status == 200
    limits: dict[str, Any] = {
        "messages_per_s": "50",
        "cold_bytes_per_s": "20MiB",
        "lease_ms": "2min",
    }
    assert console.act("group.alter", "ops", group="billing", **limits).status == 200
    changed = settings(console)
    assert set(changed["altered"]) == {
        "retry", "flood_keys", "keep_until_exported", "messages_per_s", "cold_bytes_per_s",
        "lease_us",
    }  # fmt: skip
    assert (changed["cold_bytes_per_s"], changed["lease_us"]) == (20 << 20, 2 * MINUTE)
    page = console.get("/groups/billing", "ops")
    assert "delays: 5 s, 1 min, 2 h; retries: 7" in page.text
    assert page.body.index(">Pause<") < page.body.index("<h3>Delete</h3>")
    wrong = console.act("group.alter", "ops", group="billing", lease_ms="soon")
    assert (wrong.status, "lease: invalid duration 'soon': use 60" in wrong.text) == (400, True)


def test_a_user_is_added_with_a_password_and_gets_another_one(console: ConsoleInMemory) -> None:
    form: dict[str, Any] = {"name": "zoe", "new": "yes", "roles": ["", "operator"]}
    for first, second in ((PASSWORD, "another one"), ("short", "short")):
        wrong = console.act("user.set", "root", **form, password=first, again=second)
        assert (wrong.status, "password" in wrong.text) == (400, True)
        assert first not in wrong.body
    added = console.act("user.set", "root", **form, password=PASSWORD, again=PASSWORD)
    assert (added.status, PASSWORD in added.body) == (200, False)
    assert 'href="../users/zoe"' in added.body, "the way to the user"
    assert console.broker.log_in("zoe", PASSWORD).replies() == []  # type: ignore[attr-defined]  # of brokers with users
    again = console.act("user.set", "root", **form, password=PASSWORD, again=PASSWORD)
    assert "there is a user 'zoe' already" in again.text
    other: dict[str, Any] = {
        "name": "zoe",
        "password": "quite another one",
        "again": "quite another one",
    }
    assert "changed yes" in console.act("user.set", "root", **other).text
    assert console.broker.log_in("zoe", other["password"]).replies() == []  # type: ignore[attr-defined]
    [entry, *_] = console.broker.ask("audit.list", call="user.set", newest=True)["entries"]
    assert "another" not in str(entry)


def test_no_verifier_is_made_for_whoever_may_not_set_a_password(
    console: ConsoleInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(fields, "new_verifier", made.append)
    form: dict[str, Any] = {"name": "ops", "password": PASSWORD, "again": PASSWORD}
    assert console.act("user.set", "ops", **form).status == 403
    assert console.act("user.set", "root", **(form | {"name": "no name"})).status == 400
    assert made == []


def test_roles_are_chosen_and_none_of_them_is_a_choice(console: ConsoleInMemory) -> None:
    def roles() -> list[str]:
        found: list[str] = console.broker.ask("user.list", name="ops")["users"][0]["roles"]
        return found

    console.act("user.set", "root", name="ops", roles=["", "auditor", "operator"])
    assert roles() == ["auditor", "operator"]
    assert 'value="auditor" checked' in console.get("/users/ops", "root").body
    console.act("user.set", "root", name="ops", roles="")
    assert roles() == []
    wrong = console.act("user.set", "root", name="ops", roles="king")
    assert (wrong.status, "is no role: use producer" in wrong.text) == (400, True)


def test_a_grant_is_on_a_kind_of_resources_and_says_what_is_wrong(
    console: ConsoleInMemory,
) -> None:
    given = console.act("acl.grant", "root", name="nobody", what="read", kind="topic", of="o*")
    assert given.status == 200
    cluster = console.act("acl.grant", "root", name="nobody", what="audit", kind="cluster", of="")
    assert cluster.status == 200
    grants = console.broker.ask("user.list", name="nobody")["users"][0]["grants"]
    assert grants == ["read topic:o*", "audit cluster"]
    wrong = console.act("acl.grant", "root", name="nobody", what="audit", kind="topic", of="o")
    assert (wrong.status, "'audit' gives nothing on a topic" in wrong.text) == (400, True)


def test_who_has_a_token_is_not_said_to_have_a_certificate(console: ConsoleInMemory) -> None:
    console.broker.ask("user.set", name="scraper", roles=[], new=True, operator="root")
    assert "certificate only" in console.get("/users/scraper", "root").text
    console.broker.ask("token.add", name="scraper", token="prom", digest="0" * 64,
                       expire_s=DAY // SECOND, operator="root")  # fmt: skip
    for path in ("/users", "/users/scraper"):
        assert "token over HTTP" in console.get(path, "root").text
    assert "certificate only" not in console.get("/users/scraper", "root").text
    assert console.act("token.revoke", "root", name="scraper", token="prom").status == 200
    assert console.broker.ask("user.list", name="scraper")["users"][0]["tokens"] == []


@pytest.mark.parametrize("user", ["root", "ops", "nobody"])
def test_what_one_may_not_open_is_disabled_in_the_navigation_and_says_why(
    console: ConsoleInMemory, user: str
) -> None:
    menu = console.get("/me", user).body.partition("<nav")[2].partition("</nav>")[0]
    for page in NAVIGATION:
        is_open = f'href="./{page.path}"' in menu
        denied = console.get(f"/{page.path}", user).status == 403
        assert is_open is not denied or page.path in OPEN, page.path
        assert is_open or f">{page.nav}</a>" in menu
    assert menu.count("may not describe cluster; an admin") == (9 if user == "nobody" else 0)


def test_the_audit_is_read_in_words(console: ConsoleInMemory) -> None:
    console.act("topic.alter", "ops", name="orders", retention_ms="36h", writable="no")
    retry: dict[str, Any] = {
        "delays_us": "5,60",
        "retries": "",
        "jitter": "",
        "dead": "",
        "postpone": "",
    }
    console.act("group.alter", "ops", group="billing", **retry)
    text = console.get("/audit", "root").text
    assert "Change the topic's settings topic.alter topic orders" in text
    assert "retention: 36 h; writable: no" in text
    assert "retry: delays: 5 s, 1 min" in text
    assert not any(sign in text for sign in ("{", "_ms", "_us", "36000"))


def test_a_plan_shows_keys_and_errors_and_what_was_processed_leads_to_its_trace() -> None:
    office = Office(3)
    console = ConsoleInMemory(office.broker)
    office.broker.start()
    made = console.act("plan.create", name="p", group="g", filter="", start="yes", rate="0",
                       ramp_s="0")  # fmt: skip
    assert 'href="../plans/p"' in made.body
    office.broker.pass_time(5)
    page = console.get("/plans/p")
    for part in ("trace?key=k0", "no 0 here", "ends: letters that are not put back stay open"):
        assert part in page.body, part
    consume(office, 1)
    page = console.get("/plans/p?outcome=processed")
    assert "trace?key=k0" in page.body
    gone = console.get("/letters/g/t/0/0")
    assert (gone.status, "it was processed, or never failed" in gone.text) == (200, True)
    assert "trace?id=" in gone.body
    assert "Life" in gone.text
    assert console.get("/letters/g/t/0/99").status == 404
