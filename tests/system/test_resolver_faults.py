"""The broker's resolver beside databases that are away, and behind other sessions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg2
import pytest

import txmq
from tests.cli.peer import peer
from tests.cli.support import reply, run
from tests.fixtures_postgres import Databases
from tests.tx.postgres.support import identity_of, producer
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import TokenFenced
from txmq.model.decider import ByPostgres
from txmq.testing.postgres_server import OwnServer, PostgresServer
from txmq.testing.processes import running
from txmq.testing.wait import wait_until
from txmq.tx.postgres.blocking import insert_token

SETTINGS = """
[checks]
first_s = 0.2
then_s = {then_s}
longest_s = 86400.0
[alarms]
resolver_s = 1.0
"""
RESOLVER = "[[resolver]]\nname = {}\ndsn = {}\n"
SOON_US = 200_000
DAY_S = 86_400.0


@contextmanager
def broker(tmp_path: Path, then_s: float, more: str = "", **dsns: str) -> Iterator[str]:
    """Run a broker with these resolvers; yield its URL."""
    config = tmp_path / "broker.toml"
    sections = [RESOLVER.format(json.dumps(n), json.dumps(dsn)) for n, dsn in dsns.items()]
    config.write_text(SETTINGS.format(then_s=then_s) + "".join(sections) + more, "utf-8")
    data = ("--data", str(tmp_path / "data"), "--config", str(config))
    with running(
        tmp_path, "broker", "--create-topics", *data, "--listen", "127.0.0.1:0"
    ) as process:
        url = process.first_line().removeprefix("ready ")
        reply("topic", "create", "orders", "--partitions", "1", broker=url)
        yield url
        assert process.terminate() == 0


def shown(url: str, token: str) -> Any:
    return reply("tx", "show", token, broker=url)


def absent_half(url: str, dsn: str) -> str:
    """Store a half message whose transaction has vanished."""
    with peer(url) as shop:
        decider = ByPostgres(*identity_of(dsn), xid=None, position=1)
        return shop.half("orders", b"absent", decider, check_after_us=SOON_US)


def wait_for_rollback(url: str, token: str) -> None:
    wait_until(lambda: shown(url, token)["state"] == "ROLLED_BACK", what="the rollback")


def test_a_database_that_is_back_decides_long_before_the_next_check_is_due(
    crashable_postgres: OwnServer, crashable_database: str, tmp_path: Path
) -> None:
    with broker(tmp_path, DAY_S, shop=crashable_database) as url:
        with peer(url) as shop:
            decider = ByPostgres(*identity_of(crashable_database), xid=None, position=1)
            crashable_postgres.kill_server()
            try:
                token = shop.half("orders", b"absent", decider, check_after_us=SOON_US)
                wait_until(lambda: shown(url, token)["tries"] == 1, what="a check in vain")
            finally:
                crashable_postgres.start()
        wait_for_rollback(url, token)


def test_sessions_over_rows_hold_up_no_other_tokens_and_databases_and_are_named(
    database: str, postgres: PostgresServer, databases: Databases, tmp_path: Path
) -> None:
    other = databases.borrow()
    other_dsn = postgres.dsn(other)
    with (
        broker(tmp_path, DAY_S, shop=database, other=other_dsn) as url,
        txmq.connect(url) as client,
        closing(producer(database)) as psql,
        closing(producer(database)) as writer,
    ):
        with psql.cursor() as cursor:
            cursor.execute("SELECT FROM public.txmq_broker FOR UPDATE")
        with peer(url) as shop:
            token = new_token()
            insert_token(writer, token, [shop.log_id])
            decider = ByPostgres(*identity_of(database), xid=None, position=1)
            held = shop.half("orders", b"held", decider, token, check_after_us=SOON_US)
        for dsn in (database, other_dsn):
            wait_for_rollback(url, absent_half(url, dsn))
        wait_until(lambda: named(client, psql.info.backend_pid), what="an alarm")
        assert shown(url, held)["state"] == "UNDECIDED"
        writer.commit()
        wait_until(lambda: shown(url, held)["state"] == "PUBLISHED", what="the commit")
    databases.give_back(other)


def named(client: txmq.Client, pid: int) -> bool:
    """Return whether an alarm names a session."""
    alarms = client.call("broker.alarms")["alarms"]
    return any(
        alarm["name"] == "resolver.blocked" and f"session {pid} " in alarm["text"]
        for alarm in alarms
    )


def test_a_backend_that_stands_still_with_its_token_is_ended_if_the_settings_say_so(
    database: str, tmp_path: Path
) -> None:
    with (
        broker(tmp_path, DAY_S, "end_backend_after_s = 1", shop=database) as url,
        closing(producer(database)) as writer,
    ):
        with peer(url) as shop:
            token = new_token()
            insert_token(writer, token, [shop.log_id])
            decider = ByPostgres(*identity_of(database), xid=None, position=1)
            half = shop.half("orders", b"", decider, token, check_after_us=SOON_US)
        wait_for_rollback(url, half)
        with pytest.raises(psycopg2.OperationalError):
            writer.commit()


BY_HAND = ("--reason", "a try", "--operator", "ada")


def rolled_back_by_hand(url: str, token: str, *more: str) -> tuple[int, str]:
    """Return exit status and errors of `txmq tx rollback`."""
    result = run("tx", "rollback", token, *BY_HAND, *more, "--broker", url)
    return result.exit_code, result.stderr


def test_an_operator_s_rollback_fences_the_transaction_that_is_open(
    database: str, tmp_path: Path
) -> None:
    with (
        broker(tmp_path, DAY_S, shop=database) as url,
        closing(producer(database)) as writer,
        writer.cursor() as cursor,
    ):
        cursor.execute("CREATE TABLE orders (n int)")
        tokens = [new_token() for _ in range(2)]
        with peer(url) as shop:
            decider = ByPostgres(*identity_of(database), xid=None, position=1)
            early, late = (shop.half("orders", b"m", decider, token) for token in tokens)
            log_id = shop.log_id
        assert rolled_back_by_hand(url, early) == (0, "")
        with pytest.raises(TokenFenced):
            insert_token(writer, tokens[0], [log_id])
        writer.rollback()
        cursor.execute("CREATE TABLE orders (n int)")
        insert_token(writer, tokens[1], [log_id])
        status, errors = rolled_back_by_hand(url, late)
        assert (status, "--force" in errors) == (1, True)
        writer.commit()
        assert rolled_back_by_hand(url, late)[0] == 1
        assert shown(url, late)["state"] == "PUBLISHED"


def test_a_rollback_by_force_is_compared_when_the_database_is_back(
    crashable_postgres: OwnServer, crashable_database: str, tmp_path: Path
) -> None:
    token = new_token()
    with broker(tmp_path, DAY_S, shop=crashable_database) as url, txmq.connect(url) as client:
        with peer(url) as shop, closing(producer(crashable_database)) as writer:
            decider = ByPostgres(*identity_of(crashable_database), xid=None, position=1)
            half = shop.half("orders", b"m", decider, token)
            with writer.cursor() as cursor:
                cursor.execute("CREATE TABLE orders (n int)")
            insert_token(writer, token, [shop.log_id])
            writer.commit()
        crashable_postgres.kill_server()
        try:
            status, errors = rolled_back_by_hand(url, half)
            assert (status, "--force" in errors) == (1, True)
            assert rolled_back_by_hand(url, half, "--force")[0] == 0
            assert shown(url, half)["state"] == "ROLLED_BACK"
            wait_until(lambda: "transaction.unverified" in alarms(client), what="an alarm")
        finally:
            crashable_postgres.start()
        wait_until(lambda: "transaction.conflict" in alarms(client), what="an alarm")
        [conflict] = client.call("tx.list", state="conflicts")["transactions"]
        assert (conflict["token"], conflict["asked"]) == (half, "COMMIT")
        wait_until(lambda: "transaction.unverified" not in alarms(client), what="the comparison")


def alarms(client: txmq.Client) -> set[str]:
    return {alarm["name"] for alarm in client.call("broker.alarms")["alarms"]}
