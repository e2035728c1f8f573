"""The deployment of a run: a PostgreSQL server, a broker and the services, each a
process. With a cluster the broker has three nodes, and their log is in a Kafka.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from string import Template
from typing import Any, Final

import psycopg2
from psycopg2.sql import Composable

import txmq
from examples.order_flow import watch
from examples.order_flow.fleet import ROOT, START_LIMIT_S, Fleet, Process
from txmq.errors import ConfigError, DatabaseUnavailable, TxmqError
from txmq.testing.ports import free_port
from txmq.testing.postgres_server import OwnServer, PostgresServer
from txmq.testing.reaper import release
from txmq.testing.wait import wait_until
from txmq.tx.postgres import schema
from txmq.tx.postgres.session import connect

# Shorter check-backs, sessions and grace periods than the defaults keep the
# demonstration short.
SETTINGS: Final = Template("""\
[broker]
data = $data
name = "$name"
create_topics = true

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
CLUSTER: Final = Template("""
[cluster]
kafka = "$servers"
""")
NODES: Final = ("broker-1", "broker-2", "broker-3")


class Deployment:
    """The processes and directories of a run. `close` ends all processes."""

    def __init__(self, directory: Path, *, cluster: bool = False) -> None:
        self.directory = directory
        self.data = directory / "tpch"
        self.fleet = Fleet(directory / "logs")
        self._is_cluster = cluster
        self._consoles: dict[str, str] = {}  # of the broker's processes
        self._ends = ExitStack()  # what else has to end
        self.url = ""
        self.console = ""
        self.dsn = ""
        self.server: PostgresServer | None = None
        for place in (self.data, self.fleet.logs, self.journals, self.local):
            place.mkdir(parents=True)

    @property
    def journals(self) -> Path:
        """The directory of the journals of the services."""
        return self.directory / "journals"

    @property
    def local(self) -> Path:
        """The directory of what services keep on local disk, one for each process."""
        return self.directory / "local"

    def start_postgres(self) -> str:
        """Create a database with the tables of txmq; return a description of the
        server.

        The server is that of TXMQ_DSN or TXMQ_TEST_DSN, or a new one.
        """
        given = os.environ.get("TXMQ_DSN") or os.environ.get("TXMQ_TEST_DSN")
        if given:
            self.server = PostgresServer(given)
        else:
            # Not below `directory`, which the user of the server may be unable to
            # reach.
            self.server = own = OwnServer(Path(tempfile.mkdtemp(prefix="order-flow-postgres-")))
            own.start()
        try:
            self.dsn = self.fleet.environment["TXMQ_DSN"] = self.server.dsn(
                self.server.create_database()
            )
        except psycopg2.OperationalError as error:
            raise DatabaseUnavailable(
                str(error).strip(), hint="check TXMQ_DSN and TXMQ_TEST_DSN"
            ) from error
        with closing(connect(self.dsn, application_name="order flow")) as connection:
            schema.install(connection)
        return "of TXMQ_DSN" if given else str(self.server.dsn()).partition(" password")[0]

    def crash_postgres(self) -> bool:
        """Crash the server and start it again; False where it is not a server of this
        run.
        """
        if not isinstance(self.server, OwnServer):
            return False
        self.server.restart("immediate")
        return True

    def start_broker(self) -> str:
        """Start the broker; return its address. The console is at `console`."""
        if self._is_cluster:
            return self._start_cluster()
        broker = self._start_node("broker", f"127.0.0.1:{free_port()}", "")
        self.console = self._consoles["broker"]
        return self._use(broker.first_line().removeprefix("ready "))

    def _start_cluster(self) -> str:
        """Start a Kafka and the nodes whose log is there, and wait until one leads."""
        from tests import kafka_nodes  # noqa: PLC0415  # only a run with a cluster has Java

        if kafka_nodes.JAVA is None or not kafka_nodes.JARS.exists():
            reason = "it needs Java and the jars of Kafka"
            raise ConfigError("--cluster", reason, hint="with Maven: make demo CLUSTER=1")
        kafka = self._ends.enter_context(kafka_nodes.kafka_nodes(self._kafka))
        cluster = CLUSTER.substitute(servers=kafka.address.servers)
        config = self._write_settings(NODES[0], cluster)
        create = ["-m", "txmq", "cluster", "create", "--config", str(config)]
        subprocess.run([sys.executable, *create], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        addresses = {name: f"127.0.0.1:{free_port()}" for name in NODES}
        for name, address in addresses.items():
            self._start_node(name, address, cluster)
        self._use(f"txmq://{','.join(addresses.values())}")
        self.console = self._consoles[self._wait_for_leader()]
        return self.url

    def _start_node(self, name: str, address: str, cluster: str) -> Process:
        config = self._write_settings(name, cluster)
        http = f"127.0.0.1:{free_port()}"
        self._consoles[name] = f"http://{http}/"
        options = ["--config", str(config), "--http", http, "--listen", address]
        return self.fleet.start(name, ["-m", "txmq", "broker", *options])

    def _write_settings(self, name: str, cluster: str) -> Path:
        config = self.directory / f"{name}.toml"
        config.touch(mode=0o600)  # the DSN contains a password
        data, dsn = json.dumps(str(self.directory / name)), json.dumps(self.dsn)
        config.write_text(SETTINGS.substitute(name=name, data=data, dsn=dsn) + cluster, "utf-8")
        return config

    def _use(self, url: str) -> str:
        self.url = self.fleet.environment["TXMQ_BROKER"] = url
        return url

    def crash_broker(self) -> str:
        """Kill the broker and start it again, on the same port and data; of a cluster
        the leader, whose disk is lost as well. Return what became of it.
        """
        name = self._wait_for_leader()
        broker = self.fleet.processes[name]
        broker.kill()
        if self._is_cluster:
            shutil.rmtree(self.directory / name)
        broker.start()
        leader = self._wait_for_leader()
        self.console = self._consoles[leader]
        if self._is_cluster:
            return f"{name} is lost with its disk, {leader} leads"
        return "broker is ready again"

    def _wait_for_leader(self) -> str:
        """Return the name of the process that serves, once there is one."""
        found: list[str] = []

        def serves() -> bool:
            for process in self.fleet.named("broker"):
                if process.exit_status() is not None:
                    raise process.failure()
            with suppress(TxmqError), self.client() as client:
                found.append(client.call("broker.show")["name"])
            return bool(found)

        wait_until(serves, START_LIMIT_S, what="a broker serves")
        return found[0]

    def start_service(self, name: str, crash_points: Sequence[str], *, of: int = 1) -> Process:
        """Start a process of a service: "orders-1" is the second one of `of`."""
        service, _, instance = name.partition("-")
        local = self.local / name
        local.mkdir(exist_ok=True)
        places = [f"--data={self.data}", f"--journal={self.journals / name}.journal"]
        places.append(f"--local={local}")
        numbers = [f"--instance={instance}", f"--instances={of}"]
        return self.fleet.start(
            name, ["-m", "examples.order_flow.services", service, *places, *numbers], crash_points
        )

    def start_watch(self, crash_points: Sequence[str]) -> Process:
        """Start the watch over dead letters. Its groups must exist."""
        command = watch.command(str(self.local / watch.NAME))
        return self.fleet.start(watch.NAME, command, crash_points)

    def client(self) -> txmq.Client:
        """Return a client of the broker."""
        return txmq.connect(self.url, service="order-flow", timeout=30)

    def query(
        self, statement: str | Composable, values: Sequence[object] = ()
    ) -> list[tuple[Any, ...]]:
        """Return the rows of a statement.

        It uses a new connection, because the server may have been restarted.
        """
        with (
            closing(psycopg2.connect(self.dsn)) as connection,
            connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(statement, values)
            return cursor.fetchall() if cursor.description else []

    def leave_running(self) -> str:
        """Stop the services only; return the command that ends broker and server."""
        self.fleet.stop(watch.NAME, "tracking", "analytics", "shipping", "payment", "orders")
        broker = self.fleet.processes["broker"].pid
        release(broker)
        ends = [f"kill {broker}"]
        if isinstance(self.server, OwnServer):
            # SIGTERM would wait until all sessions have ended
            ends.append(f"kill -INT {self.server.leave_running()}")
        return "; ".join(
            [*ends, "sleep 2", f"rm -r {shlex.join(map(str, self.data_directories()))}"]
        )

    def close(self, *, clear: bool) -> None:
        """End all processes; `clear` removes the data, too."""
        self.fleet.stop("")
        self._ends.close()
        if self.server is not None:
            self.server.stop()
        if clear:
            for place in self.data_directories():
                shutil.rmtree(place, ignore_errors=True)

    def data_directories(self) -> list[Path]:
        """Return the directories with data."""
        postgres = [self.server.directory] if isinstance(self.server, OwnServer) else []
        brokers = [self.directory / name for name in self._consoles]
        kafka = [self._kafka] if self._is_cluster else []
        return [*brokers, *kafka, self.data, self.local, *postgres]

    @property
    def _kafka(self) -> Path:
        return self.directory / "kafka"
