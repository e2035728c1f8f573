"""Checks of a business database: reachable, its tables, settings and clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from txmq.cli.database import open_database
from txmq.cli.doctor.check_result import CheckResult, Health, judged
from txmq.errors import DatabaseError, SchemaMissing

if TYPE_CHECKING:
    from txmq.tx.postgres.session import Connection

WEAK_COMMITS = frozenset({"off", "local"})
CLOCK_S = 1.0
SHORT_IDLE_MS = 30_000
NAMES = (
    "server_version",
    "fsync",
    "full_page_writes",
    "synchronous_commit",
    "wal_level",
    "max_prepared_transactions",
    "max_connections",
    "idle_in_transaction_session_timeout",
)
READ = """
    SELECT name, setting FROM pg_settings WHERE name = ANY(%s)
    UNION ALL SELECT 'sessions', count(*)::text FROM pg_stat_activity
        WHERE backend_type = 'client backend'
    UNION ALL SELECT 'clock', extract(epoch FROM clock_timestamp())::text
"""


def check_database(dsn: str, name: str, uses: frozenset[str]) -> Iterator[CheckResult]:
    """Check the database of a section of the settings. `uses` has "resolver", "xa" or
    "relay".
    """
    place = f"database {name}"
    try:
        with open_database(dsn, "doctor") as connection:
            yield CheckResult(place, Health.OK, f"reached, for {' and '.join(sorted(uses))}")
            for result in _checks(connection, uses):
                yield result._replace(check=f"{place}: {result.check}")
    except DatabaseError as error:
        yield CheckResult(place, Health.FAILURE, error.message, error.hint)


def _checks(connection: Connection, uses: frozenset[str]) -> Iterator[CheckResult]:
    if "resolver" in uses:
        yield _tables(connection)
    settings, apart = _read(connection)
    yield CheckResult("version", Health.OK, settings["server_version"])
    yield judged(
        "clock",
        f"{apart:+.3f} s from this machine's",
        failed=abs(apart) > CLOCK_S,
        advice="set both by NTP; beyond a minute alarm clock.differs is raised",
        fatal=False,
    )
    yield from _durability(settings)
    yield from _capacity(settings, uses)


def _tables(connection: Connection) -> CheckResult:
    from txmq.tx.postgres import schema

    advice = "docs/SECURITY.md, section 7, has the grants"
    try:
        remarks = schema.check(connection)
    except SchemaMissing as error:
        remarks, advice = [error.message], "run as the owner of the tables: txmq schema install DSN"
    return judged(
        "tables",
        "; ".join(remarks) or f"version {schema.VERSION}",
        failed=bool(remarks),
        advice=advice,
    )


def _read(connection: Connection) -> tuple[dict[str, str], float]:
    """Return settings, and how far the database's clock is ahead of this machine's."""
    with connection.cursor() as cursor:
        asked = time.time()
        cursor.execute(READ, (list(NAMES),))
        settings = dict(cursor.fetchall())
    return settings, float(settings["clock"]) - (asked + time.time()) / 2


def _durability(settings: dict[str, str]) -> Iterator[CheckResult]:
    for name, what in (("fsync", "commits"), ("full_page_writes", "pages")):
        yield judged(
            name,
            settings[name],
            failed=settings[name] == "off",
            advice=f"a crash loses {what} whose messages are out: switch it on",
        )
    yield judged(
        "synchronous_commit",
        settings["synchronous_commit"],
        failed=settings["synchronous_commit"] in WEAK_COMMITS,
        advice="transactions with messages refuse it: set it to on for the services' roles",
    )


def _capacity(settings: dict[str, str], uses: frozenset[str]) -> Iterator[CheckResult]:
    sessions, most = int(settings["sessions"]), int(settings["max_connections"])
    yield judged(
        "sessions",
        f"{sessions} of {most}",
        failed=sessions > 0.9 * most,
        advice="raise max_connections, or put a pooler before the services",
        fatal=False,
    )
    idle = int(settings["idle_in_transaction_session_timeout"])
    yield judged(
        "idle_in_transaction_session_timeout",
        f"{idle} ms" if idle else "none",
        failed=0 < idle < SHORT_IDLE_MS,
        advice="a block waits for its broker before COMMIT: allow it 30 s",
        fatal=False,
    )
    if "xa" in uses:
        yield judged(
            "max_prepared_transactions",
            settings["max_prepared_transactions"],
            failed=settings["max_prepared_transactions"] == "0",
            advice="set it to the number of XA branches at a time, and restart the server",
        )
    if "relay" in uses:
        yield judged(
            "wal_level",
            settings["wal_level"],
            failed=settings["wal_level"] != "logical",
            advice="the relay needs logical: set it, and restart the server",
        )
