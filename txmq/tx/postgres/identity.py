"""Identity of the database behind a connection, and its right to decide transactions.

Standbys, clones and restored copies share the system identifier, so it does not
suffice. The timeline grows with each promotion, and a server that is behind the
timeline of a transaction knows nothing of it.
"""

from __future__ import annotations

from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from txmq.errors import UnsupportedServer
from txmq.tx.postgres.caller import is_idle, roll_back
from txmq.tx.postgres.errors import translated
from txmq.tx.postgres.session import Connection

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
       (extract(epoch FROM clock_timestamp()) * 1000000)::int8
"""

_known: WeakKeyDictionary[Connection, Server] = WeakKeyDictionary()


class ServerIdentity(NamedTuple):
    """The database that decides a transaction, as a bundle names it."""

    system_id: int
    timeline: int
    database_oid: int

    def why_not(self, server: Server) -> str:
        """Return why `server` may not decide transactions of this database; "" where it
        may.
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
        return ""


class Server(NamedTuple):
    """The server behind a connection, and its abilities."""

    identity: ServerIdentity
    in_recovery: bool
    version: int  # 150004 is 15.4
    max_prepared_transactions: int  # 0: two-phase commit is switched off
    time: int = 0  # by its clock, in microseconds, when it was read


def read_server(connection: Connection) -> Server:
    """Read the identity of the server, in one round trip.

    In a transaction of the caller's it becomes part of that.
    """
    with translated("reading the server's identity"), connection.cursor() as cursor:
        cursor.execute(_QUERY)
        row = cursor.fetchone()
    assert row is not None
    system_id, timeline, database_oid, *rest = row
    return Server(ServerIdentity(system_id, timeline, database_oid), *rest)


def server_of(connection: Connection) -> Server:
    """Return the identity, read once per connection: a failover takes a new
    connection.
    """
    known = _known.get(connection)
    if known is None:
        idle = is_idle(connection)
        known = _known[connection] = read_server(connection)
        if idle:
            roll_back(connection)
    return known


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
