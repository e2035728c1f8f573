"""Commands that use a database: its tables, a resolver, and the development broker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import psycopg2
import pytest

import txmq
from tests.bench.clients.halves import store
from tests.cli.peer import peer
from tests.cli.support import reply, run
from tests.tx.postgres.support import xid_of
from txmq.client.protocol.transaction.tokens import new_token
from txmq.model.decider import ByChecker, ByPostgres
from txmq.testing.postgres_server import PostgresServer
from txmq.testing.processes import TXMQ, running
from txmq.testing.wait import wait_until
from txmq.tx.postgres.blocking import insert_token, read_server
from txmq.tx.postgres.brokers import report
from txmq.tx.postgres.session import connect
from txmq.wire.bundle import BundleDescription


def test_the_tables_are_made_and_looked_over(empty_database: str) -> None:
    missing = run("schema", "check", empty_database, "--json")
    assert (missing.exit_code, json.loads(missing.stderr)["error"]) == (1, "SchemaMissing")
    for _ in range(2):
        assert run("schema", "install", empty_database).stdout.split() == ["version", "1"]
    assert json.loads(run("schema", "check", empty_database, "--json").stdout) == {
        "version": 1,
        "remarks": [],
    }


def test_the_database_may_come_from_the_environment(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TXMQ_DSN", database)
    assert run("schema", "check").exit_code == 0


def test_remarks_about_the_tables_are_shown_with_status_1(database: str) -> None:
    with (
        closing(psycopg2.connect(database)) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("ALTER DATABASE " + connection.info.dbname + " SET synchronous_commit = off")
    result = run("schema", "check", database)
    assert result.exit_code == 1
    assert "synchronous_commit is off" in result.stdout


def test_a_database_that_is_away_is_an_error_without_its_password() -> None:
    result = run("schema", "install", "host=127.0.0.1 port=1 password=hunter2")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert "hunter2" not in result.stderr


def test_brokers_are_listed_and_a_lost_one_is_taken_out_for_a_reason(database: str) -> None:
    lost, token = uuid4(), new_token()
    with closing(connect(database, application_name="test")) as connection:
        report(connection, lost, "b-1", token)
    [output] = json.loads(run("schema", "brokers", database, "--json").stdout)["brokers"]
    assert (output["log_id"], output["name"], output["oldest_undecided"]) == (
        str(lost),
        "b-1",
        token.hex,
    )
    assert (output["waiting"], output["forgotten_at"]) == (0, None)
    assert run("schema", "brokers", database, "--forget", str(lost)).exit_code == 2
    unknown = run(
        "schema", "brokers", database, "--forget", uuid4().hex, "--reason", "gone", "--yes"
    )
    assert (unknown.exit_code, "has reported here" in unknown.stderr) == (1, True)
    asked = run("schema", "brokers", database, "--forget", lost.hex, "--reason", "gone")
    assert (asked.exit_code, f"{lost}, which has reported at 2" in asked.stderr) == (1, True)
    [output] = json.loads(run("schema", "brokers", database, "--json").stdout)["brokers"]
    assert output["forgotten_at"] is None
    result = run(
        "schema", "brokers", database, "--forget", lost.hex, "--reason", "its disk burnt", "--json"
    )
    [output] = json.loads(result.stdout)["brokers"]
    assert (output["forgotten_reason"], output["forgotten_at"] >= output["reported_at"]) == (
        "its disk burnt",
        True,
    )


def test_an_operator_gives_the_database_to_a_data_directory(database: str) -> None:
    log_id, directory = uuid4(), uuid4()
    with closing(connect(database, application_name="test")) as connection:
        report(connection, log_id, "b-1", None)
    give = ("schema", "brokers", database, "--take-over", str(log_id))
    assert run(*give, "--directory", str(directory)).exit_code == 2
    assert run(*give, "--reason", "restored").exit_code == 2
    result = run(*give, "--directory", str(directory), "--reason", "restored", "--json")
    [output] = json.loads(result.stdout)["brokers"]
    assert (output["directory"], output["boot_epoch"], output["lease_reason"]) == (
        str(directory),
        None,
        "restored",
    )


def state_of(token: str, broker: str) -> Any:
    return reply("tx", "show", token, broker=broker)["state"]


def test_a_resolver_of_its_own_decides_what_the_broker_cannot_find_out(
    database: str, tmp_path: Path
) -> None:
    broker_file, resolver_file = tmp_path / "broker.toml", tmp_path / "resolver.toml"
    section = "[[resolver]]\nname = 'shop'\ndsn = {}\n"
    broker_file.write_text(section.format(json.dumps("host=127.0.0.1 port=1 connect_timeout=1")))
    resolver_file.write_text(section.format(json.dumps(database)) + "[checks]\nfirst_s = 0.1\n")
    data = (
        "--data",
        str(tmp_path / "data"),
        "--config",
        str(broker_file),
        "--listen",
        "127.0.0.1:0",
    )
    with running(tmp_path / "1", "broker", "--create-topics", *data) as broker:
        url = broker.first_line().removeprefix("ready ")
        reply("topic", "create", "orders", "--partitions", "1", broker=url)
        with peer(url) as shop, closing(psycopg2.connect(database)) as connection:
            identity = read_server(connection).identity
            connection.rollback()
            committed = new_token()
            insert_token(connection, committed, [shop.log_id])
            xid = xid_of(connection)
            proved = shop.half(
                "orders", b"paid", ByPostgres(*identity, xid=xid, position=1), committed
            )
            connection.commit()
            absent = shop.half("orders", b"not paid", ByPostgres(*identity, xid=None, position=1))
        arguments = ("resolver", "--config", str(resolver_file), "--every", "0.05", "--broker", url)
        with running(tmp_path / "2", *arguments, command=TXMQ) as resolver:
            assert resolver.first_line() == "ready shop"
            wait_until(lambda: state_of(proved, url) == "PUBLISHED", what="the commit is found")
            wait_until(lambda: state_of(absent, url) == "ROLLED_BACK", what="the rollback is found")
            assert resolver.terminate() == 0
        decided = {
            event["token"]: event["answer"]
            for event in resolver.events()
            if event["event"] == "resolver.decided"
        }
        assert decided == {proved: "COMMIT", absent: "ROLLBACK"}
        assert len(json.loads(run("schema", "brokers", database, "--json").stdout)["brokers"]) == 1
        assert reply("tail", "orders", "--no-follow", broker=url)["body"] == "paid"
        assert broker.terminate() == 0


def test_a_resolver_of_its_own_finds_its_transactions_behind_very_many_others(
    database: str, tmp_path: Path
) -> None:
    broker_file, resolver_file = tmp_path / "broker.toml", tmp_path / "resolver.toml"
    section = "[[resolver]]\nname = 'shop'\ndsn = {}\n"
    broker_file.write_text(section.format(json.dumps("host=127.0.0.1 port=1 connect_timeout=1")))
    resolver_file.write_text(section.format(json.dumps(database)) + "[checks]\nfirst_s = 0.1\n")
    data = ("--data", str(tmp_path / "data"), "--config", str(broker_file))
    with (
        running(
            tmp_path / "1", "broker", "--create-topics", *data, "--listen", "127.0.0.1:0"
        ) as broker,
        closing(psycopg2.connect(database)) as connection,
    ):
        url = broker.first_line().removeprefix("ready ")
        reply("topic", "create", "bench", "--partitions", "1", broker=url)
        others = [new_token() for _ in range(10_001)]
        with txmq.connect(url) as client:
            store(client, BundleDescription(ByChecker("billing"), "s", (), 60_000_000), others)
        with peer(url) as shop:
            absent = shop.half("bench", b"", ByPostgres(*read_server(connection).identity, None, 1))
        connection.rollback()
        arguments = ("resolver", "--config", str(resolver_file), "--every", "0.05", "--broker", url)
        with running(tmp_path / "2", *arguments, command=TXMQ) as resolver:
            wait_until(lambda: state_of(absent, url) == "ROLLED_BACK", what="the rollback is found")
            assert resolver.terminate() == 0
        assert broker.terminate() == 0


def test_a_developer_gets_a_broker_and_a_database_that_know_each_other(tmp_path: Path) -> None:
    with running(tmp_path, "dev", "--json", "--listen", "127.0.0.1:0", command=TXMQ) as dev:
        addresses = json.loads(dev.first_line())
        url, dsn = addresses["broker"], addresses["postgres"]
        assert re.fullmatch(r"postgresql://\w+(:[^:@/]+)?@127\.0\.0\.1:\d+/\w+(\?.*)?", dsn)
        reply("topic", "create", "orders", "--partitions", "1", broker=url)
        assert run("schema", "check", dsn).exit_code == 0
        with peer(url) as shop, closing(psycopg2.connect(dsn)) as connection:
            identity = read_server(connection).identity
            connection.rollback()
            token = new_token()
            insert_token(connection, token, [shop.log_id])
            half = shop.half("orders", b"paid", ByPostgres(*identity, xid=None, position=1), token)
            connection.commit()
        assert reply("tx", "check", half, broker=url)["due"] == 1
        wait_until(
            lambda: state_of(half, url) == "PUBLISHED",
            what="the broker's resolver has asked the database",
        )
        assert dev.terminate() == 0
    with pytest.raises(psycopg2.OperationalError):
        psycopg2.connect(dsn)


def is_registered(connection: Any) -> bool:
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM txmq_broker")
        return cursor.fetchone() is not None


def test_a_developer_s_own_server_gets_the_databases_that_are_named(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    there, made = postgres.create_database(), f"txmq_{uuid4().hex[:12]}"
    arguments = ("--dsn", postgres.dsn(), "--database", there, "--database", made)
    try:
        with running(
            tmp_path, "dev", "--json", "--listen", "127.0.0.1:0", *arguments, command=TXMQ
        ) as dev:
            addresses = json.loads(dev.first_line())
            assert [one["name"] for one in addresses["databases"]] == [there, made]
            with peer(addresses["broker"]) as shop:
                assert shop.call("topic.describe", names=["new"], create=True)["created"] == ["new"]
            for one in addresses["databases"]:
                assert run("schema", "check", one["postgres"]).exit_code == 0
                with closing(psycopg2.connect(one["postgres"])) as connection:
                    wait_until(partial(is_registered, connection), what="the broker works on it")
            assert dev.terminate() == 0
        for one in addresses["databases"]:
            shown = run("schema", "brokers", one["postgres"], "--json").stdout
            [broker] = json.loads(shown)["brokers"]
            assert "txmq dev has ended" in broker["forgotten_reason"]
        refused = run("dev", "--dsn", "postgresql://nobody@127.0.0.1:1/x")
        assert (refused.exit_code, "Traceback" in refused.output) == (1, False)
    finally:
        postgres.drop_database(made)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that a server can use which runs as another user. Pytest's own
    directories are private.
    """
    with TemporaryDirectory(prefix="txmq-test-dev-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_a_developer_s_data_stays_in_the_given_directory(tmp_path: Path, reachable: Path) -> None:
    data = reachable / "data"
    for number in range(2):
        with running(
            tmp_path / str(number), "dev", "--json", "--data", str(data), "--listen", "127.0.0.1:0"
        ) as dev:
            addresses = json.loads(dev.first_line())
            topics = reply("topic", "list", broker=addresses["broker"])["topics"]
            assert [topic["name"] for topic in topics] == ["orders"][:number]
            with (
                closing(psycopg2.connect(addresses["postgres"])) as connection,
                connection.cursor() as cursor,
            ):
                cursor.execute("CREATE TABLE IF NOT EXISTS kept (n int)")
                cursor.execute("INSERT INTO kept VALUES (1)")
                cursor.execute("SELECT count(*) FROM kept")
                assert cursor.fetchone() == (number + 1,)
                connection.commit()
            run("topic", "create", "orders", "--broker", addresses["broker"])
            assert dev.terminate() == 0
