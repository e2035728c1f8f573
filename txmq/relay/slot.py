"""The replication slot that a relay reads: made, looked at and dropped.

A slot makes PostgreSQL keep its log from the slot's place on, whether anybody reads it
or not. So it is watched, and nothing here makes one by the way: a slot made anew knows
nothing of what was committed before.

The plugin is `pgoutput`, a part of PostgreSQL, with a publication of the slot's name
that has no tables: rows stay where they are, messages come along. The publication has
to be there before the slot is: the plugin looks it up as it stood when the rows were
written.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from psycopg2 import sql

from txmq.errors import ConfigError, DatabaseError, SlotInUse, SlotLost, SlotMissing, WalLevelTooLow
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.identity import read_server, require_supported
from txmq.tx.postgres.session import Connection

PLUGIN: Final = "pgoutput"
CREATE: Final = "run `txmq relay create DSN`"
LOST: Final = "find out what is missing, `txmq relay drop` it and `txmq relay create` another"
_NAME: Final = re.compile(r"[a-z0-9_]{1,63}")
_SERVER: Final = """
SELECT current_setting('wal_level'), current_setting('max_replication_slots')::int,
       (SELECT count(*) FROM pg_replication_slots),
       (SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user)
"""
_SLOT: Final = """
SELECT s.plugin, s.database, s.database = current_database(), s.active_pid, s.wal_status, s.safe_wal_size,
       s.restart_lsn - '0/0', s.confirmed_flush_lsn - '0/0', place.now - '0/0',
       extract(epoch FROM r.flush_lag)::float8,
       EXISTS (SELECT FROM pg_publication WHERE pubname = s.slot_name)
FROM (SELECT pg_current_wal_lsn() AS now) place,
     pg_replication_slots s LEFT JOIN pg_stat_replication r ON r.pid = s.active_pid
WHERE s.slot_name = %s
"""
# A transaction that is not confirmed begins with B, its LSN and the time of its commit,
# microseconds since 2000.
_OLDEST: Final = """
SELECT extract(epoch FROM now()) * 1000000 - 946684800000000
       - ('x' || encode(substr(data, 10, 8), 'hex'))::bit(64)::int8
FROM pg_logical_slot_peek_binary_changes(%s, NULL, 1, 'proto_version', '1', 'publication_names', %s,
     'messages', 'true') LIMIT 1
"""
LOOK_S: Final = 5  # what it takes to find the oldest transaction in a long log is not worth more


class SlotStatus(NamedTuple):
    """A slot as PostgreSQL has it. LSNs are bytes; sizes too.

    `wal_status` is reserved, extended, unreserved (log may go at any moment) or lost;
    `safe_wal_size` is what may be written before it gets so, None = no limit is set.
    `lag_s`: seconds that the reader is behind, or that the oldest transaction waits
    where nobody reads; None = not found out.
    """

    name: str
    database: str
    active_pid: int | None
    restart_lsn: int | None
    confirmed_lsn: int | None
    current_lsn: int
    wal_status: str
    safe_wal_size: int | None
    lag_s: float | None
    plugin: str
    unfit: str  # why a relay on this connection's database cannot read it; empty = it can

    @property
    def retained(self) -> int:
        """Bytes of log that PostgreSQL keeps for this slot."""
        return 0 if self.restart_lsn is None else max(0, self.current_lsn - self.restart_lsn)

    def alarms(self, *, retained: int, lag_s: float) -> dict[str, str]:
        """What an operator has to hear of, by these limits: the kind of each alarm and
        its text.
        """
        found = {}
        if self.wal_status == "lost":
            found["lost"] = (
                f"slot {self.name} is lost: PostgreSQL has removed log that was not read: {LOST}"
            )
        elif self.wal_status == "unreserved":
            found["unreserved"] = (
                f"slot {self.name} is about to be lost: its log may be removed at any moment"
            )
        if self.retained > retained:
            found["retained"] = (
                f"slot {self.name} keeps {self.retained} bytes of log, over {retained}: is it read?"
            )
        if self.lag_s is not None and self.lag_s > lag_s:
            found["lag"] = f"slot {self.name} is {self.lag_s:.0f} s behind, over {lag_s:.0f}"
        return found


def check_slot_name(name: str) -> str:
    """`name`, where it can be one of a slot. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "slot", f"{name!r} cannot name a slot", hint="1 to 63 characters out of a-z 0-9 _"
        )
    return name


