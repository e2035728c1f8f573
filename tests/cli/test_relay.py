"""`txmq relay`: the slot's commands, and the relay as a process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import run
from tests.tx.postgres.support import producer
from txmq import emit
from txmq.client.blocking.connect import connect
from txmq.testing.own_broker import OwnBroker
from txmq.testing.processes import TXMQ, running
from txmq.testing.wait import PATIENCE_S, wait_until


def command_json(*arguments: str, status: int = 0) -> Any:
    """Return the JSON that a command of the relay prints, on either stream."""
    result = run("relay", *arguments, "--json")
    assert result.exit_code == status, result.stderr
    return json.loads(result.stdout or result.stderr)


def emitted(dsn: str, body: bytes) -> None:
    with closing(producer(dsn)) as connection:
        emit(connection, "orders", body)
        connection.commit()


@pytest.fixture
def dsn(logical_database: str) -> str:
    """A database with a slot."""
    command_json("create", logical_database)
    return logical_database


def test_a_slot_is_made_shown_and_dropped(logical_database: str) -> None:
    assert (
        command_json("status", logical_database, status=1)["hint"] == "run `txmq relay create DSN`"
    )
    made = command_json("create", logical_database)
    assert (made["slot"], made["active"], made["wal_status"]) == ("txmq_relay", False, "reserved")
    shown = command_json("status", logical_database)
    assert shown["alarms"] == []
    assert shown["retained_bytes"] >= 0
    assert shown["restart_lsn"].count("/") == 1
    assert shown["lag_seconds"] == 0
    assert command_json("drop", logical_database) == {"dropped": "txmq_relay"}
    assert command_json("drop", logical_database, status=1)["error"] == "SlotMissing"


def test_dropping_asks_first(dsn: str) -> None:
    asked = run("relay", "drop", dsn)
    assert asked.exit_code == 1
    assert "never sent" in asked.stderr
    assert command_json("status", dsn)["slot"] == "txmq_relay"
    assert run("relay", "drop", dsn, "--yes").exit_code == 0


def test_an_alarm_is_shown_with_status_1(dsn: str) -> None:
    emitted(dsn, b"x" * (1 << 21))
    shown = command_json("status", dsn, "--alarm-mib", "1", "--alarm-lag-s", "0", status=1)
    assert [row["kind"] for row in shown["alarms"]] == ["retained", "lag"]
    assert "over 1048576" in run("relay", "status", dsn, "--alarm-mib", "1").stdout


def test_a_server_without_logical_decoding_is_refused_with_a_hint(database: str) -> None:
    refused = command_json("create", database, status=1)
    assert refused["error"] == "WalLevelTooLow"
    assert "wal_level = logical" in refused["hint"]


def test_a_relay_needs_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TXMQ_DSN", raising=False)
    refused = command_json("run", status=1)
    assert (refused["message"], refused["hint"]) == (
        "relay.dsn: is missing",
        "see txmq relay run --help",
    )


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[str]:
    """The URL of a broker."""
    with OwnBroker(tmp_path / "broker") as running:
        yield running.url


@pytest.mark.parametrize("how", ["options", "file"])
def test_a_relay_sends_committed_messages_until_sigterm(
    broker: str, dsn: str, tmp_path: Path, how: str
) -> None:
    emitted(dsn, b"one")
    config = tmp_path / "relay.toml"
    config.write_text(f"[relay]\ndsn = {json.dumps(dsn)}\nbroker = {json.dumps(broker)}\n")
    arguments = ("--config", str(config)) if how == "file" else ("--dsn", dsn, "--broker", broker)
    with running(tmp_path / "relay", "relay", "run", *arguments, "--json") as relay:
        assert json.loads(relay.first_line()) == {"ready": "txmq_relay"}
        with (
            connect(broker) as client,
            client.consumer("g", ["orders"], start="first") as consumer,
        ):
            message = consumer.receive(PATIENCE_S)
            assert message is not None
            assert message.body == b"one"
        assert command_json("status", dsn)["active"]
        assert relay.terminate() == 0
    assert "relay.passage" in {entry["event"] for entry in relay.events()}
    with closing(producer(dsn)) as connection:
        wait_until(lambda: not command_json("status", dsn)["active"], what="the slot is free")
        assert unread(connection) == []


def unread(connection: Any) -> list[object]:
    """Return the messages that are still in the slot."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT data FROM pg_logical_slot_peek_binary_changes('txmq_relay', NULL, NULL,"
            " 'proto_version', '1',"
            " 'publication_names', 'txmq_relay', 'messages', 'true')"
        )
        found: list[object] = cursor.fetchall()
        return found


def test_a_relay_whose_slot_is_missing_ends_with_status_1(
    broker: str, logical_database: str, tmp_path: Path
) -> None:
    arguments = ("relay", "run", "--dsn", logical_database, "--broker", broker)
    with running(tmp_path / "relay", *arguments, command=TXMQ) as relay:
        assert relay.status() == 1
        assert "txmq relay create" in relay.err.read_text()
