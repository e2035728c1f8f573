"""A shop: a database, a broker that has it for a resolver, and a farm of services that
place orders.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import psycopg2

from tests.system.farm import Job, Lane, run_farm
from tests.system.orders import Order, Token, faults, misjudged
from tests.system.placing import TABLES, told
from tests.system.reading import whole_topic
from txmq import connect
from txmq.client import Client
from txmq.model.bundle import GroupState
from txmq.testing.broker import OwnBroker
from txmq.testing.processes import Running, running
from txmq.testing.wait import wait_until

TOPIC = "orders"
PATIENCE_S = 60.0
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
name = "shop"
dsn = {dsn}
"""


class Farm(NamedTuple):
    """Services at work."""

    job: Job
    process: Running

    def dead(self) -> Mapping[str, list[int]]:
        """The pids of each lane's dead so far. Raises ProcessEnded where a service
        failed by itself.
        """
        if not self.process.alive and self.process.status():
            raise self.process.ended()
        return self.job.dead()

    def hits(self) -> dict[str, int]:
        """How many have died in each lane."""
        return {lane: len(pids) for lane, pids in self.dead().items()}


class Shop(NamedTuple):
    """Where services place orders. `journals` is where they write down what they were
    told.
    """

    directory: Path
    dsn: str
    broker: OwnBroker
    client: Client

    @property
    def journals(self) -> Path:
        return self.directory / "journals"

    @contextmanager
    def farm(self, *lanes: Lane, work: str = "placing") -> Iterator[Farm]:
        """Services for the block; they finish what they have begun."""
        self.journals.mkdir()
        job = Job(work, self.broker.url, self.dsn, TOPIC, str(self.journals), lanes)
        with running(self.directory / "farm", job.encode(), command=run_farm) as process:
            yield Farm(job, process)
            job.stop.touch()
            if process.status():
                raise process.ended()

    def query(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        """What the database says, on a connection of its own in autocommit mode."""
        with closing(psycopg2.connect(self.dsn)) as connection:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(statement, values)
                return [] if cursor.description is None else cursor.fetchall()

    def rows(self) -> list[Order]:
        found = self.query("SELECT replace(token::text, '-', ''), key, version FROM placed")
        return [Order(str(token), str(key), int(str(version))) for token, key, version in found]

    def messages(self) -> list[Order]:
        """The orders in the topic, partition by partition."""
        found = whole_topic(self.client, self.broker.url, TOPIC)
        return [
            Order.decode(message.body)
            for message in sorted(found, key=lambda m: (m.partition, m.offset))
        ]

    def listed(self, state: str) -> list[dict[str, object]]:
        """The transactions that the broker lists under this state."""
        found: list[dict[str, object]] = self.client.call("tx.list", state=state, limit=100)[
            "transactions"
        ]
        return found

    def settle(self) -> None:
        """Returns once the broker knows the end of every transaction."""
        for state in ("undecided", "waiting"):
            wait_until(lambda: not self.listed(state), PATIENCE_S, what=f"nothing is {state}")

    def decided(self, tokens: Iterable[Token]) -> bool:
        """Whether the broker knows the end of these transactions, which it has."""
        shown = (self.client.call("tx.show", token=token) for token in tokens)
        return all(
            GroupState[row["state"]] in (GroupState.PUBLISHED, GroupState.ROLLED_BACK)
            for row in shown
        )

    def judge(
        self, hits: Mapping[Token, bool] = {}, *, timed: bool = False
    ) -> dict[str, int]:  # read only
        """Fails where rows and messages are not the same orders, or a hit ended
        otherwise; returns figures.

        `timed`: the broker may roll transactions back after a time, so that a COMMIT
        may come too late.
        """
        self.settle()
        said, rows, messages = told(self.journals), self.rows(), self.messages()
        conflicts = [
            one for one in self.listed("conflicts") if not (timed and one["asked"] == "COMMIT")
        ]
        found = [*faults(said, rows, messages), *misjudged(hits, rows), *map(str, conflicts)]
        assert found == [], "\n".join(found[:20])
        outcomes = Counter(str(outcome) for outcome in said.values())
        return {"transactions": len(said), **outcomes, "rows": len(rows), "messages": len(messages)}


@contextmanager
def opened(directory: Path, dsn: str) -> Iterator[Shop]:
    """A shop that has just opened; `dsn` leads to a database with txmq's tables."""
    with (
        OwnBroker(directory / "broker", SETTINGS.format(dsn=json.dumps(dsn))) as broker,
        connect(broker.url) as client,
    ):
        client.call("topic.create", name=TOPIC, partitions=4)
        shop = Shop(directory, dsn, broker, client)
        shop.query(TABLES)
        yield shop


def tills(number: int, *keys: str) -> Sequence[Lane]:
    """So many lanes that go on until the end: each with a key of its own where `keys`
    names none.
    """
    return [Lane(f"till-{at}", arguments=keys or (f"customer-{at}",)) for at in range(number)]
