"""`txmq recover` with a broker that runs, and stores on this machine."""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.cli.peer import LONGEST_WAIT_MS, Peer, peer
from tests.cli.support import NOBODY, reply, run
from txmq.model.retry import FailureReport
from txmq.recover.local import (
    Change,
    LocalStore,
    Place,
    State,
    StoredMessage,
    StoreOwner,
    read_export,
)
from txmq.testing.processes import Running, running

MESSAGES = 6
BODY = b"\xff\x00body"
FAILURE = FailureReport("KeyError", "no such order", "f-1")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    """A broker and its URL, for the whole module: tests use groups of their own."""
    directory = tmp_path_factory.mktemp("broker")
    arguments = (
        "broker",
        "--create-topics",
        "--data",
        str(directory / "data"),
        "--listen",
        "127.0.0.1:0",
        "--json",
    )
    with running(directory, *arguments) as process:
        url = json.loads(process.first_line())["ready"]
        reply("topic", "create", "orders", "--partitions", "1", broker=url)
        with txmq.connect(url, service="shop") as client:
            for number in range(MESSAGES):
                client.send("orders", BODY, key=f"k{number}", headers={"n": str(number)})
        yield process, url


class Shop:
    """A consumer with a local store, of which the broker knows three messages."""

    def __init__(self, connection: Peer, url: str, directory: Path, group: str) -> None:
        self.url, self.group, self.directory = url, group, directory
        self._peer = connection
        joined = connection.call(
            "consumer.join", group=group, member="m-1", instance="i-1", topics=["orders"],
            start="first",
        )  # fmt: skip
        self._claim = {"group": group, "member": "m-1", "generation": joined["generation"]}
        connection.fetch(**self._claim)
        topic_id = joined["topics"]["orders"]
        owner = StoreOwner(group, "orders", topic_id, connection.log_id, ordered=False)
        self.store, _report = LocalStore.open(str(directory), owner, now=_now)
        self.id = self.store.id.hex
        self._topic_id = topic_id
        for offset in range(3):
            place = Place(topic_id, 0, offset)
            message = StoredMessage(
                place, f"k{offset}", None, {"n": str(offset)}, BODY, f"a-{offset}", 1, 1, 1, 1
            )
            self.store.put([(message, 7, FAILURE)])
        self.report(*((offset, "stored", 1) for offset in range(3)))

    def report(self, *entries: tuple[int, str, int]) -> dict[str, Any]:
        rows = [
            ["orders", self._topic_id, 0, offset, state, attempt, 7, list(FAILURE[:3]), 0, 0]
            for offset, state, attempt in entries
        ]
        return self._peer.call(
            "consumer.stored", **self._claim, store=self.id, host="h", entries=rows
        )

    def change(self, offset: int, state: State, attempt: int) -> None:
        """Record an outcome on disk that the broker does not hear of."""
        self.store.record([Change(Place(self._topic_id, 0, offset), state, attempt, 9, FAILURE)])

    def leave(self) -> None:
        """End the process, but not its disk."""
        self.store.close()
        self._peer.call("consumer.leave", group=self.group, member="m-1", instance="i-1")

    def ask(self, *arguments: str) -> Any:
        return reply("recover", *arguments, broker=self.url)

    def refused(self, *arguments: str) -> dict[str, Any]:
        result = run("recover", *arguments, "--json", "--broker", self.url)
        assert result.exit_code == 1, result.stdout
        error: dict[str, Any] = json.loads(result.stderr)
        assert error["hint"]
        return error

    def received(self) -> dict[int, int]:
        """Return what another member gets: offsets, and their attempts."""
        joined = self._peer.call(
            "consumer.join", group=self.group, member="m-2", instance="i-2", topics=["orders"]
        )
        claim = {"group": self.group, "member": "m-2", "generation": joined["generation"]}
        got = {
            offset: chunk.attempt
            for wait_ms in (LONGEST_WAIT_MS, 500)  # the second time nothing is left
            for chunk in self._peer.fetch(**claim, wait_ms=wait_ms)
            for offset in range(chunk.base_offset, chunk.base_offset + chunk.rows)
        }
        self._peer.call("consumer.leave", group=self.group, member="m-2", instance="i-2")
        return got


def _now() -> int:
    return time.time_ns() // 1_000


@pytest.fixture
def shop(
    served: tuple[Running, str], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Shop]:
    group = f"g{abs(hash(request.node.name)) % 1_000_000}"
    with peer(served[1]) as connection:
        made = Shop(connection, served[1], tmp_path / "stores", group)
        try:
            yield made
        finally:
            made.store.close()


