"""A real PgBouncer in transaction mode, where Debian's package is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2
import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from txmq.testing.ports import free_port
from txmq.testing.reaper import reaped, reaper_pipe
from txmq.testing.wait import PATIENCE_S, wait_until

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_pgbouncer = pytest.mark.skipif(PROGRAM is None, reason="no pgbouncer (Debian's package)")
SETTINGS = """
[databases]
* = host={host} port={port} user={user} password={password}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {size}
ignore_startup_parameters = extra_float_digits
log_connections = 0
log_disconnections = 0
"""


class PgBouncer:
    """A pooler that listens at `dsn(database)`."""

    def __init__(self, port: int, dsn: str) -> None:
        self._port, self._dsn = port, dsn

    def dsn(self, dsn: str) -> str:
        """Return a DSN that leads to the same database through the pooler."""
        return make_dsn(dsn, host="127.0.0.1", port=self._port)


@contextmanager
def pgbouncer(dsn: str, size: int = 2) -> Iterator[PgBouncer]:
    """Run a pooler before the server of `dsn`, with so many connections a database."""
    assert PROGRAM is not None, "needs_pgbouncer"
    known, listen = parse_dsn(dsn), free_port()
    with tempfile.TemporaryDirectory(prefix="txmq-pgbouncer-") as directory:
        file = Path(directory) / "pgbouncer.ini"
        file.write_text(
            SETTINGS.format(
                host=known["host"],
                port=known["port"],
                user=known["user"],
                password=known.get("password", ""),
                listen=listen,
                size=size,
            )
        )
        command = [PROGRAM, "-q", str(file)]
        if os.geteuid() == 0:  # it refuses to be root
            shutil.chown(directory, "nobody")
            shutil.chown(file, "nobody")
            command[1:1] = ["-u", "nobody"]
        process = subprocess.Popen(
            reaped(command),
            stdin=reaper_pipe(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        pooler = PgBouncer(listen, dsn)

        def answers() -> bool:
            try:
                psycopg2.connect(pooler.dsn(dsn)).close()
            except psycopg2.OperationalError:
                return False
            return True

        try:
            wait_until(answers, what="pgbouncer answers")
            yield pooler
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
