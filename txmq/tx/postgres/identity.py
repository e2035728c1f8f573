"""Identity of the database behind a connection, and its right to decide transactions.

Standbys, clones and restored copies share the system identifier, so it does not
suffice. The timeline grows with each promotion, and a server that is behind the
timeline of a transaction knows nothing of it. On one timeline a server that is behind
the transaction's position in the write-ahead log is a copy. A server on a later
timeline succeeds the transaction's only where the history of its timeline says that the
two parted behind that position.

A position is one that the log was flushed to: a crash of the server loses nothing
before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from txmq.errors import DatabaseError, DatabaseUnavailable, UnsupportedServer
from txmq.tx.postgres.caller import roll_back
from txmq.tx.postgres.driver import Driver, Status
from txmq.tx.postgres.errors import DriverError, translated

OLDEST: Final = 140000  # multiranges, xid8 and pg_current_xact_id

# The control file learns of a promotion with the checkpoint after it, which may take
# minutes; the log's name tells now.
_QUERY: Final = """
SELECT (SELECT system_identifier FROM pg_control_system()),
       CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())
       ELSE ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int END,
       (SELECT oid::int8 FROM pg_database WHERE datname = current_database()),
       pg_is_in_recovery(), current_setting('server_version_num')::int,
       current_setting('max_prepared_transactions')::int,
       (extract(epoch FROM clock_timestamp()) * 1000000)::int8,
       (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
        ELSE pg_current_wal_flush_lsn() END - '0/0')::int8
"""
_HISTORY: Final = "SELECT public.txmq_timeline_history(%s::int)"
# Where only XA uses a database, the tables of txmq may be missing.
_HISTORY_FILE: Final = """
SELECT pg_read_file('pg_wal/' || lpad(upper(to_hex(%s::int)), 8, '0') || '.history')
"""
_NO_FUNCTION: Final = "42883"

_known: WeakKeyDictionary[Any, Server] = WeakKeyDictionary()


class ServerIdentity(NamedTuple):
    """The database that decides a transaction, as a bundle names it."""

    system_id: int
    timeline: int
    database_oid: int

    def why_not(self, server: Server, position: int, history: TimelineHistory | None = None) -> str:
        """Return why `server` may not decide transactions of this database; "" where it
        may.

        `position` is the transaction's. `history` is that of the server's timeline, and
        counts where the server is on a later one.
        """
        found = server.identity
        if server.in_recovery:
            return "the server is in recovery"
        if found.system_id != self.system_id:
            return f"the server is another cluster, {found.system_id}"
        if found.database_oid != self.database_oid:
            return f"the connection leads to another database, oid {found.database_oid}"
        if found.timeline < self.timeline:
            behind = f"behind the transaction's {self.timeline}"
            return f"the server is on timeline {found.timeline}, {behind}"
        return self._why_not_at(server, position, history)

    def _why_not_at(self, server: Server, position: int, history: TimelineHistory | None) -> str:
        if server.identity.timeline > self.timeline:
            return "no history was read" if history is None else history.why_not(self, position)
        if server.position < position:
            return (
                f"the server's log ends at {format_lsn(server.position)}, behind the transaction's "
                f"{format_lsn(position)}: it is a copy; point the resolver at the original"
            )
        return ""


class TimelineHistory(NamedTuple):
    """Ends of the timelines before `timeline`, or the reason why they are unknown."""

    timeline: int
    ends: dict[int, int]
    trouble: str = ""

    def why_not(self, decider: ServerIdentity, position: int) -> str:
        """Return why this history lacks a transaction of `decider` at `position`."""
        if self.trouble:
            return f"the history of timeline {self.timeline} cannot be read: {self.trouble}"
        end = self.ends.get(decider.timeline)
        if end is None:
            return f"timeline {self.timeline} does not come from {decider.timeline}"
        if end < position:
            return (
                f"timeline {self.timeline} left {decider.timeline} at {format_lsn(end)}, before "
                f"the transaction's {format_lsn(position)}: a copy was promoted, or a failover "
                "lost commits; point the resolver at the original, or, where there is none any "
                "more, decide with txmq tx commit or rollback --force"
            )
        return ""


@dataclass(slots=True)
class Server:
    """The server behind a connection, and its abilities."""

    identity: ServerIdentity
    in_recovery: bool
    version: int  # 150004 is 15.4
    max_prepared_transactions: int  # 0: two-phase commit is switched off
    time: int = 0  # by its clock, in microseconds, when it was read
    position: int = 0  # that its write-ahead log is flushed to

    def note(self, seen: SeenServer) -> None:
        """Note a later position of the same server.

        What a transaction saw counts once its COMMIT is acknowledged: then a
        synchronous standby has that position as well, and may be promoted without a
        doubt.
        """
        self.position = max(self.position, seen.position)


class SeenServer(NamedTuple):
    """The server that runs a transaction, as a statement of the transaction saw it."""

    system_id: int
    timeline: int
    position: int


def format_lsn(position: int) -> str:
    """Return a position in PostgreSQL's notation."""
    return f"{position >> 32:X}/{position & 0xFFFFFFFF:X}"


