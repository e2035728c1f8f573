"""`txmq xa`: listing, recovery, and the exit status for monitoring."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.cli.support import ScriptedClient, client, run
from tests.client.real import RealBroker
from tests.fixtures_postgres import Databases
from tests.recover.world import RecoveryWorld
from tests.tx.postgres.prepared_branches import gid_of, leave_prepared, roll_back_all_prepared
from tests.tx.postgres.support import backend_pid, blocked_thread, producer, rows
from txmq.client.blocking.connect import connect
from txmq.client.protocol.transaction.tokens import new_token
from txmq.model.message import COMMIT
from txmq.testing.own_broker import OwnBroker
from txmq.testing.postgres_server import PostgresServer
from txmq.testing.processes import running
from txmq.testing.wait import wait_until

__all__ = ["client"]

TOKEN = "0198c5b8d6f27d6d8a1f000000000001"
SAFETY_S = 3.0  # longer than a busy machine stands still


def test_branches_are_listed_with_the_given_filters(client: ScriptedClient) -> None:
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


def test_a_forgotten_outcome_has_operator_and_reason(client: ScriptedClient) -> None:
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
def test_a_forced_outcome_needs_a_reason_and_excludes_others(arguments: Sequence[str]) -> None:
    assert run("xa", "doctor", "--config", "none.toml", *arguments).exit_code == 2


def test_without_databases_there_is_nothing_to_recover(tmp_path: Path) -> None:
    (tmp_path / "xa.toml").write_text("[xa]\nsafety_s = 1")
    result = run("xa", "recover", "--config", str(tmp_path / "xa.toml"))
    assert (result.exit_code, "[[xa.database]]" in result.stderr) == (1, True)


class XaCommands(RecoveryWorld):
    """A world with one broker, and a file of settings."""

    def begin_committed(self) -> UUID:
        """Begin a transaction and commit it beside a recoverer, which rolls back what
        stands undecided for SAFETY_S.
        """
        token = self.begin(stored=1, prepared=())
        self.decide(token, COMMIT)
        self.prepare("shop", token)
        return token

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
) -> Iterator[XaCommands]:
    name = databases.borrow()
    with closing(connect(deciding_home.url, service="orders")) as client:
        made = XaCommands([deciding_home], [client], {"shop": postgres.dsn(name)})
        yield made
        roll_back_all_prepared(postgres.dsn(name))
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
    """Return the exit status of a command, and its output, or else its error."""
    with (
        TemporaryDirectory(prefix="txmq-test-") as name,
        running(Path(name), *arguments) as process,
    ):
        return process.status(), process.out.read_text() or process.err.read_text()


def test_prepared_branches_are_recovered_in_two_passes(shop: XaCommands, tmp_path: Path) -> None:
    committed, undecided = (
        shop.begin(stored=1, prepared=("shop",)),
        shop.begin(stored=1, prepared=("shop",)),
    )
    shop.decide(committed, COMMIT)
    status, output = txmq("xa", "recover", "--config", shop.configure(tmp_path, safety_s=0.2))
    assert status == 0
    by_gid = {row["gid"]: (row["action"], row["done"]) for row in output["branches"] if row["gid"]}
    assert by_gid == {
        shop.gid(committed, "shop"): ("commit prepared", True),
        shop.gid(undecided, "shop"): ("roll back prepared", True),
    }
    shop.audit(stored=1)


def test_a_watching_recoverer_ends_new_branches(shop: XaCommands, tmp_path: Path) -> None:
    config = shop.configure(tmp_path, safety_s=SAFETY_S, every_s=0.1)
    with running(tmp_path / "1", "xa", "recover", "--watch", "--config", config) as recoverer:
        assert recoverer.first_line() == "ready shop"
        shop.begin_committed()
        undecided = shop.begin(stored=1, prepared=("shop",))
        wait_until(lambda: not shop.standing("shop"), what="nothing stands prepared")
        wait_until(
            lambda: shop.state(undecided) == "ROLLED_BACK", what="the undecided one is rolled back"
        )
        assert recoverer.terminate() == 0
    assert {"xa.finished"} == {event["event"] for event in recoverer.events()}
    shop.audit(stored=1)


def test_a_broker_recovers_by_itself_where_databases_are_configured(
    postgres: PostgresServer, databases: Databases, tmp_path: Path
) -> None:
    name = databases.borrow()
    dsn = postgres.dsn(name)
    times = f"[xa]\nsafety_s = {SAFETY_S}\nevery_s = 0.1\n"
    section = f"{times}[[xa.database]]\nname = 'shop'\ndsn = {json.dumps(dsn)}\n"
    with OwnBroker(tmp_path, section) as broker, closing(connect(broker.url)) as client:
        world = XaCommands([broker], [client], {"shop": dsn})  # type: ignore[list-item]  # nothing is read from it
        token = world.begin_committed()
        lost = world.begin(stored=0, prepared=("shop",))
        wait_until(lambda: not world.standing("shop"), what="nothing stands prepared")
        assert world.effects("shop") == {token.hex}
        assert world.state(lost) == "ROLLED_BACK"
        assert broker.stop() == 0
    databases.give_back(name)


def test_the_doctor_names_the_orphan_its_age_its_locks_and_blocked_sessions(
    postgres: PostgresServer, shop: XaCommands, tmp_path: Path
) -> None:
    token = shop.begin(stored=1, prepared=("shop",))
    gid = shop.gid(token, "shop")
    config = shop.configure(tmp_path, safety_s=3_600.0, alarm_s=0.001)
    with closing(producer(shop.dsns["shop"])) as waiter:
        pid = backend_pid(waiter)
        thread = blocked_thread(postgres, waiter, "LOCK TABLE effects")
        status, output = txmq("xa", "doctor", "--config", config)
        table = printed("xa", "doctor", "--config", config)[1]
        rows(shop.dsns["shop"], "SELECT pg_terminate_backend(%s, 5000)", pid)
        thread.join()
    assert status == 1  # it has stood for too long
    [row] = [row for row in output["branches"] if row["gid"] == gid]
    assert row["age_s"] > 0
    assert {"on": "effects", "mode": "RowExclusiveLock"} in row["locks"]
    assert [(one["pid"], one["on"], one["mode"]) for one in row["blocked"]] == [
        (pid, "effects", "AccessExclusiveLock")
    ]
    assert row["horizon"] >= 1
    assert (row["decision"], row["action"], row["done"]) == ("undecided", "wait", False)
    assert row["reason"].endswith("younger than the safety interval of 3600 s")
    [alarm] = [one["alarm"] for one in output["alarms"] if one["alarm"].startswith(gid)]
    assert f"blocks pid {pid} on effects" in alarm
    for part in (gid, f"pid {pid}", "effects", "undecided", "wait"):
        assert part in table
    assert shop.standing("shop") == [gid]


def test_the_doctor_ends_branches_as_the_logs_decided_and_no_others(
    shop: XaCommands, tmp_path: Path
) -> None:
    committed, undecided = (
        shop.begin(stored=1, prepared=("shop",)),
        shop.begin(stored=1, prepared=("shop",)),
    )
    lost, foreign = gid_of(uuid4(), new_token()), "131075_Z3RyaWQ=_YnF1YWw="
    for gid in (lost, foreign):
        leave_prepared(shop.dsns["shop"], gid, f"INSERT INTO effects VALUES ('{gid}')")
    shop.decide(committed, COMMIT)
    config = shop.configure(tmp_path, safety_s=3_600.0)
    status, output = txmq("xa", "doctor", "--config", config, "--fix")
    assert status == 1  # the branch of a log that nobody has
    by_gid = {
        row["gid"]: (row["action"], row["done"], row["needs_hand"])
        for row in output["branches"]
        if row["gid"]
    }
    assert by_gid == {
        shop.gid(committed, "shop"): ("commit prepared", True, False),
        shop.gid(undecided, "shop"): ("wait", False, False),
        lost: ("leave alone", False, True),
        foreign: ("leave alone", False, False),
    }
    assert shop.standing("shop") == [shop.gid(undecided, "shop"), lost, foreign]
    status, output = txmq(
        "xa", "doctor", "--config", shop.configure(tmp_path, safety_s=0.001), "--fix"
    )
    assert shop.standing("shop") == [lost, foreign]
    assert shop.state(undecided) == "ROLLED_BACK"


def test_a_forced_commit_of_a_lost_branch_is_recorded_in_the_journal(
    shop: XaCommands, tmp_path: Path
) -> None:
    token = new_token()
    gid = gid_of(uuid4(), token)
    leave_prepared(shop.dsns["shop"], gid, "INSERT INTO effects VALUES ('lost')")
    config = shop.configure(tmp_path)
    force = ("--force-commit", gid, "--reason", "seen on paper", "--operator", "ada")
    status, output = txmq("xa", "doctor", "--config", config, *force)
    assert (status, output["ending"], output["journal"]) == (0, "DONE", shop.brokers[0].url)
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


def test_a_forced_rollback_of_a_foreign_branch_is_refused(shop: XaCommands, tmp_path: Path) -> None:
    foreign = "131075_Z3RyaWQ=_YnF1YWw="
    leave_prepared(shop.dsns["shop"], foreign, "INSERT INTO effects VALUES ('foreign')")
    force = ("--force-rollback", foreign, "--reason", "in the way")
    status, output = txmq("xa", "doctor", "--config", shop.configure(tmp_path), *force)
    assert (status, output["error"]) == (1, "TransactionError")
    assert shop.standing("shop") == [foreign]


def test_committed_branches_are_verified_since_a_time(shop: XaCommands, tmp_path: Path) -> None:
    shop.decide(shop.begin(stored=1, prepared=("shop",)), COMMIT)
    config = shop.configure(tmp_path)
    output: dict[str, list[object]] = {"branches": [], "alarms": [], "troubles": []}
    assert txmq("xa", "verify", "--config", config, "--since", "2026-07-01T12:00:00Z") == (
        0,
        output,
    )
    assert run("xa", "verify", "--config", config, "--since", "yesterday").exit_code == 2
