"""The command line against a broker that runs, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.cli.peer import peer
from tests.cli.support import reply, run
from tests.patient_clients import default_timeout
from txmq.broker.service import refuse_exposed
from txmq.config.broker import TlsSettings, load_broker
from txmq.errors import ConfigError
from txmq.model.decider import ByChecker
from txmq.testing.forked import txmq_command
from txmq.testing.own_broker import OwnBroker
from txmq.testing.processes import TXMQ, Running, running
from txmq.testing.wait import PATIENCE_S, wait_until

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, str]]:
    """A broker and its URL, for the whole module: tests use topics of their own."""
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
        ready = json.loads(process.first_line())
        assert ready["console"] == ""
        yield process, ready["ready"]


@pytest.fixture
def broker(served: tuple[Running, str]) -> str:
    return served[1]


def test_a_broker_says_where_it_serves_and_ends_in_order(tmp_path: Path) -> None:
    arguments = (
        "broker",
        "--create-topics",
        "--data",
        str(tmp_path / "data"),
        "--listen",
        "127.0.0.1:0",
    )
    with running(tmp_path, *arguments, command=TXMQ) as process:
        line = process.first_line()
        assert re.fullmatch(r"ready txmq://127\.0\.0\.1:[1-9]\d*", line)
        assert process.terminate() == 0
        assert process.out.read_text() == line + "\n"
    lives = [event["state"] for event in process.events() if event["event"] == "broker.life"]
    assert lives[-3:] == ["SERVING", "DRAINING", "CLOSED"]
    assert any(event["event"] == "broker.recovered" for event in process.events())


def test_a_broker_goes_on_whose_log_nobody_reads(tmp_path: Path) -> None:
    where = ("--create-topics", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
    process = subprocess.Popen(
        [*TXMQ, "broker", *where], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        url = process.stdout.readline().removeprefix("ready ").strip()
        process.stderr.close()
        host, _, port = url.removeprefix("txmq://").partition(":")
        for _ in range(3):  # each is worth a line of the log
            with socket.create_connection((host, int(port)), PATIENCE_S) as stranger:
                stranger.sendall(bytes(64))
                assert stranger.recv(4_096), "the refusal comes after the line of the log"
        reply("send", "orders", "hello", broker=url)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def without_umask(*arguments: str) -> None:
    """Run a command with the umask that leaves every mode as it is."""
    os.umask(0)
    txmq_command(*arguments)


def test_what_a_broker_makes_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    data = tmp_path / "above" / "data"
    arguments = ("broker", "--create-topics", "--data", str(data), "--listen", "127.0.0.1:0")
    with running(tmp_path / "run", *arguments, command=without_umask) as process:
        url = process.first_line().removeprefix("ready ")
        reply("send", "orders", "hello", broker=url)
        assert process.terminate() == 0
    made = [data.parent, data, *data.rglob("*")]
    assert {"directory", "lock", "index", "log"} <= {path.name for path in made}
    modes = {str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in made}
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


def test_what_was_sent_outlives_the_broker(tmp_path: Path) -> None:
    for sends in (1, 0):
        with running(
            tmp_path,
            "broker",
            "--create-topics",
            "--data",
            str(tmp_path / "data"),
            "--listen",
            "127.0.0.1:0",
        ) as process:
            url = process.first_line().removeprefix("ready ")
            for _ in range(sends):
                reply("send", "orders", "hello", "--partition", "2", broker=url)
            found = reply("tail", "orders", "--no-follow", broker=url)
            assert (found["partition"], found["offset"], found["body"]) == (2, 0, "hello")
            assert process.terminate(signal.SIGINT) == 0


def test_topics_are_made_listed_grown_and_deleted(broker: str) -> None:
    made = reply("topic", "create", "letters", "--partitions", "3", broker=broker)
    assert made == {
        "name": "letters",
        "partitions": 3,
        "epoch": made["epoch"],
        "topic_id": made["topic_id"],
    }
    assert [
        t["partitions"]
        for t in reply("topic", "list", broker=broker)["topics"]
        if t["name"] == "letters"
    ] == [3]
    assert reply("topic", "set", "letters", "--partitions", "4", broker=broker)["partitions"] == 4
    shown = reply("topic", "show", "letters", broker=broker)
    assert (shown["ends"], shown["groups"]) == ([0, 0, 0, 0], [])
    altered = reply(
        "topic", "alter", "letters", "--set", "retention=2d", "--set", "writable=no", broker=broker
    )
    assert (altered["settings"]["retention_ms"], altered["settings"]["policy"]) == (
        172_800_000,
        "default",
    )
    assert reply("topic", "show", "letters", broker=broker)["settings"] == altered["settings"]
    closed = run("send", "letters", "hello", "--json", "--broker", broker)
    assert (closed.exit_code, json.loads(closed.stderr)["error"]) == (1, "TopicClosed")
    wrong = run("topic", "alter", "letters", "--set", "retention=soon", "--broker", broker)
    assert (wrong.exit_code, "36h" in wrong.stderr) == (2, True)
    again = run("topic", "create", "letters", "--partitions", "9", "--broker", broker)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "letters" in again.stderr
    reply("topic", "delete", "letters", broker=broker)
    gone = run("topic", "show", "letters", "--json", "--broker", broker)
    assert (gone.exit_code, json.loads(gone.stderr)["error"]) == (1, "UnknownTopic")


def test_a_message_is_sent_and_read_with_all_that_belongs_to_it(broker: str) -> None:
    options = ("--key", "o-1", "--tag", "made", "--header", "source=shop")
    sent = reply("send", "orders", *options, broker=broker, stdin=b"\xff\x00")
    found = reply("tail", "orders", "--no-follow", broker=broker)
    assert {name: found[name] for name in ("message_id", "topic", "partition", "offset")} == {
        name: sent[name] for name in ("message_id", "topic", "partition", "offset")
    }
    assert (found["key"], found["tag"], found["headers"]) == ("o-1", "made", {"source": "shop"})
    assert found["body_base64"] == "/wA="
    only = ("--partition", str(sent["partition"]), "--broker", broker)
    line = run("tail", "orders", "--no-follow", *only).stdout
    assert line.endswith(
        f" orders/{sent['partition']}/{sent['offset']} key=o-1 tag=made source=shop /wA=\n"
    )


def test_tail_begins_at_the_given_offset(broker: str) -> None:
    for number in range(4):
        reply("send", "numbers", str(number), "--partition", "1", broker=broker)
    bodies = [
        found["body"] for found in reply("tail", "numbers", "--from", "1", "-n", "2", broker=broker)
    ]
    assert bodies == ["1", "2"]
    assert reply("tail", "numbers", "--no-follow", "--from", "last", broker=broker) == []
    assert reply("tail", "numbers", "--no-follow", "--from", "99", broker=broker) == []
    assert run("tail", "numbers", "--partition", "99", "--broker", broker).exit_code == 2


def test_tail_begins_at_the_first_message_of_a_time(broker: str) -> None:
    for number in range(6):
        place = ("--partition", str(number % 2))
        reply("send", "timed", str(number), *place, broker=broker)
    stored = [
        found["stored_at"]
        for found in reply("tail", "timed", "--from", "first", "-n", "6", broker=broker)
    ]
    fourth = (EPOCH + timedelta(microseconds=sorted(stored)[3])).isoformat()

    def bodies(*arguments: str) -> list[str]:
        found = reply("tail", "timed", "--no-follow", *arguments, broker=broker)
        return sorted(line["body"] for line in found)

    assert bodies("--from", fourth) == ["3", "4", "5"]
    assert bodies("--from", fourth, "--partition", "1") == ["3", "5"]
    assert bodies("--from", "1h") == ["0", "1", "2", "3", "4", "5"]
    assert bodies("--from", "2999-01-01") == []
    following = reply("tail", "timed", "--from", fourth, "-n", "3", broker=broker)
    assert sorted(line["body"] for line in following) == ["3", "4", "5"]


def test_tail_follows_until_it_is_interrupted(broker: str, tmp_path: Path) -> None:
    reply("send", "news", "first", "--partition", "0", broker=broker)
    with running(tmp_path, "tail", "news", "--from", "first", "--json", "--broker", broker) as tail:
        assert json.loads(tail.first_line())["body"] == "first"
        for partition in (5, 0):
            reply("send", "news", f"to {partition}", "--partition", str(partition), broker=broker)
        wait_until(lambda: tail.out.read_text().count("\n") == 3, what="three messages")
        assert tail.terminate(signal.SIGINT) == 0
    assert {json.loads(line)["body"] for line in tail.out.read_text().splitlines()[1:]} == {
        "to 5",
        "to 0",
    }


def test_where_nothing_is_there_lists_are_empty(tmp_path: Path) -> None:
    with OwnBroker(tmp_path) as empty:
        assert reply("group", "list", broker=empty.url) == {"groups": []}
        assert reply("tx", "list", broker=empty.url) == {"transactions": []}
        assert run("tx", "list", "--broker", empty.url).stdout == "no transactions\n"


def test_what_is_not_there_is_unknown_by_name(broker: str) -> None:
    for arguments, error in (
        (("group", "show", "nobody"), "UnknownGroup"),
        (("group", "pause", "nobody"), "UnknownGroup"),
        (("dlq", "list", "nobody"), "UnknownGroup"),
        (("dlq", "stats", "nobody"), "UnknownGroup"),
        (("dlq", "replay", "nobody", "orders/1/2"), "UnknownGroup"),
        (("dlq", "abandon", "nobody", "orders/1/2", "--reason", "x"), "UnknownGroup"),
        (("group", "reset", "nobody", "orders", "--to", "first"), "UnknownGroup"),
        (("tx", "show", "019a0000000070008000000000000001"), "UnknownTransaction"),
        (
            ("tx", "commit", "019a0000000070008000000000000001", "--reason", "x"),
            "UnknownTransaction",
        ),
    ):
        ran = run(*arguments, "--json", "--broker", broker)
        assert (ran.exit_code, json.loads(ran.stderr)["error"]) == (1, error), arguments


def test_an_operator_decides_a_transaction_without_a_decider(broker: str) -> None:
    reply("topic", "create", "halves", "--partitions", "1", broker=broker)
    with peer(broker) as shop:
        lost, seen = (shop.half("halves", body, ByChecker("shop")) for body in (b"lost", b"seen"))
    listed = reply("tx", "list", broker=broker)["transactions"]
    assert [(row["token"], row["state"], row["messages"]) for row in listed] == [
        (lost, "UNDECIDED", 1),
        (seen, "UNDECIDED", 1),
    ]
    assert seen in run("tx", "list", "--broker", broker).stdout
    assert reply("tx", "check", seen, broker=broker)["due"] == 1
    why = ("--reason", "seen in the books", "--operator", "ada")
    assert reply("tx", "rollback", lost, *why, broker=broker) == {
        "state": "ROLLED_BACK",
        "repeated": False,
    }
    assert reply("tx", "commit", seen, *why, broker=broker) == {
        "state": "PUBLISHED",
        "repeated": False,
    }
    assert reply("tx", "commit", seen, *why, broker=broker)["repeated"] is True
    shown = reply("tx", "show", seen, broker=broker)
    assert (shown["state"], shown["by"], shown["reason"]) == (
        "PUBLISHED",
        "operator ada",
        "seen in the books",
    )
    assert shown["batches"][0]["topic"] == "halves"
    assert reply("tail", "halves", "--no-follow", broker=broker)["body"] == "seen"
    flipped = run("tx", "rollback", seen, *why, "--json", "--broker", broker)
    assert (flipped.exit_code, json.loads(flipped.stderr)["error"]) == (1, "Conflict")
    assert [
        row["token"]
        for row in reply("tx", "list", "--state", "conflicts", broker=broker)["transactions"]
    ] == [seen]
    assert reply("tx", "list", broker=broker) == {"transactions": []}


def test_a_group_is_seen_paused_and_sent_back(broker: str) -> None:
    for number in range(3):
        reply("send", "bills", str(number), "--partition", "0", broker=broker)
    with peer(broker) as billing:
        billing.dead_letters("billing", "bills", 3)
    [group] = [
        row for row in reply("group", "list", broker=broker)["groups"] if row["group"] == "billing"
    ]
    assert (group["topics"], group["letters"]) == (["bills"], 3)
    assert "billing" in run("group", "list", "--broker", broker).stdout
    reply("group", "pause", "billing", broker=broker)
    assert reply("group", "show", "billing", broker=broker)["state"] == "paused"
    assert "paused" in run("group", "show", "billing", "--broker", broker).stdout
    reply("group", "resume", "billing", broker=broker)
    reset = ("group", "reset", "billing", "bills", "--to", "0=1", "--reason", "again")
    for options in (("--dry-run",), ()):
        [target] = reply(*reset, *options, broker=broker)["positions"]
        assert (target["partition"], target["before"], target["after"]) == (0, 3, 1)
    assert reply(*reset, "--dry-run", broker=broker)["positions"][0]["before"] == 1
    assert reply("dlq", "stats", "billing", broker=broker)["letters"] == 1


def test_letters_are_seen_replayed_and_abandoned(broker: str) -> None:
    for number in range(5):
        reply(
            "send", "parcels", f"parcel {number}", "--partition", "7", "--key", "k", broker=broker
        )
    with peer(broker) as shipping:
        places = [
            "/".join(map(str, place)) for place in shipping.dead_letters("shipping", "parcels", 5)
        ]
    listed = reply("dlq", "list", "shipping", "--limit", "2", "--bodies", broker=broker)
    assert len(listed["letters"]) == 2
    rest = reply("dlq", "list", "shipping", "--after", str(listed["next"]), broker=broker)
    assert len(rest["letters"]) == 3
    shown = reply("dlq", "show", "shipping", places[0], "--body", broker=broker)
    assert "body" not in reply("dlq", "show", "shipping", places[0], broker=broker)
    assert (shown["body"], shown["error_type"], shown["error_text"]) == (
        "parcel 0",
        "ValueError",
        "no such order",
    )
    result = run("dlq", "list", "shipping", "--limit", "2", "--broker", broker)
    printed = result.stdout
    assert printed.split()[:2] == ["place", "key"]
    assert all(place in printed for place in places[:2])
    assert "no such order" in printed
    assert result.stderr.startswith("there may be more: --after 0")
    assert reply("dlq", "stats", "shipping", broker=broker)["by_fingerprint"] == {"f-1": 5}
    where = ("-w", "key=k", "-w", "text=SUCH", "-w", "fingerprint:f-1 age<1h")
    assert reply("dlq", "stats", "shipping", *where, broker=broker)["counted"] == 5
    reply("dlq", "select", "save", "lost", *where, broker=broker)
    assert "lost" in run("dlq", "select", "list", "--broker", broker).stdout
    assert len(reply("dlq", "list", "shipping", "--select", "lost", broker=broker)["letters"]) == 5
    assert reply("dlq", "list", "shipping", "-w", "key=K", broker=broker)["letters"] == []
    reply("dlq", "note", "shipping", "f-1", "ticket 7", broker=broker)
    assert "ticket 7" in run("dlq", "stats", "shipping", "--broker", broker).stdout
    reply("dlq", "select", "delete", "lost", broker=broker)
    assert reply("dlq", "replay", "shipping", places[0], broker=broker)["refused"] == []
    gone = run("dlq", "replay", "shipping", places[0], "--broker", broker)
    assert gone.exit_code == 1
    assert "not dead" in gone.stdout
    reply("dlq", "abandon", "shipping", places[1], "--reason", "obsolete", broker=broker)
    assert reply("dlq", "show", "shipping", places[1], broker=broker)["state"] == "abandoned"
    assert len(reply("dlq", "replay", "shipping", "--all", broker=broker)["done"]) == 3
    assert reply("dlq", "stats", "shipping", broker=broker)["letters"] == 0


def test_letters_with_large_bodies_come_in_pages_that_fit(broker: str) -> None:
    bodies = [letter * 600_000 for letter in "abc"]
    for body in bodies:
        reply("send", "crates", "--partition", "0", broker=broker, stdin=body.encode())
    with peer(broker) as hauling:
        hauling.dead_letters("hauling", "crates", 3)
    found: list[str] = []
    more: tuple[str, ...] = ()
    after, pages = "", 0
    while after is not None:
        page = reply("dlq", "list", "hauling", "--bodies", *more, broker=broker)
        assert all((letter["deaths"], letter["attempts"]) == (0, 1) for letter in page["letters"])
        found += [letter["body"] for letter in page["letters"]]
        after, pages = page["next"], pages + 1
        more = ("--after", str(after))
    assert (found, pages) == (bodies, 3)
    assert len(reply("dlq", "list", "hauling", broker=broker)["letters"]) == 3


def test_without_a_broker_the_error_says_how_to_start_one() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    with default_timeout(0.1):
        ran = run("topic", "list", "--broker", f"txmq://127.0.0.1:{port}")
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert "txmq broker" in ran.stderr


def test_a_second_broker_in_the_same_directory_is_refused(
    served: tuple[Running, str], tmp_path: Path
) -> None:
    data = served[0].out.parent / "data"
    with running(
        tmp_path, "broker", "--create-topics", "--data", str(data), "--listen", "127.0.0.1:0"
    ) as second:
        assert second.status() == 1
    assert second.out.read_text() == ""
    output = second.err.read_text().splitlines()[-1]
    assert output.startswith("txmq: ")
    assert str(data) in output
    assert "(" in output, "a hint is missing"


def test_a_port_that_is_taken_is_an_error(served: tuple[Running, str], tmp_path: Path) -> None:
    taken = served[1].removeprefix("txmq://")
    with running(
        tmp_path, "broker", "--create-topics", "--data", str(tmp_path / "data"), "--listen", taken
    ) as second:
        assert second.status() == 1
    output = second.err.read_text().splitlines()[-1]
    assert output.startswith("txmq: ")
    assert taken in output


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("[broker]\ndata = 'x'\nlisten = 'here'", "broker.listen: "),
        ("[broker]\ndata = 'x'\npartition = 3", "broker.partition: there is no such setting"),
        ("[broker", "is not TOML"),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(tmp_path: Path, text: str, output: str) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(text)
    ran = run("broker", "--config", str(file))
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (1, "", 1)
    assert output in ran.stderr
    assert str(file) in ran.stderr


@pytest.mark.parametrize(
    ("listen", "events"),
    [("0.0.0.0:7650", 1), ("[::]:7650", 1), ("10.1.2.3:0", 1), ("127.0.0.1:0", 0), ("[::1]:0", 0)],
)
def test_an_address_that_others_reach_needs_users_and_tls(listen: str, events: int) -> None:
    section: dict[str, Any] = {"data": "/data", "listen": listen}
    open_to_all = load_broker(None, section)
    with capture_logs() as logged:
        if events:
            with pytest.raises(ConfigError, match="no users and no TLS") as refused:
                refuse_exposed(open_to_all, has_users=False)
            assert "txmq user init-admin" in refused.value.hint
            with pytest.raises(ConfigError, match="no TLS"):
                refuse_exposed(open_to_all, has_users=True)
        trusting = load_broker(None, {**section, "trusted_network": True})
        refuse_exposed(trusting, has_users=False)
        tls = TlsSettings(cert=Path("c"), key=Path("k"))
        refuse_exposed(open_to_all.model_copy(update={"tls": tls}), has_users=True)
    assert [event["event"] for event in logged] == ["broker.exposed"] * events
    assert all(event["log_level"] == "warning" and event["hint"] for event in logged)


def test_letters_are_exported_mended_and_sent_elsewhere(broker: str, tmp_path: Path) -> None:
    for number in range(3):
        reply("send", "cases", f"crate {number}", "--partition", "1", broker=broker)
    reply("topic", "create", "spare", "--partitions", "1", broker=broker)
    with peer(broker) as shipping:
        places = [
            "/".join(map(str, place)) for place in shipping.dead_letters("casing", "cases", 3)
        ]
    why = ("--reason", "a wrong number")
    reply("dlq", "edit", "casing", places[0], "--body", "crate zero", *why, broker=broker)
    shown = reply("dlq", "show", "casing", places[0], "--diff", broker=broker)
    assert shown["diff"][-2:] == ["-crate 0", "+crate zero"]
    path = str(tmp_path / "letters")
    assert reply("dlq", "export", "casing", "--file", path, "--mark", broker=broker)["marked"] == 3
    assert reply("dlq", "show", "casing", places[0], broker=broker)["exported_at"] > 0
    assert reply("dlq", "import", path, "--to", "spare", broker=broker)["messages"] == 3
    copied = reply("dlq", "redrive", "casing", "--all", "--to", "spare", *why, broker=broker)
    assert len(copied["done"]) == 3
    found = reply("tail", "spare", "--no-follow", broker=broker)
    bodies = ["crate zero", "crate 1", "crate 2"]
    assert [one["body"] for one in found] == bodies + bodies
    assert {one["headers"]["txmq-origin-topic"] for one in found} == {"cases"}
    abandoned = run("dlq", "edit", "casing", "cases/1/99", "--body", "x", *why, "--broker", broker)
    assert abandoned.exit_code == 1
    assert "has no dead letter" in abandoned.stderr
