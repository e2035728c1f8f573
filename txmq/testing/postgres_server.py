"""PostgreSQL servers for tests, the demo and `txmq dev`.

`PostgresServer` is a running server, on which databases can be made. `OwnServer` runs a
server in a directory, on a free port of 127.0.0.1, and can stop, crash and restart it;
the server ends with the process that runs it. `temporary_server` starts one that is
removed when it stops. `any_server` uses the server of TXMQ_TEST_DSN where that is set.

SIGKILL leaves two obstacles to a restart. Backends survive for a while and hold the
shared memory. The process id in `postmaster.pid` may belong to another process by now.
Both are cleared before each start; a lock on the directory proves that no living
process still uses the server.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Literal, Self
from urllib.parse import quote, urlencode

import psycopg2
from psycopg2.extensions import connection as Connection  # noqa: N812  # a class, whatever its name
from psycopg2.extensions import make_dsn, parse_dsn
from psycopg2.sql import SQL, Identifier

from txmq.errors import ConfigError, DatabaseUnavailable, DirectoryInUse
from txmq.testing.ports import kept_port
from txmq.testing.postgres_binaries import find_binaries, server_identity
from txmq.testing.reaper import reaped, reaper_pipe, release
from txmq.testing.scram import verifier
from txmq.testing.wait import PATIENCE_S, wait_until

PREFIX: Final = "txmq-postgres-"
START_LIMIT_S: Final = 60.0  # crash recovery on a loaded machine included
STOP_LIMIT_S: Final = 30.0
# a younger directory may belong to a process that is about to lock it
ABANDONED_S: Final = 60.0
SETTINGS: Final = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_prepared_transactions": "64",
}
URL_FIELDS: Final = (("", "user"), (":", "password"), ("@", "host"), (":", "port"), ("/", "dbname"))
LOGICAL: Final = {
    "wal_level": "logical",
    "max_replication_slots": "4",
}  # further settings, for relays
DROP_SLOTS: Final = """
SELECT pg_terminate_backend(active_pid, 10000) FROM pg_replication_slots WHERE active;
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
"""


def postgres_url(dsn: str) -> str:
    """Return a libpq DSN as a URL, which any PostgreSQL client takes."""
    fields = parse_dsn(dsn)
    place = "".join(
        before + quote(fields.pop(name), safe="") for before, name in URL_FIELDS if name in fields
    )
    return f"postgresql://{place}" + (f"?{urlencode(fields)}" if fields else "")


class PostgresServer:
    """A running server; the role of `dsn` must be able to create databases."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._made: list[str] = []

    def dsn(self, dbname: str | None = None) -> str:
        """Return the DSN of database `dbname`, by default of the one in the own DSN."""
        return make_dsn(self._dsn, dbname=dbname) if dbname else self._dsn

    def create_database(self, *, template: str | None = None) -> str:
        """Create a database and return its name.

        `stop` drops it.
        """
        name = f"txmq_{secrets.token_hex(6)}"
        self.execute(f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else ""))
        self._made.append(name)
        return name

    def require_database(self, name: str) -> None:
        """Create a database of this name unless it is there."""
        with closing(self.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT FROM pg_database WHERE datname = %s", (name,))
            if cursor.fetchone() is None:
                cursor.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))

    def drop_database(self, name: str) -> None:
        """Drop a database, even while it is in use."""
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        if name in self._made:
            self._made.remove(name)

    def execute(self, statement: str, dbname: str | None = None) -> None:
        """Run one statement outside a transaction."""
        with closing(self.connect(dbname)) as connection, connection.cursor() as cursor:
            cursor.execute(statement)

    def connect(self, dbname: str | None = None) -> Connection:
        """Return a connection in autocommit mode."""
        connection = psycopg2.connect(self.dsn(dbname), connect_timeout=int(PATIENCE_S))
        connection.autocommit = True
        return connection

    def stop(self) -> None:
        """Drop the databases that were created here."""
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
    """A server in `directory`, which is created or used again.

    It keeps its port, unless another process has taken it meanwhile. `settings` are
    added to the command line. With `fsync` off a crash of the machine
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
        self._lock = _locked(self.directory)
        port = kept_port(self.directory / "port")
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
        """Start the server and wait until it accepts connections, after any
        recovery.
        """
        atexit.register(self.stop)
        try:
            self._launch()
            wait_until(
                self.accepts_connections,
                START_LIMIT_S,
                what=f"PostgreSQL in {self.directory} accepts connections",
            )
        except BaseException:
            self.stop("immediate")
            raise
        return self

    def stop(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop the server: "fast" is in order, "immediate" as in a crash.

        The directory of a temporary server is removed.
        """
        atexit.unregister(self.stop)
        # A temporary server needs no orderly shutdown.
        self._end(signal.SIGINT if mode == "fast" and not self._temporary else signal.SIGQUIT)
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)
        self._lock.close()

    def leave_running(self) -> int:
        """Keep the server running after this process; return its process id."""
        assert self._process is not None, "the server was started"
        atexit.unregister(self.stop)
        release(self._process.pid)
        return self._process.pid

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Restart the server on the same port; "immediate" leads to crash recovery."""
        self._end(signal.SIGINT if mode == "fast" else signal.SIGQUIT)
        self.start()

    def kill_server(self) -> None:
        """Send SIGKILL to all processes of the server.

        Data that they have not written to the kernel is lost.
        """
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._clear_leftovers()

    def kill_backend(self, pid: int) -> None:
        """Send SIGKILL to one backend; the server then resets all others and
        recovers.
        """
        os.kill(pid, signal.SIGKILL)

    def drop_slots(self) -> None:
        """Drop all replication slots, even while they are in use.

        A database with slots cannot be dropped.
        """
        self.execute(DROP_SLOTS)

    def accepts_connections(self) -> bool:
        """Return whether a connection succeeds.

        Raises DatabaseUnavailable where the server has ended.
        """
        if self._process is not None and self._process.poll() is not None:
            raise DatabaseUnavailable(f"PostgreSQL ended during its start:\n{self._log_tail()}")
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
                reaped([binaries / "postgres", "-D", self._data, *arguments], signal.SIGQUIT),
                stdin=reaper_pipe(),
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=_environment(),
                start_new_session=True,  # this process passes interrupts on
                **self._identity,
            )

    def _initialise(self, binaries: Path) -> None:
        if self._run("test", "-w", self.directory):
            raise ConfigError(
                "data",
                f"{self.directory} cannot be reached by the user that PostgreSQL runs as",
                hint="choose a directory that this user can reach, such as one outside /root",
            )
        shutil.rmtree(self._data, ignore_errors=True)  # left incomplete by an earlier attempt
        verifier_file = self.directory / "verifier"
        verifier_file.touch(mode=0o600)
        verifier_file.write_text(verifier(self._password()))
        self._give_to_server_user(verifier_file)
        password = f"--pwfile={verifier_file}"
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
        self._give_to_server_user(self.directory, path)
        return path.read_text()

    def _give_to_server_user(self, *paths: Path) -> None:
        """Make the user that the server runs as own these paths."""
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
            left = list(_processes_in(self._data))
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


def temporary_server(
    *,
    fsync: bool = True,
    settings: Mapping[str, str] | None = None,
    parent: Path | None = None,
) -> OwnServer:
    """Start a new server, which is removed when it stops, in `parent`, by default the
    directory of temporary files.

    Servers that killed processes left behind are removed first.
    """
    parent = parent or Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    return OwnServer(directory, fsync=fsync, settings=settings, temporary=True).start()


def any_server(
    environ: Mapping[str, str] = os.environ, *, fsync: bool = True, parent: Path | None = None
) -> PostgresServer:
    """Return the server of TXMQ_TEST_DSN, or a temporary one in `parent`."""
    dsn = environ.get("TXMQ_TEST_DSN")
    return PostgresServer(dsn) if dsn else temporary_server(fsync=fsync, parent=parent)


def _environment() -> dict[str, str]:
    # The server's programs would read PGDATA, PGPORT and other variables, too.
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {
        "LC_ALL": "C"
    }


def _remove_abandoned(parent: Path) -> None:
    """Remove the temporary servers of killed processes, whose locks are free."""
    for directory in parent.glob(f"{PREFIX}*"):
        with suppress(OSError, DirectoryInUse):
            if (
                directory.stat().st_uid in _own_users()
                and time.time() - directory.stat().st_mtime > ABANDONED_S
            ):
                OwnServer(directory, temporary=True).stop("immediate")


def _own_users() -> set[int]:
    return {os.geteuid(), server_identity().get("user", os.geteuid())}


def _locked(directory: Path) -> IO[bytes]:
    """Return the lock of the directory, held while the file is open.

    Raises DirectoryInUse where another process holds it, ConfigError.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("ab")
    except OSError as error:
        raise ConfigError(
            "data", f"{directory}: {error.strerror}", hint="name one that can be written"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        message = f"another process runs a PostgreSQL server in {directory}"
        raise DirectoryInUse(message, hint="stop it, or name another directory") from None
    return lock


def _processes_in(directory: Path) -> Iterator[int]:
    """Yield the processes with this working directory, zombies excluded.

    Without /proc there are none; left-over processes then end by themselves.
    """
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if link.readlink() == directory:
                yield int(link.parent.name)
