"""The tables: installed once, checked, and refused if their version is another one."""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg2
import pytest

from tests.tx.postgres.support import LOG, new_token, poor_role, rows
from txmq.errors import DatabaseError, SchemaMissing, UnsupportedServer
from txmq.testing.postgres_server import PostgresServer
from txmq.tx.outbox_entry import order_key
from txmq.tx.postgres import schema
from txmq.tx.postgres.identity import Server, ServerIdentity, require_supported
from txmq.tx.postgres.schema import check, install
from txmq.tx.postgres.session import connect

SECURITY = Path(__file__).parents[3] / "docs" / "SECURITY.md"
BROKER_ROW = f"INSERT INTO txmq_broker (log_id, name, reported_at) VALUES ('{LOG}', 'main', now())"
INBOX_ROW = (
    'INSERT INTO txmq_inbox_recent (grp, log_id, topic_id, partition, epoch, "offset")'
    " VALUES ('g', gen_random_uuid(), 1, 0, 0, 1)"
)


def run_install(dsn: str) -> None:
    with closing(connect(dsn, application_name="test")) as connection:
        install(connection)


def run_check(dsn: str, *, service: bool = False) -> list[str]:
    with closing(connect(dsn, application_name="test")) as connection:
        return check(connection, service=service)


def tables(dsn: str) -> list[tuple[object, ...]]:
    return rows(
        dsn,
        "SELECT oid, relname, relkind FROM pg_class WHERE relname LIKE 'txmq%%' ORDER BY relname",
    )


def test_installing_twice_changes_nothing(empty_database: str) -> None:
    run_install(empty_database)
    before = tables(empty_database)
    rows(empty_database, INBOX_ROW)
    run_install(empty_database)
    assert tables(empty_database) == before
    assert rows(empty_database, "SELECT count(*) FROM txmq_inbox_recent") == [(1,)]
    assert run_check(empty_database) == []


def tables_without_identity(dsn: str) -> set[object]:
    """Return the tables of txmq whose rows nobody can delete under FOR ALL TABLES."""
    identified = (
        "EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND"
        " CASE c.relreplident WHEN 'd' THEN i.indisprimary ELSE i.indisreplident END)"
    )
    found = rows(
        dsn,
        "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
        " WHERE c.relkind IN ('r', 'p') AND (c.relname LIKE 'txmq%%' OR n.nspname = 'txmq')"
        f" AND c.relreplident <> 'f' AND NOT {identified}",
    )
    return {name for (name,) in found}


def test_all_tables_have_an_identity_for_logical_replication(empty_database: str) -> None:
    run_install(empty_database)
    assert tables_without_identity(empty_database) == set()
    rows(empty_database, "CREATE TABLE txmq_keyless (a int)")
    rows(empty_database, "ALTER TABLE txmq_inbox DROP CONSTRAINT txmq_inbox_pkey")
    assert tables_without_identity(empty_database) == {"txmq_keyless", "txmq_inbox"}


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE txmq_inbox_recent DISABLE TRIGGER USER",
        "ALTER TABLE txmq_inbox_recent ENABLE REPLICA TRIGGER txmq_claim_guard",
        "DROP TRIGGER txmq_claim_guard ON txmq_inbox_recent",
    ],
)
def test_the_check_says_that_nothing_guards_the_inbox(empty_database: str, change: str) -> None:
    run_install(empty_database)
    rows(empty_database, change)
    [remark] = run_check(empty_database)
    assert "ENABLE TRIGGER txmq_claim_guard" in remark


