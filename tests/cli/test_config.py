"""What operators have set at a broker as a file, and another broker made by it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.cli.support import reply, run
from tests.client.real import RealBroker
from txmq.cli import cluster_config
from txmq.cli.cluster_config import ClusterConfig, changes
from txmq.client.blocking.client import Client
from txmq.errors import ConfigError
from txmq.testing.own_broker import OwnBroker
from txmq.testing.wait import wait_until
from txmq.wire.calls.letters import SelectionArgs

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The addresses of two brokers, each with a group."""
    made = [RealBroker(tmp_path_factory.mktemp("broker")) for _ in range(2)]
    for broker in made:
        with txmq.connect(broker.url, service="tests") as client:
            client.call("topic.create", name="work", partitions=1)
            with client.consumer("billing", ["work"]):
                wait_until(partial(_has_groups, client), what="a member has joined")
    yield [broker.url for broker in made]
    for broker in made:
        broker.stop()


def _has_groups(client: Client) -> bool:
    return bool(client.call("group.list")["groups"])


def _set_up(url: str) -> None:
    with txmq.connect(url, service="tests") as client:
        client.call("topic.create", name="orders", partitions=3, retention_ms=7_000, readable=False)
        client.call("topic.schema", name="orders", json_schema=json.dumps(SCHEMA))
        client.call("topic.alter", name="orders", flush=[10, 1_000])
        retry = {"delays_us": [1_000_000], "retries": 2}
        client.call("group.alter", group="billing", lease_ms=5_000, retry=retry)
        client.call("group.alter", group="billing", keep_until_exported=True)
        client.call("dlq.save", name="late", select={"text": "timeout"})
        policy: dict[str, Any] = {"after_s": 60.0, "settings": {"rate": 5.0}}
        client.call("policy.set", group="billing", select={"topic": "orders"}, **policy)


def test_a_broker_becomes_as_the_file_of_another_says(brokers: list[str], tmp_path: Path) -> None:
    here, copy = brokers
    _set_up(here)
    text = run("config", "export", "--broker", here).stdout
    file = tmp_path / "config.json"
    file.write_text(text)
    shown = json.loads(text)
    assert shown["topics"]["orders"] == {
        "partitions": 3,
        "settings": {"retention_ms": 7_000, "flush": [10, 1_000], "readable": False},
        "json_schema": SCHEMA,
        "compatibility": "backward",
    }
    preview = reply("config", "import", str(file), "--dry-run", broker=copy)
    done = reply("config", "import", str(file), "--operator", "ada", broker=copy)
    assert [row["what"] for row in preview["changes"]] == [row["what"] for row in done["changes"]]
    assert [row["change"] for row in done["changes"]][:1] == ["create with 3 partitions"]
    assert all(row["done"] for row in done["changes"])
    assert run("config", "export", "--broker", copy).stdout == text
    assert reply("config", "import", str(file), broker=copy)["changes"] == []


def test_users_come_along_with_roles_grants_and_quotas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    password = tmp_path / "root.pw"
    password.write_text("a long password")
    password.chmod(0o600)
    made = [RealBroker(tmp_path / name) for name in ("here", "copy")]
    here, copy = (broker.url for broker in made)
    root = ("root", "--role", "admin", "--password-file", str(password))
    for url in (here, copy):
        reply("user", "add", *root, broker=url)
    monkeypatch.setenv("TXMQ_USER", "root")
    monkeypatch.setenv("TXMQ_PASSWORD_FILE", str(password))
    reply("user", "add", "shop", "--password-file", str(password), broker=here)
    reply("acl", "grant", "shop", "write", "topic:orders.*", broker=here)
    reply("user", "quota", "shop", "--set", "bytes_per_s=10MiB", "--set", "topics=5", broker=here)
    text = run("config", "export", "--broker", here).stdout
    file = tmp_path / "config.json"
    file.write_text(text)
    done = reply("config", "import", str(file), broker=copy)["changes"]
    assert [row["change"] for row in done if row["done"]] == [
        "add, without a password",
        "set quota",
        "grant write topic:orders.*",
    ]
    assert run("config", "export", "--broker", copy).stdout == text
    assert reply("config", "import", str(file), broker=copy)["changes"] == []
    assert json.loads(text)["users"]["shop"] == {
        "grants": ["write topic:orders.*"],
        "quota": {"bytes_per_s": 10 << 20, "topics": 5},
    }
    for broker in made:
        broker.stop()


