"""Brokers killed while an operator mends dead letters."""

from __future__ import annotations

from base64 import b64encode
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Any

import txmq
from tests.cli.peer import Peer, peer
from tests.reporting import Report
from tests.system.test_adoption_kills import broker
from txmq.batch import BatchView
from txmq.client.protocol.letter_file import read_file
from txmq.crashpoints import VARIABLE
from txmq.errors import ConnectionLost, TxmqError
from txmq.testing.processes import ENVIRONMENT, Running

LETTER = {"group": "g", "topic": "t", "partition": 0, "offset": 0}


def edit(connection: Peer, edits: int, body: bytes) -> None:
    """Edit the letter; the broker may die of it."""
    named = {"operator": "ada", "reason": "wrong amount"}
    with suppress(TxmqError):
        connection.call("dlq.edit", **LETTER, edits=edits, body=b64encode(body).decode(), **named)


def processed(connection: Peer) -> list[bytes]:
    """Return the bodies that a member of the group gets."""
    joined = connection.call(
        "consumer.join", group="g", member="n", instance="n", topics=["t"], start="first"
    )
    chunks = connection.fetch("g", "n", joined["generation"])
    return [BatchView(bytes(chunk.batch)).bodies[chunk.first_row] for chunk in chunks]


def test_a_broker_killed_in_an_edit_has_the_letter_as_it_was_or_as_it_is_told(
    tmp_path: Path, report: Report
) -> None:
    def look(connection: Peer) -> Any:
        return connection.call("dlq.show", **LETTER)

    with broker(tmp_path, "edit.after_store") as (url, process):
        with txmq.connect(url) as client, peer(url) as connection:
            client.call("topic.create", name="t", partitions=1)
            client.send("t", b"published")
            connection.dead_letters("g", "t", 1)
            edit(connection, 0, b"never there")
        assert process.status() == -SIGKILL
    with broker(tmp_path, "edit.after_edit") as (url, process):
        with peer(url) as connection:
            assert (look(connection)["edits"], look(connection)["versions"]) == (0, [])
            edit(connection, 0, b"mended")
        assert process.status() == -SIGKILL
    with broker(tmp_path) as (url, _process), peer(url) as connection:
        assert [one["by"] for one in look(connection)["versions"]] == ["", "ada"]
        connection.call("dlq.replay", group="g", letters=[["t", 0, 0]])
        assert processed(connection) == [b"mended"]
    report({"kills": 2})


def test_a_broker_killed_as_a_message_dies_has_it_in_one_place(
    tmp_path: Path, report: Report
) -> None:
    def places(connection: Peer) -> tuple[set[int], set[int]]:
        """Return the offsets of the dead letters, and those that a member gets."""
        member = {"group": "g", "member": "n", "instance": "n"}
        joined = connection.call("consumer.join", **member, topics=["t"])
        got = {
            chunk.base_offset + chunk.first_row
            for chunk in connection.fetch("g", "n", joined["generation"])
        }
        connection.call("consumer.leave", **member)
        letters = connection.call("dlq.list", group="g")["letters"]
        return {letter["offset"] for letter in letters}, got

    def die(connection: Peer) -> None:
        with suppress(ConnectionLost):
            connection.dead_letters("g", "t", 1)

    with broker(tmp_path, "nack.before_record") as (url, process):
        with txmq.connect(url) as client, peer(url) as connection:
            client.call("topic.create", name="t", partitions=1)
            for number in range(2):
                client.send("t", b"%d" % number)
            die(connection)
        assert process.status() == -SIGKILL
    with broker(tmp_path, "nack.after_record") as (url, process):
        with peer(url) as connection:
            assert places(connection) == (set(), {0, 1})
            die(connection)
        assert process.status() == -SIGKILL
    with broker(tmp_path) as (url, _process), peer(url) as connection:
        assert places(connection) == ({0}, {1})
    report({"kills": 2})


def test_a_broker_killed_in_a_redrive_has_each_copy_once_with_its_letter_closed(
    tmp_path: Path, report: Report
) -> None:
    args = {"group": "g", "to": "other", "operator": "ada", "reason": "r", "abandon": True}
    with broker(tmp_path, "redrive.after_publish") as (url, process):
        with txmq.connect(url) as client, peer(url) as connection:
            for name in ("t", "other"):
                client.call("topic.create", name=name, partitions=1)
            for number in range(3):
                client.send("t", b"%d" % number)
            connection.dead_letters("g", "t", 3)
            with suppress(TxmqError):
                connection.call("dlq.redrive", **args, letters=[["t", 0, 0], ["t", 0, 1]])
        assert process.status() == -SIGKILL
    with broker(tmp_path) as (url, _process), txmq.connect(url) as client:
        again = client.call("dlq.redrive", **args, select={"states": ["open", "abandoned"]})
        assert (len(again["done"]), len(again["refused"])) == (1, 2)
        assert [found.headers["txmq-origin-offset"] for found in client.find("other")] == [*"012"]
    report({"kills": 1})


