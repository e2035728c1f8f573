"""PostgreSQL servers for tests, the demo and `txmq dev`.

`PostgresServer` is one that somebody else runs: databases can be made on it, nothing
more. `OwnServer` runs one in a directory of its own, on a free port of 127.0.0.1, and
can stop, crash and restart it; it ends with whoever runs it, even if that is killed.
`temporary_server` is the way to one that vanishes in the end; `any_server` takes the
one named by TXMQ_TEST_DSN instead, where that is set.

What kill -9 leaves behind, and what a restart would stumble over: backends that survive
for a while and hold the shared memory, and a `postmaster.pid` whose number may belong
to somebody else by now. Both are cleared before each start; an flock on the directory
proves that no living process still uses the server.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import psycopg2
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn

from txmq.errors import ConfigError, DatabaseUnavailable, DirectoryInUse
from txmq.testing.leash import leash, leashed, let_go
from txmq.testing.ports import free_port
from txmq.testing.postgres_binaries import find_binaries, server_identity
from txmq.testing.postgres_directory import locked, processes_in
from txmq.testing.scram import verifier
from txmq.testing.wait import wait_until

PREFIX: Final = "txmq-postgres-"
START_LIMIT_S: Final = 60.0  # crash recovery on a loaded machine included
STOP_LIMIT_S: Final = 30.0
ABANDONED_S: Final = (
    60.0  # a directory younger than this may belong to somebody who is about to lock it
)
SETTINGS: Final = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_prepared_transactions": "64",
}
LOGICAL: Final = {
    "wal_level": "logical",
    "max_replication_slots": "4",
}  # further settings, for relays
DROP_SLOTS: Final = """
SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots WHERE active;
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
"""


class PostgresServer:
    """A server that runs already; `dsn` must be of a role that may create databases."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._made: list[str] = []

    def dsn(self, dbname: str | None = None) -> str:
        """How to connect to `dbname`, or to the database that the server was named
        with.
        """
        return make_dsn(self._dsn, dbname=dbname) if dbname else self._dsn

    def create_database(self, *, template: str | None = None) -> str:
        """A new database, dropped when the server is stopped; returns its name."""
        name = f"txmq_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else ""))
        self._made.append(name)
        return name

    def drop_database(self, name: str) -> None:
        """Drops it under its users."""
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        if name in self._made:
            self._made.remove(name)

    def execute(self, statement: str, dbname: str | None = None) -> None:
        """Runs one statement outside a transaction."""
        with closing(self.connect(dbname)) as connection, connection.cursor() as cursor:
            cursor.execute(statement)

    def connect(self, dbname: str | None = None) -> Connection:
        """A connection in autocommit mode."""
        connection = psycopg2.connect(self.dsn(dbname), connect_timeout=10)
        connection.autocommit = True
        return connection

    def stop(self) -> None:
        """Takes the databases away that were made here."""
        for name in list(self._made):
            self.drop_database(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class OwnServer(PostgresServer):
    """A server in `directory`, which is made if need be and used again if it has been
    one before.

    `settings` are added to the command line. With `fsync` off a crash of the machine
    may damage the data, a crash of the server does not. Raises ConfigError where no
    server can be run, DirectoryInUse where another process runs it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        fsync: bool = True,
        settings: Mapping[str, str] | None = None,
        temporary: bool = False,
    ) -> None:
        self.directory = directory.resolve()
        self._data = self.directory / "data"
        self._temporary = temporary
        self._identity = server_identity()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = locked(self.directory)
        port = free_port()
        self._settings = (
            SETTINGS | {"port": str(port), "fsync": "on" if fsync else "off"} | dict(settings or {})
        )
        password = self._password()
        super().__init__(
            make_dsn(
                host="127.0.0.1", port=port, user="postgres", password=password, dbname="postgres"
            )
        )

    def start(self) -> Self:
        """Returns once the server accepts connections; recovery after a crash is done
        by then.
        """
        atexit.register(self.stop)
        try:
            self._launch()
            wait_until(
                self.accepts,
                START_LIMIT_S,
                what=f"PostgreSQL in {self.directory} accepts connections",
            )
        except BaseException:
            self.stop("immediate")
            raise
        return self

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Ends the server: in order, or at once as in a crash. A temporary one takes
        its directory with it.
        """
        atexit.unregister(self.stop)
        # A temporary one has nothing to put in order.
        self._end(signal.SIGINT if mode == "fast" and not self._temporary else signal.SIGQUIT)
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)
        self._lock.close()

    def leave_running(self) -> int:
        """Nobody here ends it any more, whatever becomes of this process; returns its
        process's number.
        """
        assert self._process is not None, "it was started"
        atexit.unregister(self.stop)
        let_go(self._process.pid)
        return self._process.pid

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stops and starts it, on the same port; "immediate" goes through crash
        recovery.
        """
        self._end(signal.SIGINT if mode == "fast" else signal.SIGQUIT)
        self.start()

    def kill_server(self) -> None:
        """SIGKILL for every process of the server: what was not yet written to the
        kernel is lost.
        """
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._clear_leftovers()

    def kill_backend(self, pid: int) -> None:
        """SIGKILL for one backend: the server throws out all others and goes through
        crash recovery by itself.
        """
        os.kill(pid, signal.SIGKILL)

    def drop_slots(self) -> None:
        """Drops every replication slot under its reader: a database with slots cannot
        be dropped.
        """
        self.execute(DROP_SLOTS)

    def accepts(self) -> bool:
        """Whether it lets anybody in. Raises DatabaseUnavailable where it has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise DatabaseUnavailable(f"PostgreSQL ended while starting:\n{self._log_tail()}")
        try:
            self.connect().close()
        except psycopg2.OperationalError:
            return False
        return True

    def _launch(self) -> None:
        version = self._data / "PG_VERSION"
        binaries = find_binaries(
            self.directory, major=int(version.read_text()) if version.exists() else None
        ).directory
        if not version.exists():
            self._initialise(binaries)
        self._clear_leftovers()
        arguments = [f"--{name}={value}" for name, value in self._settings.items()]
        with (self.directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                leashed([binaries / "postgres", "-D", self._data, *arguments], signal.SIGQUIT),
                stdin=leash(),
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=_environment(),
                start_new_session=True,  # an interrupt at the terminal is ours to pass on
                **self._identity,
            )

    def _initialise(self, binaries: Path) -> None:
        if self._run("test", "-w", self.directory):
            raise ConfigError(
                "data",
                f"{self.directory} is out of reach of the user that PostgreSQL runs as",
                hint="choose a directory that is not below /root",
            )
        shutil.rmtree(self._data, ignore_errors=True)  # half made by an earlier attempt
        kept = self.directory / "verifier"
        kept.touch(mode=0o600)
        kept.write_text(verifier(self._password()))
        self._hand_over(kept)
        password = f"--pwfile={kept}"
        options = (
            "--username=postgres",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
        )
        if self._run(binaries / "initdb", "-D", self._data, password, *options):
            raise ConfigError("postgres", f"initdb failed:\n{self._log_tail()}")

    def _password(self) -> str:
        path = self.directory / "password"
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_urlsafe(24))
        self._hand_over(self.directory, path)
        return path.read_text()

    def _hand_over(self, *paths: Path) -> None:
        """To the user that the server runs as."""
        if user := self._identity.get("user"):
            for path in paths:
                os.chown(path, user, self._identity["group"])

    def _run(self, *command: str | Path) -> int:
        with (self.directory / "server.log").open("ab") as log:
            return subprocess.run(
                command,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=_environment(),
                check=False,
                **self._identity,
            ).returncode

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_S)
        self.kill_server()

    def _clear_leftovers(self) -> None:
        def any_left() -> bool:
            left = list(processes_in(self._data))
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return bool(left)

        wait_until(
            lambda: not any_left(), STOP_LIMIT_S, what=f"the processes in {self._data} are gone"
        )
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def _log_tail(self) -> str:
        return (self.directory / "server.log").read_text("utf-8", "replace")[-2000:]


