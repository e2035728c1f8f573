"""The tables and functions of txmq in a business database: install, check."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Final

from txmq.errors import DatabaseError, SchemaMissing
from txmq.tx.postgres.blocking import read_server
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.identity import require_supported
from txmq.tx.postgres.partitions import CallerTime, maintain
from txmq.tx.postgres.session import Connection, Cursor, transaction

VERSION: Final = 1
_LOCK: Final = 0x74786D71  # "txmq": two installations at once take turns

INSUFFICIENT_PRIVILEGE: Final = "42501"
INSTALLERS: Final = (
    "as a superuser, GRANT CREATE ON DATABASE and ON SCHEMA public TO the role, or run this as "
    "the owner of the tables; docs/SECURITY.md, section 7, has the rights of all roles"
)
_RIGHTS: Final = {
    "txmq_schema": "SELECT",
    "txmq_token": "SELECT, INSERT, UPDATE",
    "txmq_broker": "SELECT",
    "txmq_outbox": "SELECT, INSERT, DELETE",
    "txmq_inbox_recent": "SELECT, INSERT, DELETE",
    "txmq_inbox": "SELECT, INSERT, UPDATE",
}
_RIGHTS_OF_BROKERS: Final = _RIGHTS | {"txmq_broker": "SELECT, INSERT, UPDATE"}
# Those whose policies apply to the role; none is meant to have any.
_FILTERED: Final = "SELECT t FROM unnest(%s::text[]) t WHERE row_security_active('public.' || t)"
_HISTORY: Final = "public.txmq_timeline_history"
# Whether the trigger is there and fires in sessions that replicate nothing.
_GUARDED: Final = """
SELECT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = 'public.txmq_inbox_recent'::regclass
    AND tgname = 'txmq_claim_guard' AND tgenabled IN ('O', 'A'))
"""
# The function acts with the rights of its owner.
_BLIND_OWNER: Final = """
SELECT pg_get_userbyid(proowner) FROM pg_proc WHERE oid = to_regproc(%s)
 AND NOT has_function_privilege(proowner, 'pg_catalog.pg_read_file(text)', 'EXECUTE')
