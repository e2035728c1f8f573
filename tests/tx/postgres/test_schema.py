"""The tables: installed once, checked, and refused if their version is another one."""

from __future__ import annotations

import re
import threading
from contextlib import closing
from importlib import resources
from pathlib import Path

import pytest

from tests.tx.postgres.support import LOG, new_token, poor_role, rows
from txmq.errors import DatabaseError, SchemaMissing, UnsupportedServer
from txmq.tx.postgres.identity import Server, ServerIdentity, require_supported
from txmq.tx.postgres.schema import check, install
from txmq.tx.postgres.session import connect

SECURITY = Path(__file__).parents[3] / "docs" / "SECURITY.md"
INBOX_ROW = (
    'INSERT INTO txmq_inbox_recent (grp, log_id, topic_id, partition, epoch, "offset")'
    " VALUES ('g', gen_random_uuid(), 1, 0, 0, 1)"
)


def run_install(dsn: str) -> None:
    with closing(connect(dsn, application_name="test")) as connection:
        install(connection)


def run_check(dsn: str) -> list[str]:
    with closing(connect(dsn, application_name="test")) as connection:
        return check(connection)


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


def test_tables_of_an_older_version_are_brought_up_to_date_with_their_rows(
    empty_database: str,
) -> None:
    first = resources.files("txmq.tx.postgres").joinpath("schema_1.sql").read_text("utf-8")
    rows(empty_database, first.replace("%", "%%"))
    rows(empty_database, "INSERT INTO txmq_schema (version) VALUES (1)")
    token = new_token()
    rows(
        empty_database, "INSERT INTO txmq_token (tok, log_id) VALUES (%s, %s)", str(token), str(LOG)
    )
    with pytest.raises(
        SchemaMissing, match=r"no txmq tables of version 4, but of 1 .*txmq schema install"
    ):
        run_check(empty_database)
    run_install(empty_database)
    assert run_check(empty_database) == []
    assert rows(empty_database, "SELECT tok::text FROM txmq_token") == [(str(token),)]
    assert rows(empty_database, "SELECT count(*) FROM txmq_broker") == [(0,)]


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
        rows(database, "REVOKE EXECUTE ON FUNCTION txmq_claim FROM public")
        remarks = run_check(dsn)
    assert (
        "the role may not INSERT on txmq_token: GRANT INSERT ON public.txmq_token TO the role"
        in remarks
    )
    assert any("may not EXECUTE txmq_claim" in remark for remark in remarks)
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
        [blind] = run_check(broker_dsn)
        assert f"{broker} owns txmq_timeline_history" in blind
        rows(empty_database, after)
        assert run_check(broker_dsn) == []
        assert {remark.partition(":")[0] for remark in run_check(services_dsn)} == {
            "the role may not INSERT on txmq_broker",  # only brokers do
            "the role may not UPDATE on txmq_broker",
        }


@pytest.mark.parametrize(("version", "in_recovery"), [(130012, False), (160001, True)])
def test_a_server_that_cannot_serve_is_refused(version: int, in_recovery: bool) -> None:  # noqa: FBT001
    with pytest.raises(UnsupportedServer):
        require_supported(Server(ServerIdentity(1, 1, 1), in_recovery, version, 0))