def temporary_server(*, fsync: bool = True, settings: Mapping[str, str] | None = None) -> OwnServer:
    """A new server, started; stopping it removes all of it. Those that killed processes
    left behind go first.
    """
    _sweep(Path(tempfile.gettempdir()))
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    return OwnServer(directory, fsync=fsync, settings=settings, temporary=True).start()


def any_server(environ: Mapping[str, str] = os.environ, *, fsync: bool = True) -> PostgresServer:
    """The server of TXMQ_TEST_DSN where that is set, else a temporary one."""
    dsn = environ.get("TXMQ_TEST_DSN")
    return PostgresServer(dsn) if dsn else temporary_server(fsync=fsync)


def _environment() -> dict[str, str]:
    # PGDATA, PGPORT and their like would speak to the server's programs, too.
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {
        "LC_ALL": "C"
    }


def _sweep(parent: Path) -> None:
    """Removes the temporary servers of processes that were killed: nobody holds their
    locks.
    """
    for directory in parent.glob(f"{PREFIX}*"):
        with suppress(OSError, DirectoryInUse):
            if (
                directory.stat().st_uid in _own_users()
                and time.time() - directory.stat().st_mtime > ABANDONED_S
            ):
                OwnServer(directory, temporary=True).stop("immediate")


def _own_users() -> set[int]:
    return {os.geteuid(), server_identity().get("user", os.geteuid())}