def test_the_first_user_is_not_made_by_a_file(brokers: list[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"txmq": 1, "users": {"ada": {"roles": ["admin"]}}, "groups": {"no": {}}}')
    result = run("config", "import", str(file), "--broker", brokers[0], "--json")
    rows = json.loads(result.stdout)["changes"]
    assert (result.exit_code, [(row["what"], row["done"]) for row in rows]) == (
        1,
        [("group no", False), ("users", False)],
    )
    assert "add an admin first" in rows[1]["change"]


def _of(**parts: Any) -> ClusterConfig:
    return cluster_config.parse(json.dumps(parts))


@pytest.mark.parametrize(
    ("now", "wanted", "made"),
    [
        ({"partitions": 4}, {"partitions": 4}, []),
        ({"partitions": 4}, {"partitions": 2}, [("", {})]),
        ({"partitions": 4}, {"partitions": 8}, [("topic.grow", {"partitions": 8})]),
        (
            {"partitions": 4, "settings": {"letters_ms": 5, "writable": False}},
            {"partitions": 4, "settings": {"message_bytes": 9}},
            [("topic.alter", {"message_bytes": 9, "letters_ms": "default", "writable": True})],
        ),
        (
            {"partitions": 4, "settings": {"note": "of the shop"}},
            {"partitions": 4},
            [("topic.alter", {"note": ""})],
        ),
        (
            {"partitions": 4, "json_schema": SCHEMA, "compatibility": "backward"},
            {"partitions": 4},
            [("topic.schema", {"json_schema": ""})],
        ),
    ],
)
def test_a_topic_is_changed_where_it_differs(now: Any, wanted: Any, made: Any) -> None:
    found = changes(_of(topics={"t": now}), _of(topics={"t": wanted}))
    named = [(call, {"name": "t"} | args if call else {}) for call, args in made]
    assert [(change.call, change.args) for change in found] == named


def test_a_group_loses_the_limits_that_the_file_does_not_have() -> None:
    limited: dict[str, Any] = {
        "messages_per_s": 5, "cold_bytes_per_s": 9, "keep_until_exported": True,
        "alarm_severity": "off",
    }  # fmt: skip
    now, wanted = _of(groups={"g": {"lease_ms": 5_000} | limited}), _of(groups={"g": {}})
    assert [(change.call, change.args) for change in changes(now, wanted)] == [
        (
            "group.alter",
            {
                "group": "g",
                "keep_until_exported": False,
                "messages_per_s": 0,
                "cold_bytes_per_s": 0,
                "alarm_severity": "default",
            },
        )
    ]


def test_users_get_their_roles_and_grants_and_no_password() -> None:
    now = _of(
        users={"ada": {"roles": ["admin"]}, "bob": {"grants": ["read topic:a", "read topic:b"]}}
    )
    wanted = _of(users={"bob": {"roles": ["auditor"], "grants": ["read topic:b", "write topic:c"]}})
    assert [(change.call, change.args) for change in changes(now, wanted)] == [
        ("user.set", {"name": "bob", "roles": ["auditor"], "new": False}),
        ("acl.revoke", {"name": "bob", "what": "read", "resource": "topic:a"}),
        ("acl.grant", {"name": "bob", "what": "write", "resource": "topic:c"}),
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("{", "document"),
        ('{"txmq": 2}', "another version"),
        ('{"topics": {"t": {"partitions": 0}}}', "topics.t.partitions"),
        ('{"topics": {"t": {"partitions": 1, "settings": {"retention": 1}}}}', "retention"),
        ('{"topics": {"\\u001b[2J": {"partitions": 1}}}', "topics"),
        ('{"users": {"ada": {"roles": ["king"]}}}', "users.ada.roles"),
    ],
)
def test_a_wrong_document_is_refused_with_its_place(text: str, where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        cluster_config.parse(text)
    assert where in str(refused.value)


def test_a_terminal_is_shown_no_control_character_of_a_file(
    brokers: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"topics": {"\\u001b[2J": {"partitions": 1}}}')
    result = run("config", "import", str(file), "--broker", brokers[0])
    assert result.exit_code == 1
    assert "invalid name" in result.stderr
    assert "\x1b" not in result.stderr


def test_a_file_has_no_control_character_for_a_terminal_and_says_the_same() -> None:
    text = "Zürich\x1b[2J\x9b31m\u202e\u2028\x7f"
    document = ClusterConfig(selections={"odd": SelectionArgs(text=text)})
    shown = document.text()
    assert "Zürich" in shown
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert cluster_config.parse(shown) == document


def test_what_a_schema_breaks_has_no_control_character_for_a_terminal(tmp_path: Path) -> None:
    name = "a\x1b[2J\u202e"
    schema = {"type": "object", "properties": {name: {"type": "string"}}}
    file = tmp_path / "schema.json"
    with OwnBroker(tmp_path) as broker, txmq.connect(broker.url, service="tests") as client:
        client.call("topic.create", name="hostile", partitions=1)
        client.call("topic.schema", name="hostile", json_schema=json.dumps(schema))
        schema["properties"] = {name: {"type": "integer"}}
        file.write_text(json.dumps(schema))
        shown = run(
            "topic", "schema", "check", "hostile", "--file", str(file), "--broker", broker.url
        )
    assert shown.exit_code == 1
    assert "a\\x1b[2J\\u202e: integer" in shown.stdout
    assert "\x1b" not in shown.stdout
