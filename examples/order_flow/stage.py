"""Where the flow runs: a PostgreSQL server, a broker and the services, each a process
of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from string import Template
from typing import Any, Final

import psycopg2
from psycopg2.sql import Composable

import txmq
from examples.order_flow.processes import Fleet, Process
from txmq.errors import DatabaseUnavailable
from txmq.testing.leash import let_go
from txmq.testing.ports import free_port
from txmq.testing.postgres import OwnServer, PostgresServer
from txmq.tx.postgres import schema
from txmq.tx.postgres.session import connect

# Checks, sessions and grace are shortened: the demonstration cannot wait as long as a
# business can.
SETTINGS: Final = Template("""\
[broker]
data = $data
name = "order-flow"

[consumers]
session_s = 6
lost_connection_grace_s = 0.5

[checks]
first_s = 1.0
then_s = 1.0
longest_s = 5.0

[[resolver]]
name = "shop"
dsn = $dsn
""")


class Stage:
    """One run's processes and places. `close` ends all of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "tpch"
        self.fleet = Fleet(directory / "logs")
        self.url = ""
        self.console = ""
        self.dsn = ""
        self.server: PostgresServer | None = None
        for place in (self.data, self.fleet.logs, self.journals):
            place.mkdir(parents=True)

    @property
    def journals(self) -> Path:
        """Where the services note what they do."""
        return self.directory / "journals"

    def start_postgres(self) -> str:
        """The server of TXMQ_DSN or TXMQ_TEST_DSN, or one of our own; a database on it,
        with txmq's tables.
        """
        given = os.environ.get("TXMQ_DSN") or os.environ.get("TXMQ_TEST_DSN")
        if given:
            self.server = PostgresServer(given)
        else:
            # Not below `directory`: the server's user may not get there.
            self.server = own = OwnServer(Path(tempfile.mkdtemp(prefix="order-flow-postgres-")))
            own.start()
        try:
            self.dsn = self.fleet.environment["TXMQ_DSN"] = self.server.dsn(
                self.server.create_database()
            )
        except psycopg2.OperationalError as error:
            raise DatabaseUnavailable(
                str(error).strip(), hint="TXMQ_DSN or TXMQ_TEST_DSN leads there"
            ) from error
        with closing(connect(self.dsn, application_name="order flow")) as connection:
            schema.install(connection)
        return "of TXMQ_DSN" if given else str(self.server.dsn()).partition(" password")[0]

    def crash_postgres(self) -> bool:
        """Ends the server as in a crash and starts it again; False where it is not ours
        to end.
        """
        if not isinstance(self.server, OwnServer):
            return False
        self.server.restart("immediate")
        return True

    def start_broker(self) -> str:
        """Returns its address once it serves; its console is at `console`."""
        config = self.directory / "broker.toml"
        config.touch(mode=0o600)  # the DSN holds a password
        places = {"data": json.dumps(str(self.directory / "broker")), "dsn": json.dumps(self.dsn)}
        config.write_text(SETTINGS.substitute(places), "utf-8")
        http = f"127.0.0.1:{free_port()}"
        command = ["-m", "txmq", "broker", "--config", str(config), "--http", http, "--listen"]
        broker = self.fleet.start("broker", [*command, "127.0.0.1:0"])
        self.url = self.fleet.environment["TXMQ_BROKER"] = broker.first_line().removeprefix(
            "ready "
        )
        self.console = f"http://{http}/"
        broker.command = [
            *command,
            self.url.removeprefix("txmq://"),
        ]  # the same port in its later lives
        return self.url

    def crash_broker(self) -> None:
        """Kills the broker and starts it again, on the same port and data."""
        broker = self.fleet.processes["broker"]
        broker.kill()
        broker.start()
        broker.first_line()

    def start_service(self, name: str, deaths: Sequence[str], *, of: int = 1) -> Process:
        """A process of a service: "orders-1" is the second of its kind, of so many."""
        service, _, instance = name.partition("-")
        places = [f"--data={self.data}", f"--journal={self.journals / name}.journal"]
        numbers = [f"--instance={instance}", f"--instances={of}"]
        return self.fleet.start(
            name, ["-m", "examples.order_flow.services", service, *places, *numbers], deaths
        )

    def client(self) -> txmq.Client:
        """A client of the broker."""
        return txmq.connect(self.url, service="order-flow", timeout=30)

    def query(
        self, statement: str | Composable, values: Sequence[object] = ()
    ) -> list[tuple[Any, ...]]:
        """The rows of a statement, on a connection of its own: the server may have been
        restarted since the last.
        """
        with (
            closing(psycopg2.connect(self.dsn)) as connection,
            connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(statement, values)
            return cursor.fetchall() if cursor.description else []

    def leave_running(self) -> str:
        """Ends the services alone; returns the command that ends broker and server,
        which nobody looks after then.
        """
        self.fleet.stop("analytics", "shipping", "payment", "orders")
        broker = self.fleet.processes["broker"].pid
        let_go(broker)
        ends = [f"kill {broker}"]
        if isinstance(self.server, OwnServer):
            ends.append(
                f"kill -INT {self.server.leave_running()}"
            )  # SIGTERM would wait for every psql to leave
        return "; ".join([*ends, "sleep 2", f"rm -r {shlex.join(map(str, self.places()))}"])

    def close(self, *, clear: bool) -> None:
        """Ends everything; `clear` takes the data away, too."""
        self.fleet.stop("")
        if self.server is not None:
            self.server.stop()
        if clear:
            for place in self.places():
                shutil.rmtree(place, ignore_errors=True)

    def places(self) -> list[Path]:
        """Where the data is."""
        postgres = [self.server.directory] if isinstance(self.server, OwnServer) else []
        return [self.directory / "broker", self.data, *postgres]