def test_a_broker_killed_while_it_gives_letters_to_another_group_gives_each_once(
    tmp_path: Path, report: Report
) -> None:
    args = {"group": "g", "to_group": "h", "operator": "ada", "reason": "r", "abandon": True}
    with broker(tmp_path, "redrive.after_copy") as (url, process):
        with txmq.connect(url) as client, peer(url) as connection:
            client.call("topic.create", name="t", partitions=1)
            for number in range(3):
                client.send("t", b"%d" % number)
            connection.dead_letters("g", "t", 3)
            connection.call(
                "consumer.join", group="h", member="n", instance="n", topics=["t"], start="last"
            )
            edit(connection, 0, b"mended")
            with suppress(TxmqError):
                connection.call("dlq.redrive", **args, select={})
        assert process.status() == -SIGKILL
    with broker(tmp_path, "redrive.after_give") as (url, process):
        with peer(url) as connection, suppress(TxmqError):
            connection.call("dlq.redrive", **args, letters=[["t", 0, 0], ["t", 0, 1]])
        assert process.status() == -SIGKILL
    with broker(tmp_path) as (url, _process), peer(url) as connection:
        again = connection.call("dlq.redrive", **args, select={"states": ["open", "abandoned"]})
        assert (len(again["done"]), len(again["refused"])) == (1, 2)
        joined = connection.call("consumer.join", group="h", member="n", instance="n", topics=["t"])
        chunks = connection.fetch("h", "n", joined["generation"])
        bodies = [BatchView(bytes(chunk.batch)).bodies[chunk.first_row] for chunk in chunks]
        assert sorted(bodies) == [b"1", b"2", b"mended"]
    report({"kills": 2})


def test_an_operator_killed_between_two_calls_of_a_redrive_can_repeat_it(
    tmp_path: Path, report: Report
) -> None:
    large = b"x" * (3 << 20)  # a call copies one of these
    with broker(tmp_path) as (url, _process), txmq.connect(url) as client, peer(url) as connection:
        for name in ("t", "other"):
            client.call("topic.create", name=name, partitions=1)
        for number in range(3):
            client.send("t", b"%d" % number + large)
        connection.dead_letters("g", "t", 3)
        for point, status in (("letters.between_calls", -SIGKILL), ("", 0)):
            (tmp_path / f"cli{point}").mkdir()
            command = Running(
                tmp_path / f"cli{point}", "dlq", "redrive", "g", "--all", "--to", "other",
                "--abandon", "--operator", "ada", "--reason", "r", "--yes", "--broker", url,
                environment={**ENVIRONMENT, VARIABLE: point},
            )  # fmt: skip
            assert command.status() == status
        states = [letter["state"] for letter in connection.call("dlq.list", group="g")["letters"]]
        assert states == ["abandoned"] * 3
        assert [one.headers["txmq-origin-offset"] for one in client.find("other")] == [*"012"]
    report({"kills": 1})


def export(directory: Path, url: str, point: str, file: Path) -> int:
    """Let an operator export and mark all letters; return the status of the command."""
    (directory / point).mkdir()
    command = Running(
        directory / point, "dlq", "export", "g", "--file", str(file), "--mark", "--operator", "ada",
        "--broker", url, environment={**ENVIRONMENT, VARIABLE: point},
    )  # fmt: skip
    return int(command.status())


def test_an_operator_killed_in_an_export_has_no_file_that_is_not_whole(
    tmp_path: Path, report: Report
) -> None:
    file = tmp_path / "letters.jsonl"
    with broker(tmp_path) as (url, _process), peer(url) as connection:
        connection.call("topic.create", name="t", partitions=1)
        with txmq.connect(url) as client:
            for number in range(3):
                client.send("t", b"%d" % number)
        connection.dead_letters("g", "t", 3)
        assert export(tmp_path, url, "export.before_name", file) == -SIGKILL
        assert not file.exists()
        assert export(tmp_path, url, "export.after_name", file) == -SIGKILL
        assert len(read_file(file)[1]) == 3, "it is whole"
        letters = connection.call("dlq.list", group="g", select={})["letters"]
        assert {letter["exported_at"] for letter in letters} == {0}, "nothing was marked"
    report({"kills": 2})


def test_an_operator_killed_in_an_import_can_repeat_it_and_sends_each_message_once(
    tmp_path: Path, report: Report
) -> None:
    file = tmp_path / "letters.jsonl"
    with broker(tmp_path) as (url, _process), txmq.connect(url) as client, peer(url) as connection:
        for name in ("t", "other"):
            client.call("topic.create", name=name, partitions=1)
        for number in range(3):
            client.send("t", b"%d" % number)
        connection.dead_letters("g", "t", 3)
        client.export_letters("g", file)
        for point, sent in (("import.before_decision", 0), ("import.after_decision", 3)):
            (tmp_path / point).mkdir()
            command = Running(
                tmp_path / point, "dlq", "import", str(file), "--to", "other", "--operator",
                "ada", "--yes", "--broker", url,
                environment={**ENVIRONMENT, VARIABLE: point},
            )  # fmt: skip
            assert command.status() == -SIGKILL
            assert len(list(client.find("other"))) == sent
        assert client.import_letters(file, to="other", operator="ada").repeated
        assert [message.body for message in client.find("other")] == [b"0", b"1", b"2"]
    report({"kills": 2})