@pytest.mark.parametrize("installed", [True, False])
def test_a_later_version_begins_with_this_one(
    empty_database: str,
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,  # noqa: FBT001
) -> None:
    token = str(new_token())
    if installed:
        run_install(empty_database)
        rows(
            empty_database, "INSERT INTO txmq_token (tok, log_id) VALUES (%s, %s)", token, str(LOG)
        )
    steps = {1: schema.step(1), 2: "ALTER TABLE public.txmq_schema ADD COLUMN note text"}
    monkeypatch.setattr(schema, "VERSION", 2)
    monkeypatch.setattr(schema, "step", steps.__getitem__)
    before = ", but of 1" if installed else ""
    with pytest.raises(
        SchemaMissing, match=rf"no txmq tables of version 2{before} .*txmq schema install"
    ):
        run_check(empty_database)
    for _ in range(2):
        run_install(empty_database)
        assert run_check(empty_database) == []
    assert rows(empty_database, "SELECT version, note FROM txmq_schema") == [(2, None)]
    assert rows(empty_database, "SELECT tok::text FROM txmq_token") == [(token,)] * installed


@contextmanager
def encoded(postgres: PostgresServer, encoding: str) -> Iterator[str]:
    """Yield the DSN of a database of that encoding, with the tables."""
    name = f"txmq_{encoding.lower()}_{secrets.token_hex(4)}"
    postgres.execute(
        f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}'"
        " LC_COLLATE 'C' LC_CTYPE 'C'"
    )
    try:
        run_install(postgres.dsn(name))
        yield postgres.dsn(name)
    finally:
        postgres.drop_database(name)


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN2", "EUC_JP", "UTF8"])
def test_a_database_of_any_encoding_has_the_tables(postgres: PostgresServer, encoding: str) -> None:
    with encoded(postgres, encoding) as dsn:
        assert run_check(dsn) == []


@pytest.mark.parametrize("encoding", ["LATIN2", "UTF8"])
def test_sends_are_judged_and_ordered_by_their_bytes_in_utf_8(
    postgres: PostgresServer, encoding: str
) -> None:
    sent = "SELECT public.txmq_send('t', %s, 'b', %s)"
    with encoded(postgres, encoding) as dsn:
        rows(dsn, BROKER_ROW)
        rows(dsn, sent, "é" * 512, json.dumps({"h": "é" * 16_000}))
        rows(dsn, sent, None, None)
        keys = [[order_key("t", "é" * 512)], []]
        assert rows(dsn, "SELECT keys FROM txmq_outbox ORDER BY seq") == [(key,) for key in keys]
        with pytest.raises(psycopg2.Error, match="a key of 1026 bytes"):
            rows(dsn, sent, "é" * 513, None)
        with pytest.raises(psycopg2.Error, match="invalid headers"):
            rows(dsn, sent, None, json.dumps({"h": "é" * 16_400}))


@pytest.mark.parametrize("isolation", ["read committed", "serializable"])
def test_two_installations_at_once_take_turns(empty_database: str, isolation: str) -> None:
    [(name,)] = rows(empty_database, "SELECT current_database()")
    rows(empty_database, f"ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'")
    failures: list[BaseException] = []

    def attempt() -> None:
        try:
            run_install(empty_database)
        except DatabaseError as error:
            failures.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert run_check(empty_database) == []


def test_a_database_without_tables_is_reported_with_the_remedy(empty_database: str) -> None:
    with pytest.raises(
        SchemaMissing, match=r"txmq schema install 'host=\S+ port=\d+ dbname=txmq_\w+ user=\w+'"
    ) as raised:
        run_check(empty_database)
    assert "password" not in str(raised.value)


def test_tables_of_a_newer_txmq_are_left_alone(database: str) -> None:
    rows(database, "UPDATE txmq_schema SET version = 99")
    for refused in (run_check, run_install):
        with pytest.raises(SchemaMissing, match="version 99"):
            refused(database)
    assert rows(database, "SELECT version FROM txmq_schema") == [(99,)]