def test_stores_are_listed_from_anywhere_and_on_the_machine(shop: Shop) -> None:
    [listed] = shop.ask("list", shop.group)["stores"]
    assert (listed["store"], listed["state"], listed["messages"]) == (shop.id, "owned", 3)
    [found] = shop.ask("list", "--data", str(shop.directory))["stores"]
    assert (found["store"], found["messages"], found["unreported"]) == (shop.id, 3, 3)
    assert found["owner_pid"] > 0
    for where in ((shop.group, shop.id), ("--data", str(shop.directory))):
        shown = shop.ask("show", *where, "--bodies")["list"]
        assert [row["offset"] for row in shown] == [0, 1, 2]
        assert {row["body_base64"] for row in shown} == {"/wBib2R5"}
        table = run("recover", "show", *where, "--broker", shop.url).stdout
        assert "1970-01-01 00:00:00.000Z" in table, "the due time"
        assert "no such order" in table
    listing = run("recover", "list", "--data", str(shop.directory)).stdout.splitlines()
    columns = listing[2].split()
    assert columns[:5] == ["group", "topic", "store", "messages", "settled"]
    assert len(columns) == len(set(columns)), "each column once"
    text = run("recover", "list", "--broker", shop.url).stdout
    assert "owned" in text
    group = reply("group", "show", shop.group, broker=shop.url)
    assert (group["at_consumers"], len(group["store_list"])) == (3, 1)


def test_orders_reach_a_live_store(shop: Shop) -> None:
    done = reply("retry", "now", shop.group, "--where", "state:local", broker=shop.url)["done"]
    assert len(done) == 3
    listed = reply("retry", "list", shop.group, broker=shop.url)["letters"]
    assert {(one["state"], "ordered to retry it" in one["held_by"]) for one in listed} == {
        ("local", True)
    }
    named = ("retry", "skip", shop.group, "orders/0/1", "--reason", "no use")
    skipped = reply(*named, broker=shop.url)
    assert skipped == {"done": [["orders", 0, 1]], "refused": []}
    orders = shop.report()["orders"]
    assert [(order[3], order[4]) for order in orders] == [(0, "retry"), (1, "drop"), (2, "retry")]
    result = run("retry", "now", shop.group, "orders/0/5", "--json", "--broker", shop.url)
    assert (result.exit_code, "not retried" in result.stdout) == (1, True)


def test_a_store_without_its_disk_is_adopted_by_the_brokers_copies(shop: Shop) -> None:
    error = shop.refused("adopt", shop.group, shop.id)
    assert (error["error"], "a member of" in error["message"]) == ("Conflict", True)
    shop.leave()
    alone = run("retry", "now", shop.group, "--all", "--json", "--broker", shop.url)
    assert (alone.exit_code, "has no owner" in alone.stdout) == (1, True)
    adopted = shop.ask("adopt", shop.group, shop.id, "--operator", "ada")
    assert adopted == {"store": shop.id, "adopted": 3, "left": 0, "verdicts": {}}
    assert shop.received() == {0: 2, 1: 2, 2: 2, 3: 1, 4: 1, 5: 1}


def test_a_copied_directory_tells_first_what_was_processed(shop: Shop, tmp_path: Path) -> None:
    shop.change(0, State.ACKED, 1)
    shop.change(1, State.STORED, 4)
    copy = tmp_path / "copy"
    shutil.copytree(shop.directory, copy)
    error = shop.refused("adopt", "--data", str(shop.directory))
    assert (error["error"], "in use" in error["message"]) == ("DirectoryInUse", True)
    shop.leave()
    adopted = shop.ask("adopt", "--data", str(copy))
    assert adopted == {
        "store": shop.id, "adopted": 2, "left": 0, "verdicts": {"settled": 1, "kept": 2},
    }  # fmt: skip
    assert shop.received() == {1: 5, 2: 2, 3: 1, 4: 1, 5: 1}


def test_an_export_has_exact_bodies_and_can_be_adopted(shop: Shop, tmp_path: Path) -> None:
    shop.change(2, State.ACKED, 1)
    from_disk = run("recover", "export", "--data", str(shop.directory), "--json").stdout
    from_broker = run("recover", "export", shop.group, shop.id, "--broker", shop.url).stdout
    for text in (from_disk, from_broker):
        export = read_export(text.splitlines())
        assert export.identity.id.hex == shop.id
        messages = [one.message for one in export.messages]
        assert {message.body for message in messages if message is not None} == {BODY}
    rows = [json.loads(line) for line in from_broker.splitlines()[1:-1]]
    assert [b64decode(row["body"]) for row in rows] == [BODY] * 3
    assert all(row["epoch"] for row in rows)
    shop.leave()
    file = tmp_path / "export"
    file.write_text(from_disk)
    assert shop.ask("adopt", "--export", str(file))["verdicts"] == {"kept": 2, "settled": 1}
    assert 2 not in shop.received()


