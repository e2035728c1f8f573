"""The order flow of `make demo`, without its faults."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from examples.order_flow import data
from examples.order_flow.deployment import Deployment
from examples.order_flow.faults import ORDERS_PROCESSES
from examples.order_flow.flow import PARTITIONS
from examples.order_flow.order_placed import ORDER_PLACED
from examples.order_flow.traffic import CONSUMERS, COUNTS
from tests.bench.brokers import cpu_s
from tests.bench.rows import Row, Run, benchmark, row
from txmq.testing.wait import wait_until

SCALE, LEAST_SCALE = 0.02, 0.001  # of the input: 30,000 orders
FROM, TO = 0.1, 0.9  # of the orders: all services are up, and none has ended
WITHIN_S = 1_800.0


class Progress(NamedTuple):
    """Orders that are placed, charged, shipped and counted, at a time."""

    orders: int
    seconds: float
    cpu_s: float


@benchmark("flow.orders", "the order flow: placed, charged, shipped and counted")
def orders(run: Run) -> Iterator[Row]:
    with deployed(run) as (deployment, total):
        first = _reached(deployment, FROM * total)
        last = _reached(deployment, TO * total)
    done = last.orders - first.orders
    what = "the order flow without faults, from the row of an order to those of its consumers"
    yield row("flow.orders_rate", what, "orders/s", done / (last.seconds - first.seconds))
    yield row(
        "flow.orders_cpu",
        f"{what}: CPU of services, broker and PostgreSQL for an order",
        "µs",
        (last.cpu_s - first.cpu_s) / done * 1e6,
    )


@contextmanager
def deployed(run: Run) -> Iterator[tuple[Deployment, int]]:
    """Run broker and services on the database; return them and the number of orders."""
    directory = Path(tempfile.mkdtemp(dir=run.directory))
    deployment = Deployment(directory)
    try:
        with patch.dict(os.environ, TXMQ_DSN=run.database.dsn()):
            deployment.start_postgres()
        data.generate(deployment.data, max(LEAST_SCALE, SCALE * run.scale))
        facts = data.load(deployment.data, deployment.dsn)
        deployment.start_broker()
        with deployment.client() as client:
            client.call("topic.create", name=ORDER_PLACED, partitions=PARTITIONS)
        for service, processes in {**CONSUMERS, "orders": ORDERS_PROCESSES}.items():
            for number in range(processes):
                deployment.start_service(f"{service}-{number}", (), of=processes)
        yield deployment, facts.orders
    finally:
        deployment.close(clear=True)
        shutil.rmtree(directory)


def _reached(deployment: Deployment, orders: float) -> Progress:
    """Wait until so many orders have gone through all services."""
    done = 0

    def reached() -> bool:
        nonlocal done
        for process in deployment.fleet.processes.values():
            if process.exit_status():
                raise process.failure()
        [counts] = deployment.query(COUNTS)
        done = min(counts)
        return bool(done >= orders)

    wait_until(reached, WITHIN_S, what=f"{orders:,.0f} orders have gone through")
    return Progress(done, time.monotonic(), _cpu_of_descendants_s())


def _cpu_of_descendants_s() -> float:
    """Return the CPU seconds of all processes that this one has started. Linux only."""
    children = defaultdict[int, list[int]](list)
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children[int(fields[1])].append(int(place.name))
    found = children[os.getpid()]
    for pid in found:  # which grows
        found += children[pid]
    return sum(map(cpu_s, found))
