"""The replication slot that a relay reads: create, inspect and drop it.

A slot makes PostgreSQL keep its log from the slot's position on, read or not. So the
relay watches it, and only `create` makes one: a new slot misses all earlier commits.

The plugin is `pgoutput`, a part of PostgreSQL, with a publication of the slot's name.
The publication has no tables, so that rows are not sent, only messages. It has to exist
before the slot: the plugin looks it up in the catalogue as of the time of the writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from psycopg2 import sql

from txmq.errors import ConfigError, DatabaseError, SlotInUse, SlotLost, SlotMissing, WalLevelTooLow
from txmq.tx.postgres.blocking import read_server
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.identity import require_supported
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
SELECT s.plugin, s.database, s.database = current_database(), s.active_pid, s.wal_status,
       s.safe_wal_size, s.restart_lsn - '0/0', s.confirmed_flush_lsn - '0/0', place.now - '0/0',
       extract(epoch FROM r.flush_lag)::float8,
       EXISTS (SELECT FROM pg_publication WHERE pubname = s.slot_name),
       (SELECT obj_description(oid, 'pg_publication') FROM pg_publication
           WHERE pubname = s.slot_name)
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
# Publications of earlier slots. A failover or a restore brings them back, and a copy of
# the server's files their slots as well, which are rewound then.
_EARLIER: Final = """
SELECT pubname FROM pg_publication p WHERE pubname <> %s AND NOT puballtables
    AND NOT EXISTS (SELECT FROM pg_publication_rel WHERE prpubid = p.oid) ORDER BY pubname
"""
LAG_QUERY_S: Final = 5  # limit of the search for the oldest transaction in a long log


class SlotOrigin(NamedTuple):
    """The origin of a slot, as the comment of its publication has it.

    It has no commits before the LSN `made_at`. `replaces` are the slots before it.
    `accepted`: an operator has accepted what it missed, and what failovers up to
    `timeline` have lost.
    """

    made_at: int
    replaces: tuple[str, ...] = ()
    accepted: bool = False
    timeline: int = 0


class SlotStatus(NamedTuple):
    """The state of a slot. LSNs and sizes are in bytes.

    `wal_status` is reserved, extended, unreserved (its log may be removed at any
    moment) or lost. `safe_wal_size` is the log that may be written before that; None =
    no limit. `lag_s` is the reader's lag in seconds, or the age of the oldest
    transaction if the slot has no reader; None = unknown.
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
    unfit: str  # the reason why a relay of this database cannot read it, "" = it can
    origin: SlotOrigin | None = None  # unknown for slots that others made

    @property
    def retained(self) -> int:
        """Return the bytes of log that PostgreSQL keeps for this slot."""
        return 0 if self.restart_lsn is None else max(0, self.current_lsn - self.restart_lsn)

    def alarms(self, *, retained: int, lag_s: float) -> dict[str, str]:
        """Return the alarms by these limits: kinds and texts."""
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
    """Return the name of a slot. Raises ConfigError if it is invalid."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "slot", f"invalid slot name {name!r}", hint="give 1 to 63 characters out of a-z 0-9 _"
        )
    return name


def create(connection: Connection, name: str, replaces: Sequence[str] = ()) -> SlotStatus:
    """Create the publication and the slot, which keeps messages emitted from now on.

    `replaces` are earlier slots, for the report of what was missed; those whose
    publication is left are found, gone or not.
    Raises ConfigError if the slot exists, WalLevelTooLow, UnsupportedServer or
    DatabaseError.
    """
    check_slot_name(name)
    require_supported(read_server(connection))
    _require_logical(connection)
    if find(connection, name) is not None:
        raise ConfigError(
            "slot",
            f"slot {name} exists already",
            hint=f"see `txmq relay status`; if it is lost, {LOST}",
        )
    with translated(f"making slot {name}"), connection.cursor() as cursor:
        cursor.execute("SELECT FROM pg_publication WHERE pubname = %s", (name,))
        if not cursor.rowcount:
            cursor.execute(sql.SQL("CREATE PUBLICATION {}").format(sql.Identifier(name)))
        cursor.execute("SELECT pg_create_logical_replication_slot(%s, %s)", (name, PLUGIN))
        cursor.execute(_EARLIER, (name,))
        earlier = {*replaces, *(found for (found,) in cursor)}
    made_at = require(connection, name).confirmed_lsn or 0
    _note_origin(connection, name, SlotOrigin(made_at, tuple(sorted(earlier))))
    return require(connection, name)


def was_made(connection: Connection, name: str) -> bool:
    """Return whether there is such a slot, or the publication of one."""
    with translated(f"looking at slot {name}"), connection.cursor() as cursor:
        cursor.execute(
            "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = %s)"
            " OR EXISTS (SELECT FROM pg_publication WHERE pubname = %s)",
            (name, name),
        )
        [(made,)] = cursor.fetchall()
    return bool(made)


def accept_missed(connection: Connection, name: str) -> SlotStatus:
    """Note that an operator has accepted what the slot has missed, and what failovers
    have lost.

    Raises SlotMissing, SlotLost or DatabaseError.
    """
    status, timeline = require(connection, name), read_server(connection).identity.timeline
    known = status.origin or SlotOrigin(0)
    _note_origin(connection, name, known._replace(accepted=True, timeline=timeline))
    return require(connection, name)


def _note_origin(connection: Connection, name: str, origin: SlotOrigin) -> None:
    with translated(f"noting how slot {name} was made"), connection.cursor() as cursor:
        cursor.execute(
            sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(
                sql.Identifier(name), sql.Literal(json.dumps(origin._asdict()))
            )
        )


def _read_origin(comment: str | None) -> SlotOrigin | None:
    """Return the origin in a publication's comment, None where it has another one."""
    try:
        fields = json.loads(comment or "")
        return SlotOrigin(
            int(fields["made_at"]),
            tuple(map(str, fields["replaces"])),
            bool(fields["accepted"]),
            int(fields["timeline"]),
        )
    except (ValueError, TypeError, KeyError):
        return None