def test_a_spool_without_an_owner_is_shown_and_sent(
    served: tuple[Running, str], tmp_path: Path
) -> None:
    spool = tmp_path / "spool"
    with txmq.connect(NOBODY, service="shop", spool=str(spool), timeout=0.1) as client:
        assert client.send("spooled", BODY, key="k", partition=0).spooled
    [found] = reply("recover", "list", "--data", str(spool), broker=NOBODY)["spools"]
    assert (found["messages"], found["owned"]) == (1, False)
    [shown] = reply("recover", "show", "--data", str(spool), "--bodies", broker=NOBODY)["list"]
    exported = reply("recover", "export", "--data", str(spool), broker=NOBODY)
    assert b64decode(exported["body"]) == b64decode(shown["body_base64"]) == BODY
    drain = ("recover", "drain", "--data", str(spool))
    drained = run(*drain, "--json", "--broker", served[1])
    assert drained.exit_code == 1, "something was not sent"
    assert json.loads(drained.stdout) == {"sent": 0, "left": 0, "refused": 1, "problems": []}
    [refused] = reply("recover", "show", "--data", str(spool), broker=NOBODY)["list"]
    assert refused["refusal"]["error"] == refused["error_type"] == "UnknownTopic"
    reply("topic", "create", "spooled", "--partitions", "1", broker=served[1])
    lost = spool / f"{1:032x}"
    lost.mkdir()
    (lost / "lock").touch()
    failed = run(*drain, "--json", "--broker", served[1])
    assert failed.exit_code == 1
    assert "is gone" in json.loads(failed.stdout)["problems"][0]["problem"]
    shutil.rmtree(lost)
    sent = reply(*drain, "--refused", broker=served[1])
    assert (sent["sent"], sent["left"]) == (1, 0)
    tailed = reply("tail", "spooled", "--no-follow", broker=served[1])
    assert (tailed["key"], b64decode(tailed["body_base64"])) == ("k", BODY)
    with txmq.connect(served[1], spool=str(spool)) as client:
        client.send("spooled", BODY)  # the directory now has what it knows of the topic
    drained = reply("recover", "list", "--data", str(spool), broker=NOBODY)
    assert drained == {"stores": [], "spools": []}
    assert run("recover", "show", "--data", str(spool)).stdout.endswith("no list\n")
    again = reply(*drain, broker=served[1])
    assert (again["sent"], again["left"]) == (0, 0)


def test_nothing_is_named_beside_a_directory(tmp_path: Path) -> None:
    ended = run("recover", "show", "billing", "ab" * 16, "--data", str(tmp_path))
    assert ended.exit_code == 2
    assert "--data means everything" in " ".join(ended.output.split())


def test_what_is_no_store_and_no_export_is_refused(shop: Shop, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for wrong in (empty, tmp_path / "nowhere"):
        for command in ("list", "show", "export", "adopt"):
            assert shop.refused(command, "--data", str(wrong))["error"] == "StoreError"
    for text, error in {
        "hello\n": "InvalidExport",
        '{"format": "txmq consumer store export", "version": 99}\n': "UnsupportedFormat",
        b"\xff\xfe": "InvalidExport",
        None: "StoreError",
    }.items():
        file = tmp_path / "wrong"
        file.unlink(missing_ok=True)
        if text is not None:
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
        assert shop.refused("adopt", "--export", str(file))["error"] == error
    cut = run("recover", "export", "--data", str(shop.directory)).stdout.splitlines()[:-1]
    (tmp_path / "wrong").write_text("\n".join(cut))
    shop.leave()
    assert shop.refused("adopt", "--export", str(tmp_path / "wrong"))["error"] == "InvalidExport"
    assert shop.refused("adopt", "other", shop.id, "--data", str(shop.directory))["error"] == (
        "ForeignStore"
    )
    [file] = shop.directory.glob("*/*/store.db")
    other = "UPDATE about SET value = '00000000-0000-4000-8000-000000000001' WHERE name = 'log_id'"
    for change, error in {
        other: "ForeignStore",
        "PRAGMA user_version = 99": "UnsupportedFormat",
    }.items():
        with closing(sqlite3.connect(file, isolation_level=None)) as database:
            database.execute(change)
        assert shop.refused("adopt", "--data", str(shop.directory))["error"] == error


def test_a_command_without_a_store_is_told_what_to_name(shop: Shop) -> None:
    for command in ("show", "adopt", "export"):
        result = run("recover", command, "--broker", shop.url)
        assert (result.exit_code, "--data" in result.stderr) == (2, True)