def parse_lsn(text: str) -> int:
    """Return the position that a text in PostgreSQL's notation names."""
    high, low = text.split("/")
    return int(high, 16) << 32 | int(low, 16)


async def read_server(driver: Driver) -> Server:
    """Read the identity of the server, in one round trip.

    In a transaction of the caller's it becomes part of that.
    """
    with translated("reading the server's identity"):
        [row] = await driver.execute(_QUERY)
    system_id, timeline, database_oid, *rest = row
    return Server(ServerIdentity(system_id, timeline, database_oid), *rest)


async def read_history(driver: Driver, timeline: int) -> TimelineHistory:
    """Read where the timelines before `timeline` ended.

    The function that reads it has the rights of its owner: all is well where that is
    a superuser.
    """
    try:
        text = await _history_text(driver, timeline)
    except DatabaseUnavailable:
        raise
    except DatabaseError as error:
        hint = (
            "as a superuser: ALTER FUNCTION txmq_timeline_history OWNER TO postgres, and GRANT "
            "EXECUTE ON FUNCTION txmq_timeline_history TO the broker's role"
        )
        return TimelineHistory(timeline, {}, f"{error}; {hint}")
    return TimelineHistory(timeline, dict(timeline_ends(text)))


async def _history_text(driver: Driver, timeline: int) -> str:
    with translated("reading"):
        try:
            [(text,)] = await driver.execute(_HISTORY, (timeline,))
        except DriverError as error:
            if error.sqlstate != _NO_FUNCTION or not driver.autocommit:
                raise
            [(text,)] = await driver.execute(_HISTORY_FILE, (timeline,))
    return str(text)


def timeline_ends(text: str) -> Iterator[tuple[int, int]]:
    """Yield the earlier timelines of a history file, each with the position of its end.

    A line has a timeline, that position and a reason; # begins a comment.
    """
    for line in text.splitlines():
        fields = line.partition("#")[0].split()
        if len(fields) >= 2:
            yield int(fields[0]), parse_lsn(fields[1])


async def server_of(driver: Driver) -> Server:
    """Return the server as it was when this process last asked or noted it.

    It is read once per connection. A failover takes a new connection, but behind a
    pooler the server may change: whoever relies on the name lets the transaction return
    it, and notes or forgets what is known. Raises UnsupportedServer.
    """
    known = _known.get(driver.connection)
    if known is None:
        idle = driver.status is Status.IDLE
        known = await read_server(driver)
        if idle:
            await roll_back(driver)
        require_supported(known)
        _known[driver.connection] = known
    return known


def forget_server(driver: Driver) -> None:
    """Forget the server: the next transaction asks again."""
    _known.pop(driver.connection, None)


def require_supported(server: Server) -> None:
    """Require a server that is new enough and takes writes. Raises
    UnsupportedServer.
    """
    if server.version < OLDEST:
        raise UnsupportedServer(
            f"PostgreSQL {server.version // 10000} is too old", hint="14 or newer is needed"
        )
    if server.in_recovery:
        raise UnsupportedServer("the server is a standby", hint="use the primary")