def drop(connection: Connection, name: str) -> None:
    """Drop the slot and its publication; unread messages are never sent.

    Raises SlotMissing, SlotInUse or DatabaseError.
    """
    status = find(connection, name)
    if status is None:
        raise SlotMissing(f"There is no slot {name}", hint="see `txmq relay status`")
    if status.active_pid is not None:
        raise slot_in_use(name)
    with translated(f"dropping slot {name}"), connection.cursor() as cursor:
        cursor.execute("SELECT pg_drop_replication_slot(%s)", (name,))
        cursor.execute(sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(name)))


def find(connection: Connection, name: str) -> SlotStatus | None:
    """Return the present state of the slot; None = there is no such slot."""
    with translated(f"looking at slot {name}"), connection.cursor() as cursor:
        cursor.execute(_SLOT, (check_slot_name(name),))
        row = cursor.fetchone()
    if row is None:
        return None
    plugin, database, here, pid, wal_status, safe, restart, confirmed, now, *rest = row
    flush_lag, published, comment = rest
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
        unfit=_unfit_reason(plugin, database, here=here, published=published),
        origin=_read_origin(comment),
    )


def find_with_lag(connection: Connection, name: str) -> SlotStatus | None:
    """Return the state of the slot, with the oldest transaction's age if it is unread.

    That occupies the slot for a moment: a relay that starts meanwhile has to retry.
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
            # In one query string, so that a pooler gives nobody else this limit.
            cursor.execute(
                f"SET LOCAL statement_timeout = '{LAG_QUERY_S}s'; {_OLDEST}", (name, name)
            )
            row = cursor.fetchone()
    except DatabaseError:  # a relay reads it, the log is long, or a right is missing
        return status
    return status._replace(lag_s=max(0.0, float(row[0]) / 1_000_000) if row else 0.0)


def require(connection: Connection, name: str) -> SlotStatus:
    """Return the slot if a relay can read it. Raises SlotMissing or SlotLost."""
    status = find(connection, name)
    if status is None:
        raise SlotMissing(
            f"There is no slot {name}",
            hint=f"{CREATE}; if there was one before, messages since then are lost",
        )
    if status.unfit:
        raise SlotMissing(
            f"Slot {name} {status.unfit}",
            hint="drop it and create it with `txmq relay`, or name another slot",
        )
    if status.wal_status == "lost":
        raise slot_lost(name)
    return status


def slot_in_use(name: str) -> SlotInUse:
    """Return the error of a slot that has another reader."""
    return SlotInUse(
        f"Slot {name} is in use",
        hint="another relay reads it, or PostgreSQL has yet to notice that one has died",
    )


def slot_lost(name: str) -> SlotLost:
    """Return the error of a slot whose log was removed."""
    return SlotLost(
        f"Slot {name} is lost: PostgreSQL has removed log that the relay had not read", hint=LOST
    )


def _require_logical(connection: Connection) -> None:
    with translated("reading the server's settings"), connection.cursor() as cursor:
        cursor.execute(_SERVER)
        [(level, slots, used, allowed)] = cursor.fetchall()
    if level != "logical":
        raise WalLevelTooLow(level)
    if used >= slots:
        raise DatabaseError(
            f"All {slots} replication slots are in use",
            hint="raise max_replication_slots, or drop a slot",
        )
    if not allowed:
        raise DatabaseError(
            "The role may not use replication",
            hint="run ALTER ROLE ... REPLICATION as a superuser",
        )


def _unfit_reason(
    plugin: str | None, database: str | None, *, here: bool | None, published: bool
) -> str:
    if plugin is None:
        return "is a physical one"
    if not here:
        return f"is of another database, {database}"
    if plugin != PLUGIN:
        return f"has the plugin {plugin}, not {PLUGIN}"
    return "" if published else "has lost its publication"