def create(connection: Connection, name: str) -> SlotStatus:
    """Makes the publication and the slot; messages emitted from now on are kept.
    `connection` is one of our own.

    Raises ConfigError where the slot is there already, WalLevelTooLow,
    UnsupportedServer, DatabaseError.
    """
    check_slot_name(name)
    require_supported(read_server(connection))
    _require_possible(connection)
    if find(connection, name) is not None:
        raise ConfigError(
            "slot",
            f"slot {name} is there already",
            hint=f"see `txmq relay status`; {LOST}, if it is lost",
        )
    with translated(f"making slot {name}"), connection.cursor() as cursor:
        cursor.execute("SELECT FROM pg_publication WHERE pubname = %s", (name,))
        if not cursor.rowcount:
            cursor.execute(sql.SQL("CREATE PUBLICATION {}").format(sql.Identifier(name)))
        cursor.execute("SELECT pg_create_logical_replication_slot(%s, %s)", (name, PLUGIN))
    return require(connection, name)


def drop(connection: Connection, name: str) -> None:
    """Drops the slot and its publication: what the relay has not yet read is never
    sent.

    Raises SlotMissing, SlotInUse, DatabaseError.
    """
    status = find(connection, name)
    if status is None:
        raise SlotMissing(f"there is no slot {name}", hint="nothing is to be dropped")
    if status.active_pid is not None:
        raise in_use(name)
    with translated(f"dropping slot {name}"), connection.cursor() as cursor:
        cursor.execute("SELECT pg_drop_replication_slot(%s)", (name,))
        cursor.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name)))


def find(connection: Connection, name: str) -> SlotStatus | None:
    """The slot as it is now; None = there is none."""
    with translated(f"looking at slot {name}"), connection.cursor() as cursor:
        cursor.execute(_SLOT, (check_slot_name(name),))
        row = cursor.fetchone()
    if row is None:
        return None
    plugin, database, here, pid, wal_status, safe, restart, confirmed, now, flush_lag, published = (
        row
    )
    return SlotStatus(
        name,
        database,
        pid,
        restart_lsn=None if restart is None else int(restart),
        confirmed_lsn=None if confirmed is None else int(confirmed),
        current_lsn=int(now),
        wal_status=wal_status,
        safe_wal_size=safe,
        lag_s=None if pid is None else flush_lag or 0.0,
        plugin=plugin,
        unfit=_why_not(plugin, database, here=here, published=published),
    )


def measured(connection: Connection, name: str) -> SlotStatus | None:
    """As `find`; where nobody reads the slot, the oldest transaction in it is looked
    for, to tell how long it waits.

    That takes the slot for a moment: a relay that starts meanwhile has to try again.
    """
    status = find(connection, name)
    if (
        status is None
        or status.unfit
        or status.active_pid is not None
        or status.wal_status == "lost"
    ):
        return status
    try:
        with translated(f"looking into slot {name}"), connection.cursor() as cursor:
            cursor.execute(f"SET statement_timeout = '{LOOK_S}s'")
            cursor.execute(_OLDEST, (name, name))
            row = cursor.fetchone()
            cursor.execute("RESET statement_timeout")
    except DatabaseError:  # the relay has it now, the log is long, or the role may not
        return status
    return status._replace(lag_s=max(0.0, float(row[0]) / 1_000_000) if row else 0.0)


def require(connection: Connection, name: str) -> SlotStatus:
    """The slot, if a relay can read it here. Raises SlotMissing, SlotLost."""
    status = find(connection, name)
    if status is None:
        raise SlotMissing(
            f"there is no slot {name}",
            hint=f"{CREATE}; if there was one, messages since then are lost",
        )
    if status.unfit:
        raise SlotMissing(
            f"slot {name} {status.unfit}",
            hint="drop it and create it with `txmq relay`, or name another",
        )
    if status.wal_status == "lost":
        raise lost(name)
    return status


def in_use(name: str) -> SlotInUse:
    """The error where somebody else reads the slot."""
    return SlotInUse(
        f"slot {name} is in use",
        hint="another relay reads it, or one that died is about to be noticed",
    )


def lost(name: str) -> SlotLost:
    """The error where the log that the slot needs is gone."""
    return SlotLost(
        f"slot {name} is lost: PostgreSQL has removed log that the relay had not read", hint=LOST
    )


def _require_possible(connection: Connection) -> None:
    with translated("reading the server's settings"), connection.cursor() as cursor:
        cursor.execute(_SERVER)
        [(level, slots, used, allowed)] = cursor.fetchall()
    if level != "logical":
        raise WalLevelTooLow(level)
    if used >= slots:
        raise DatabaseError(
            f"all {slots} replication slots are in use",
            hint="raise max_replication_slots, or drop one",
        )
    if not allowed:
        raise DatabaseError(
            "the role may not use replication", hint="ALTER ROLE ... REPLICATION, as a superuser"
        )


def _why_not(
    plugin: str | None, database: str | None, *, here: bool | None, published: bool
) -> str:
    if plugin is None:
        return "is a physical one"
    if not here:
        return f"is of another database, {database}"
    if plugin != PLUGIN:
        return f"has the plugin {plugin}, not {PLUGIN}"
    return "" if published else "has lost its publication"
