"""A database, a broker that resolves its transactions, and services that place
orders.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import psycopg2

from tests.system.order_worker import TABLES, reported_outcomes
from tests.system.orders import PlacedOrder, Token, find_faults, wrongly_ended
from tests.system.supervisor import SupervisorConfig, WorkerSpec, run_supervisor
from tests.system.topic_reader import read_topic
from txmq import connect
from txmq.client.blocking.client import Client
from txmq.model.bundle import BundleState
from txmq.testing.own_broker import OwnBroker
from txmq.testing.processes import Running, running
from txmq.testing.wait import wait_until

TOPIC = "orders"
SETTINGS = """
[broker]
partitions = 4

[checks]
first_s = 0.2
then_s = 0.2
longest_s = 1.0

[consumers]
lost_connection_grace_s = 0.1

[[resolver]]
name = "orders"
dsn = {dsn}
"""


class SupervisedWorkers(NamedTuple):
    """Workers of a supervisor that is running."""

    config: SupervisorConfig
    process: Running

    def dead_pids(self) -> Mapping[str, list[int]]:
        """Return the pids of the dead so far, by worker name.

        Raises ProcessEnded if a worker failed by itself.
        """
        if not self.process.alive and self.process.status():
            raise self.process.unexpected_end()
        return self.config.dead_pids()

    def deaths(self) -> dict[str, int]:
        """Return the number of deaths, by worker name."""
        return {worker: len(pids) for worker, pids in self.dead_pids().items()}


@contextmanager
def supervised(directory: Path, config: SupervisorConfig) -> Iterator[SupervisedWorkers]:
    """Run a supervisor and its workers for the block."""
    with running(directory / "supervisor", config.encode(), command=run_supervisor) as process:
        yield SupervisedWorkers(config, process)
        config.stop.touch()
        if process.status():
            raise process.unexpected_end()


class OrderSystem(NamedTuple):
    """A broker and a database with the orders of services.

    Services write the outcomes that txmq reports to them into `journals`.
    """

    directory: Path
    dsn: str
    broker: OwnBroker
    client: Client

    @property
    def journals(self) -> Path:
        return self.directory / "journals"

    @contextmanager
    def run_workers(
        self, *workers: WorkerSpec, program: str = "order_worker"
    ) -> Iterator[SupervisedWorkers]:
        """Run services for the block; each finishes the order that it has begun."""
        self.journals.mkdir()
        config = SupervisorConfig(
            program, self.broker.url, self.dsn, TOPIC, str(self.journals), workers
        )
        with supervised(self.directory, config) as supervised_workers:
            yield supervised_workers

    def query(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        """Return the rows of a statement, on a connection of its own in autocommit
        mode.
        """
        with closing(psycopg2.connect(self.dsn)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement, values)
                return [] if cursor.description is None else cursor.fetchall()

    def rows(self) -> list[PlacedOrder]:
        found = self.query("SELECT replace(token::text, '-', ''), key, version FROM placed")
        return [
            PlacedOrder(str(token), str(key), int(str(version))) for token, key, version in found
        ]

    def messages(self) -> list[PlacedOrder]:
        """Return the orders in the topic, by partition and offset."""
        found = read_topic(self.client, TOPIC)
        return [
            PlacedOrder.decode(message.body)
            for message in sorted(found, key=lambda m: (m.partition, m.offset))
        ]

    def transactions(self, state: str) -> list[dict[str, object]]:
        """Return the transactions that the broker lists under this state."""
        found: list[dict[str, object]] = self.client.call("tx.list", state=state, limit=100)[
            "transactions"
        ]
        return found

    def wait_until_decided(self) -> None:
        """Wait until the broker has decided every transaction."""
        for state in ("undecided", "waiting"):
            wait_until(lambda: not self.transactions(state), what=f"nothing is {state}")  # noqa: B023

    def decided(self, tokens: Iterable[Token]) -> bool:
        """Return whether the broker has decided these transactions, all of which it
        stores.
        """
        shown = (self.client.call("tx.show", token=token) for token in tokens)
        return all(
            BundleState[row["state"]] in (BundleState.PUBLISHED, BundleState.ROLLED_BACK)
            for row in shown
        )

    def check(
        self, expected: Mapping[Token, bool] | None = None, *, may_time_out: bool = False
    ) -> dict[str, int]:
        """Check that rows and messages are the same orders, and return counts.

        `expected` maps tokens to whether they must be committed. With `may_time_out`,
        the broker may roll a transaction back before its COMMIT arrives.
        """
        self.wait_until_decided()
        reported, rows, messages = reported_outcomes(self.journals), self.rows(), self.messages()
        conflicts = [
            row
            for row in self.transactions("conflicts")
            if not (may_time_out and row["asked"] == "COMMIT")
        ]
        found = [
            *find_faults(reported, rows, messages),
            *wrongly_ended(expected or {}, rows),
            *map(str, conflicts),
        ]
        assert found == [], "\n".join(found[:20])
        outcomes = Counter(str(outcome) for outcome in reported.values())
        return {
            "transactions": len(reported),
            **outcomes,
            "rows": len(rows),
            "messages": len(messages),
        }


@contextmanager
def order_system(directory: Path, dsn: str) -> Iterator[OrderSystem]:
    """Start a broker for the block. `dsn` names a database with the tables of txmq."""
    with (
        OwnBroker(directory / "broker", SETTINGS.format(dsn=json.dumps(dsn))) as broker,
        connect(broker.url) as client,
    ):
        client.call("topic.create", name=TOPIC, partitions=4)
        system = OrderSystem(directory, dsn, broker, client)
        system.query(TABLES)
        yield system


def endless_workers(number: int, *keys: str) -> Sequence[WorkerSpec]:
    """Return workers that are replaced until the end.

    All of them use these keys, or each has a key of its own.
    """
    return [
        WorkerSpec(f"worker-{at}", arguments=keys or (f"customer-{at}",)) for at in range(number)
    ]
