"""The PostgreSQL server of the benchmarks: the named one, or one started at first
use.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.bench.harness import BenchError, file_system
from txmq.errors import TxmqError
from txmq.testing.postgres_server import PostgresServer, temporary_server

# the same for all benchmarks, so that the figures of a run are comparable
SETTINGS = {"wal_level": "logical"}


@dataclass(slots=True)
class BenchDatabase:
    """A database server; `named` is the DSN of a running one, or None.

    Its role must be able to create databases.
    """

    named: str | None
    _server: PostgresServer | None = None
    _dsn: str = ""
    _second: str = ""

    def dsn(self) -> str:
        """Return the DSN of a database of this run.

        Raises BenchError where there is no server.
        """
        if self._server is None:
            try:
                self._server = PostgresServer(self.named) if self.named else _temporary_server()
                self._dsn = self._server.dsn(self._server.create_database())
            except TxmqError as error:
                raise BenchError(f"no PostgreSQL: {error}") from error
        return self._dsn

    def second(self) -> str:
        """Return the DSN of another database on the same server."""
        self.dsn()
        assert self._server is not None, "dsn() has set the server"
        if not self._second:
            self._second = self._server.dsn(self._server.create_database())
        return self._second

    def close(self) -> None:
        """Drop the databases, and stop a server that was started here."""
        if self._server is not None:
            self._server.stop()


def _temporary_server() -> PostgresServer:
    directory = tempfile.gettempdir()
    if file_system(Path(directory)) == "tmpfs":
        raise BenchError(
            f"{directory} is in memory, where a commit costs nothing:"
            " set TMPDIR, or name a server with --dsn"
        )
    return temporary_server(settings=SETTINGS)