"""
_FUNCTIONS: Final = (
    "txmq_claim",
    "txmq_outbox_stamp",
    "txmq_outbox_waits",
    "txmq_system_id",
    "txmq_token_insert",
    "txmq_send",
)
_FUNCTIONS_OF_BROKERS: Final = (*_FUNCTIONS, "txmq_outbox_settle", "txmq_timeline_history")
# Plain names are those of PostgreSQL, whatever other roles have made.
_OWN_PATH: Final = "SET LOCAL search_path = pg_catalog, pg_temp"


def install(connection: Connection) -> None:
    """Make the tables, or bring those of an earlier version up to date; does nothing
    where they are current.

    `connection` is one of txmq's own. Raises UnsupportedServer, SchemaMissing where a
    newer txmq made the tables, DatabaseError where a right is missing.
    """
    require_supported(read_server(connection))
    with (
        _asking_for_rights(),
        translated("installing the schema"),
        transaction(connection) as cursor,
    ):
        cursor.execute(_OWN_PATH)
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
        found = _version(cursor)
        _refuse_newer(found)
        for version in range(found + 1, VERSION + 1):
            cursor.execute(step(version))
        cursor.execute(
            "INSERT INTO public.txmq_schema (version) VALUES (%s)"
            " ON CONFLICT (one) DO UPDATE SET version = EXCLUDED.version"
            " WHERE txmq_schema.version <> EXCLUDED.version",
            (VERSION,),
        )
    now_ms = time.time_ns() // 1_000_000
    maintain(connection, caller=CallerTime(now_ms, now_ms))


def step(version: int) -> str:
    """Return the SQL that makes a version of the tables: the first one from nothing,
    each later one from the one before. It is ASCII, which each database can store.
    """
    name = "schema.sql" if version == 1 else f"schema_{version}.sql"
    return resources.files(__package__).joinpath(name).read_text("ascii")


@contextmanager
def _asking_for_rights() -> Iterator[None]:
    """Say which rights an installation needs: the tables are not there yet, so that a
    check could not.
    """
    try:
        yield
    except DatabaseError as error:
        if error.sqlstate != INSUFFICIENT_PRIVILEGE:
            raise
        raise DatabaseError(error.message, hint=INSTALLERS, sqlstate=error.sqlstate) from None


def check(connection: Connection, *, service: bool = False) -> list[str]:
    """Return warnings about the tables for an operator; empty if all is well. The
    connection has the role of a broker or of a `service`, which needs fewer rights.

    Raises UnsupportedServer or SchemaMissing where they cannot be used.
    """
    require_supported(read_server(connection))
    with translated("checking the schema"), connection.cursor() as cursor:
        if not _may_read(cursor, "txmq_schema"):
            return _missing_rights(cursor, service=service)  # of a version that the role cannot see
        found = _version(cursor)
        _refuse_newer(found)
        if found < VERSION:
            raise SchemaMissing(
                f"the database has no txmq tables of version {VERSION}"
                + (f", but of {found}" if found else ""),
                hint=f"txmq schema install '{_place(connection)}'",
            )
        return [*_missing_rights(cursor, service=service), *_remarks(cursor, service=service)]


def _version(cursor: Cursor) -> int:
    cursor.execute("SELECT to_regclass('public.txmq_schema') IS NOT NULL")
    if cursor.fetchone() == (False,):
        return 0
    cursor.execute("SELECT version FROM public.txmq_schema")
    row = cursor.fetchone()
    return row[0] if row else 0


def _refuse_newer(found: int) -> None:
    if found > VERSION:
        raise SchemaMissing(
            f"the txmq tables have version {found}, this txmq supports {VERSION}",
            hint="update txmq",
        )


def _may_read(cursor: Cursor, table: str) -> bool:
    """Return whether the role may read the table; true where there is no table."""
    cursor.execute("SELECT has_table_privilege(to_regclass(%s), 'SELECT')", (f"public.{table}",))
    return cursor.fetchone() != (False,)


def _missing_rights(cursor: Cursor, *, service: bool) -> list[str]:
    remarks = []
    for table, rights in (_RIGHTS if service else _RIGHTS_OF_BROKERS).items():
        for right in rights.split(", "):
            cursor.execute(
                "SELECT has_table_privilege(to_regclass(%s), %s)", (f"public.{table}", right)
            )
            if cursor.fetchone() == (False,):
                grant = f"GRANT {right} ON public.{table} TO the role"
                remarks.append(f"the role may not {right} on {table}: {grant}")
    for function in _FUNCTIONS if service else _FUNCTIONS_OF_BROKERS:
        named = f"public.{function}"
        cursor.execute("SELECT has_function_privilege(to_regproc(%s), 'EXECUTE')", (named,))
        if cursor.fetchone() == (False,):
            grant = f"GRANT EXECUTE ON FUNCTION {named} TO the role"
            remarks.append(f"the role may not EXECUTE {function}: {grant}")
    return remarks


def _remarks(cursor: Cursor, *, service: bool) -> list[str]:
    cursor.execute(_FILTERED, (list(_RIGHTS),))
    remarks = [
        f"row-level security hides rows of {table} from the role:"
        f" ALTER TABLE public.{table} DISABLE ROW LEVEL SECURITY, or give the role BYPASSRLS"
        for (table,) in cursor.fetchall()
    ]
    cursor.execute(_GUARDED)
    if cursor.fetchone() == (False,):
        remarks.append(
            "trigger txmq_claim_guard is missing or disabled, so nothing keeps a handler from "
            "committing a half of its effects: ALTER TABLE public.txmq_inbox_recent ENABLE TRIGGER "
            "txmq_claim_guard, or copy it from a database that has it (pg_dump --schema-only)"
        )
    if _may_read(cursor, "txmq_token_default"):  # services need not
        cursor.execute("SELECT FROM public.txmq_token_default LIMIT 1")
        if cursor.fetchone() is not None:
            remarks.append(
                "tokens without a partition of their own: maintenance is late, "
                "or a producer's clock is ahead"
            )
    cursor.execute(_BLIND_OWNER, (_HISTORY,))
    owner = cursor.fetchone()
    if owner is not None and not service:
        remarks.append(
            f"{owner[0]} owns txmq_timeline_history and may not read files of the server, so "
            f"nothing is decided from before a failover: as a superuser, ALTER FUNCTION "
            f"{_HISTORY} OWNER TO the superuser, and GRANT EXECUTE ON FUNCTION {_HISTORY} TO the "
            "broker's role"
        )
    cursor.execute("SELECT current_setting('synchronous_commit')")
    row = cursor.fetchone()
    if row and row[0] in ("off", "local"):
        remarks.append(
            f"synchronous_commit is {row[0]} by default: transactions with messages will be refused"
        )
    return remarks


def _place(connection: Connection) -> str:
    known = connection.info.dsn_parameters
    return " ".join(
        f"{name}={known[name]}" for name in ("host", "port", "dbname", "user") if name in known
    )
