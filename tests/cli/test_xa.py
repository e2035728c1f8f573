"""`txmq xa`: what is listed and told, what is finished, and the exit status that
monitoring goes by.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import pytest

from tests.cli.support import ScriptedClient, client, run
from tests.client.real import RealBroker
from tests.fixtures_postgres import Databases
from tests.postgres.orphans import gid_of, leave, sweep
from tests.postgres.support import backend, producer, rows, waiting
from tests.recovery.world import World
from txmq.client.blocking.client import connect
from txmq.client.protocol.transaction.tokens import new_token
from txmq.model.message import COMMIT
from txmq.testing.broker import OwnBroker
from txmq.testing.postgres import PostgresServer
from txmq.testing.processes import running
from txmq.testing.wait import wait_until

__all__ = ["client"]

TOKEN = "0198c5b8d6f27d6d8a1f000000000001"


def test_branches_are_listed_as_asked_for(client: ScriptedClient) -> None:
    client.replies = [
        {"transactions": [{"token": TOKEN, "state": "UNDECIDED", "heuristics": []}], "next": None}
    ]
    result = run(
        "xa",
        "list",
        "--kind",
        "home",
        "--owner",
        "orders",
        "--heuristic",
        "--limit",
        "7",
        "--after",
        TOKEN,
    )
    assert (result.exit_code, TOKEN in result.stdout) == (0, True)
    asked = {"kind": "home", "owner": "orders", "heuristic": True, "after": TOKEN, "limit": 7}
    assert client.calls == [("xa.list", asked)]


def test_what_is_dealt_with_is_forgotten_with_who_and_why(client: ScriptedClient) -> None:
    client.replies = [{}]
    result = run("xa", "forget", TOKEN, "--reason", "row written again", "--json")
    assert json.loads(result.stdout) == {"token": TOKEN, "forgotten": True}
    assert client.calls == [
        ("xa.forget", {"token": TOKEN, "operator": "ada", "reason": "row written again"})
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--fix", "--force-commit", "g"),
        ("--force-commit", "g", "--force-rollback", "g"),
        ("--force-commit", "g"),
    ],
)
def test_a_hand_needs_a_reason_and_does_one_thing(arguments: Sequence[str]) -> None:
    assert run("xa", "doctor", "--config", "none.toml", *arguments).exit_code == 2


def test_without_databases_there_is_nothing_to_recover(tmp_path: Path) -> None:
    (tmp_path / "xa.toml").write_text("[xa]\nsafety_s = 1")
    result = run("xa", "recover", "--config", str(tmp_path / "xa.toml"))
    assert (result.exit_code, "[[xa.database]]" in result.stderr) == (1, True)


class Shop(World):
    """A world with one broker, and a file of settings."""

    def configure(self, directory: Path, **settings: object) -> str:
        """The path of a file with its databases and its broker."""
        lines = ["[xa]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())]
        for name, dsn in self.dsns.items():
            lines += ["[[xa.database]]", f"name = {json.dumps(name)}", f"dsn = {json.dumps(dsn)}"]
        lines += ["[[xa.broker]]", f"url = {json.dumps(self.brokers[0].url)}"]
        path = directory / "xa.toml"
        path.write_text("\n".join(lines))
        return str(path)


@pytest.fixture
def shop(
    deciding_home: RealBroker, postgres: PostgresServer, databases: Databases
) -> Iterator[Shop]:
    name = databases.take()
    with closing(connect(deciding_home.url, service="orders")) as client:
        made = Shop([deciding_home], [client], {"shop": postgres.dsn(name)})
        yield made
        sweep(postgres.dsn(name))
        made.close()
    databases.give_back(name)


@pytest.fixture(scope="module")
def deciding_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    broker = RealBroker(tmp_path_factory.mktemp("home"))
    yield broker
    broker.stop()


def txmq(*arguments: str) -> tuple[int, Any]:
    """Exit status and JSON of a command in a process of its own."""
    status, text = printed(*arguments, "--json")
    return status, json.loads(text)


def printed(*arguments: str) -> tuple[int, str]:
    """Exit status of a command, and what it prints: its error where it prints nothing
    else.
    """
    with (
        TemporaryDirectory(prefix="txmq-test-") as name,
        running(Path(name), *arguments) as process,
    ):
        return process.status(), process.out.read_text() or process.err.read_text()


def test_what_is_left_is_recovered_in_two_passes(shop: Shop, tmp_path: Path) -> None:
    committed, undecided = (
        shop.begin(stored=1, prepared=("shop",)),
        shop.begin(stored=1, prepared=("shop",)),
    )
    shop.decide(committed, COMMIT)
    status, told = txmq("xa", "recover", "--config", shop.configure(tmp_path, safety_s=0.2))
    assert status == 0
    by_gid = {row["gid"]: (row["action"], row["done"]) for row in told["branches"] if row["gid"]}
    assert by_gid == {
        shop.gid(committed, "shop"): ("commit prepared", True),
        shop.gid(undecided, "shop"): ("roll back prepared", True),
    }
    shop.audit(stored=1)


def test_a_recoverer_that_watches_finishes_what_comes_up(shop: Shop, tmp_path: Path) -> None:
    config = shop.configure(tmp_path, safety_s=0.3, every_s=0.1)
    with running(tmp_path / "1", "xa", "recover", "--watch", "--config", config) as recoverer:
        assert recoverer.first_line() == "ready shop"
        committed, undecided = (
            shop.begin(stored=1, prepared=("shop",)),
            shop.begin(stored=1, prepared=("shop",)),
        )
        shop.decide(committed, COMMIT)
        wait_until(lambda: not shop.standing("shop"), what="nothing stands prepared")
        wait_until(
            lambda: shop.state(undecided) == "ROLLED_BACK", what="the undecided one is rolled back"
        )
        assert recoverer.end() == 0
    assert {"xa.finished"} == {event["event"] for event in recoverer.events()}
    shop.audit(stored=1)


def test_a_broker_recovers_by_itself_where_databases_are_configured(
    postgres: PostgresServer, databases: Databases, tmp_path: Path
) -> None:
    name = databases.take()
    dsn = postgres.dsn(name)
    section = f"[xa]\nsafety_s = 0.3\nevery_s = 0.1\n[[xa.database]]\nname = 'shop'\ndsn = {json.dumps(dsn)}\n"
    with OwnBroker(tmp_path, section) as broker, closing(connect(broker.url)) as client:
        world = World([broker], [client], {"shop": dsn})  # type: ignore[list-item]  # nothing is read from it
        token = world.begin(stored=1, prepared=("shop",))
        world.decide(token, COMMIT)
        lost = world.begin(stored=0, prepared=("shop",))
        wait_until(lambda: not world.standing("shop"), what="nothing stands prepared")
        assert world.effects("shop") == {token.hex}
        assert world.state(lost) == "ROLLED_BACK"
        assert broker.stop() == 0
    databases.give_back(name)


def test_the_doctor_names_the_orphan_its_age_its_locks_and_whom_it_blocks(
    postgres: PostgresServer, shop: Shop, tmp_path: Path
) -> None:
    token = shop.begin(stored=1, prepared=("shop",))
    gid = shop.gid(token, "shop")
    config = shop.configure(tmp_path, safety_s=3_600.0, alarm_s=0.001)
    with closing(producer(shop.dsns["shop"])) as waiter:
        pid = backend(waiter)
        thread = waiting(postgres, waiter, "LOCK TABLE effects")
        status, told = txmq("xa", "doctor", "--config", config)
        table = printed("xa", "doctor", "--config", config)[1]
        rows(shop.dsns["shop"], "SELECT pg_terminate_backend(%s, 5000)", pid)
        thread.join()
    assert status == 1  # it has stood for too long
    [row] = [row for row in told["branches"] if row["gid"] == gid]
    assert row["age_s"] > 0
    assert {"on": "effects", "mode": "RowExclusiveLock"} in row["locks"]
    assert [(one["pid"], one["on"], one["mode"]) for one in row["blocked"]] == [
        (pid, "effects", "AccessExclusiveLock")
    ]
    assert row["horizon"] >= 1
    assert (row["decision"], row["action"], row["done"]) == ("undecided", "wait", False)
    assert row["reason"].endswith("younger than the safety interval of 3600 s")
    [alarm] = [one["alarm"] for one in told["alarms"] if one["alarm"].startswith(gid)]
    assert f"blocks pid {pid} on effects" in alarm
    for part in (gid, f"pid {pid}", "effects", "undecided", "wait"):
        assert part in table
    assert shop.standing("shop") == [gid]


def test_the_doctor_does_what_the_logs_decide_and_nothing_else(shop: Shop, tmp_path: Path) -> None:
    committed, undecided = (
        shop.begin(stored=1, prepared=("shop",)),
        shop.begin(stored=1, prepared=("shop",)),
    )
    lost, foreign = gid_of(uuid4(), new_token()), "131075_Z3RyaWQ=_YnF1YWw="
    for gid in (lost, foreign):
        leave(shop.dsns["shop"], gid, f"INSERT INTO effects VALUES ('{gid}')")
    shop.decide(committed, COMMIT)
    config = shop.configure(tmp_path, safety_s=3_600.0)
    status, told = txmq("xa", "doctor", "--config", config, "--fix")
    assert status == 1  # the branch of a log that nobody has
    by_gid = {
        row["gid"]: (row["action"], row["done"], row["needs_hand"])
        for row in told["branches"]
        if row["gid"]
    }
    assert by_gid == {
        shop.gid(committed, "shop"): ("commit prepared", True, False),
        shop.gid(undecided, "shop"): ("wait", False, False),
        lost: ("leave alone", False, True),
        foreign: ("leave alone", False, False),
    }
    assert shop.standing("shop") == [shop.gid(undecided, "shop"), lost, foreign]
    status, told = txmq(
        "xa", "doctor", "--config", shop.configure(tmp_path, safety_s=0.001), "--fix"
    )
    assert shop.standing("shop") == [lost, foreign]
    assert shop.state(undecided) == "ROLLED_BACK"


def test_a_hand_ends_what_no_log_decides_and_the_journal_knows(shop: Shop, tmp_path: Path) -> None:
    token = new_token()
    gid = gid_of(uuid4(), token)
    leave(shop.dsns["shop"], gid, "INSERT INTO effects VALUES ('lost')")
    config = shop.configure(tmp_path)
    force = ("--force-commit", gid, "--reason", "seen on paper", "--operator", "ada")
    status, told = txmq("xa", "doctor", "--config", config, *force)
    assert (status, told["ending"], told["journal"]) == (0, "DONE", shop.brokers[0].url)
    assert shop.effects("shop") == {"lost"}
    _, listed = txmq("xa", "list", "--heuristic", "--broker", shop.brokers[0].url)
    [entry] = [
        entry
        for row in listed["transactions"]
        if row["token"] == token.hex
        for entry in row["heuristics"]
    ]
    assert (entry["branch"], entry["operator"], entry["reason"]) == (gid, "ada", "seen on paper")
    assert (
        txmq("xa", "forget", token.hex, "--reason", "booked", "--broker", shop.brokers[0].url)[0]
        == 0
    )
    assert shop.journal(token) == []


def test_a_hand_on_a_foreign_branch_is_refused(shop: Shop, tmp_path: Path) -> None:
    foreign = "131075_Z3RyaWQ=_YnF1YWw="
    leave(shop.dsns["shop"], foreign, "INSERT INTO effects VALUES ('foreign')")
    force = ("--force-rollback", foreign, "--reason", "in the way")
    status, told = txmq("xa", "doctor", "--config", shop.configure(tmp_path), *force)
    assert (status, told["error"]) == (1, "TransactionError")
    assert shop.standing("shop") == [foreign]


def test_what_was_committed_is_verified_since_a_time(shop: Shop, tmp_path: Path) -> None:
    shop.decide(shop.begin(stored=1, prepared=("shop",)), COMMIT)
    config = shop.configure(tmp_path)
    told: dict[str, list[object]] = {"branches": [], "alarms": [], "troubles": []}
    assert txmq("xa", "verify", "--config", config, "--since", "2026-07-01T12:00:00Z") == (0, told)
    assert run("xa", "verify", "--config", config, "--since", "yesterday").exit_code == 2
