"""The PostgreSQL that benchmarks of transactions use: the one that is named, else one
started when first asked for.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.bench.harness import BenchError, file_system
from txmq.errors import TxmqError
from txmq.testing.postgres import PostgresServer, temporary_server

SETTINGS = {
    "wal_level": "logical"
}  # for all, so that figures of the same run can stand beside one another


@dataclass(slots=True)
class Database:
    """`named` is the DSN of a running server, whose role may create databases, or
    None.
    """

    named: str | None
    _server: PostgresServer | None = None
    _dsn: str = ""
    _second: str = ""

    def dsn(self) -> str:
        """A DSN for psycopg2 of a database that this run has for itself. Raises
        BenchError where there is no server.
        """
        if self._server is None:
            try:
                self._server = PostgresServer(self.named) if self.named else _temporary_server()
                self._dsn = self._server.dsn(self._server.create_database())
            except TxmqError as error:
                raise BenchError(f"no PostgreSQL: {error}") from error
        return self._dsn

    def second(self) -> str:
        """The DSN of another database, on the same server."""
        self.dsn()
        assert self._server is not None, "it was needed for the first"
        if not self._second:
            self._second = self._server.dsn(self._server.create_database())
        return self._second

    def close(self) -> None:
        """The database goes, and with it a server that was started here."""
        if self._server is not None:
            self._server.stop()


def _temporary_server() -> PostgresServer:
    directory = tempfile.gettempdir()
    if file_system(Path(directory)) == "tmpfs":
        raise BenchError(
            f"{directory} is in memory, where a commit costs nothing: set TMPDIR, or name a server by --dsn"
        )
    return temporary_server(settings=SETTINGS)