def test_missing_rights_and_weak_defaults_are_pointed_out(database: str) -> None:
    [(name,)] = rows(database, "SELECT current_database()")
    rows(database, f"ALTER DATABASE {name} SET synchronous_commit = off")
    rows(
        database,
        "INSERT INTO txmq_token (tok, log_id)"
        " VALUES ('ffffffff-ffff-7fff-8fff-ffffffffffff', gen_random_uuid())",
    )
    with poor_role(database) as (role, dsn):
        rows(
            database,
            f"GRANT SELECT ON txmq_schema, txmq_token, txmq_token_default, txmq_inbox TO {role}",
        )
        remarks = run_check(dsn)
    assert (
        "the role may not INSERT on txmq_token: GRANT INSERT ON public.txmq_token TO the role"
        in remarks
    )
    assert (
        "the role may not EXECUTE txmq_claim:"
        " GRANT EXECUTE ON FUNCTION public.txmq_claim TO the role" in remarks
    )
    assert any("DELETE on txmq_inbox_recent" in remark for remark in remarks)
    assert any("without a partition" in remark for remark in remarks)
    assert any("synchronous_commit is off" in remark for remark in remarks)


def test_a_role_without_any_right_learns_all_that_it_lacks(database: str) -> None:
    with poor_role(database) as (role, dsn):
        remarks = run_check(dsn)
        rows(database, f"GRANT SELECT ON txmq_schema TO {role}")
        granted = run_check(dsn)
    lacking = (
        "the role may not SELECT on txmq_schema: GRANT SELECT ON public.txmq_schema TO the role"
    )
    assert lacking in remarks
    assert any("INSERT on txmq_token" in remark for remark in remarks)
    assert granted == [remark for remark in remarks if remark != lacking]


def test_a_role_that_may_not_install_learns_what_it_needs(empty_database: str) -> None:
    with (
        poor_role(empty_database) as (_role, dsn),
        closing(connect(dsn, application_name="test")) as connection,
        pytest.raises(DatabaseError, match="installing the schema") as raised,
    ):
        install(connection)
    assert raised.value.sqlstate == "42501"
    assert "GRANT CREATE ON DATABASE and ON SCHEMA public" in raised.value.hint


def test_grants_as_documented_are_what_brokers_and_services_need(empty_database: str) -> None:
    blocks = re.findall(r"```sql\n(.*?)^```", SECURITY.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    [(database, superuser)] = rows(empty_database, "SELECT current_database(), current_user")
    with (
        poor_role(empty_database, "broker") as (broker, broker_dsn),
        poor_role(empty_database, "services") as (services, services_dsn),
    ):
        names = {"shop": database, "txmq": broker, "app": services, "postgres": superuser}
        before, after = (
            re.sub(r"(?<=DATABASE )shop|(?<=TO )\w+", lambda found: str(names[found[0]]), block)
            for block in blocks
        )
        rows(empty_database, before)
        run_install(broker_dsn)
        lacking = run_check(services_dsn, service=True)
        assert any("may not INSERT on txmq_token" in remark for remark in lacking)
        [blind] = run_check(broker_dsn)
        assert f"{broker} owns txmq_timeline_history" in blind
        rows(empty_database, after)
        assert run_check(broker_dsn) == []
        assert run_check(services_dsn, service=True) == []
        assert {remark.partition(":")[0] for remark in run_check(services_dsn)} == {
            "the role may not INSERT on txmq_broker",  # only brokers do
            "the role may not UPDATE on txmq_broker",
            "the role may not EXECUTE txmq_outbox_settle",
            "the role may not EXECUTE txmq_timeline_history",
        }
        rows(empty_database, BROKER_ROW)
        rows(services_dsn, "SELECT txmq_token_insert(gen_random_uuid(), %s)", str(LOG))
        rows(services_dsn, "SELECT txmq_outbox_waits(%s, NULL)", str(LOG))
        rows(services_dsn, "SELECT txmq.send('orders', 'k', 'body'::text)")
        assert rows(services_dsn, "SELECT txmq_claim('g', %s, 7, 0, 1, 3, '{5}')", str(LOG)) == [
            (5,)
        ]


@pytest.mark.parametrize(("version", "in_recovery"), [(130012, False), (160001, True)])
def test_a_server_that_cannot_serve_is_refused(version: int, in_recovery: bool) -> None:  # noqa: FBT001
    with pytest.raises(UnsupportedServer):
        require_supported(Server(ServerIdentity(1, 1, 1), in_recovery, version, 0))
