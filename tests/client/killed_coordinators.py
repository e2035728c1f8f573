"""Coordinators of XA transactions that are killed at crash points."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from txmq.testing.processes import run_script

COORDINATORS = """
import json, os, sys, psycopg2, txmq, txmq.client.blocking.transaction.xa
from txmq.crashpoints import VARIABLE
plan = json.loads(sys.argv[1])
for point in plan["points"]:
    pid = os.fork()
    if not pid:
        os.environ[VARIABLE] = point
        connections = [psycopg2.connect(dsn) for dsn in plan["dsns"]]
        client, *others = [txmq.connect(url, service="orders", timeout=120) for url in plan["urls"]]
        with client.xa(*connections, timeout=120, check_after=60) as tx:
            print(point, tx.token.hex, flush=True)
            row = tx.token.hex if plan["label"] is None else plan["label"] + point
            for connection in connections:
                with connection.cursor() as cursor:
                    cursor.execute(plan["insert"], (row,))
            tx.send(plan["topic"], row.encode(), key="k")
            for other in others:
                tx.at(other).send(plan["topic"], row.encode(), key="k")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
"""

ON_ASYNCIO = """
import asyncio, json, os, sys, asyncpg, psycopg, txmq.aio, txmq.client.aio.transaction.xa
from psycopg2.extensions import parse_dsn
from txmq.crashpoints import VARIABLE
plan = json.loads(sys.argv[1])
async def connect(dsn):
    if plan["driver"] == "psycopg":
        return await psycopg.AsyncConnection.connect(dsn)
    known = parse_dsn(dsn)
    return await asyncpg.connect(database=known.pop("dbname"), **known)
async def coordinate(point):
    connections = [await connect(dsn) for dsn in plan["dsns"]]
    async with txmq.aio.connect(plan["urls"][0], service="orders", timeout=120) as client:
        async with client.xa(*connections, timeout=120, check_after=60) as tx:
            print(point, tx.token.hex, flush=True)
            row = tx.token.hex if plan["label"] is None else plan["label"] + point
            for connection in connections:
                await connection.execute(plan["insert"] % repr(row))
            tx.send(plan["topic"], row.encode(), key="k")
for point in plan["points"]:
    pid = os.fork()
    if not pid:
        os.environ[VARIABLE] = point
        asyncio.run(coordinate(point))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
"""


class Plan(NamedTuple):
    """The work of each coordinator: a row in every database, a message at every broker.

    The first broker is the home. `insert` writes the row. Row and message are `label`
    and the crash point, or the token if `label` is None. `driver`: of asyncio; None:
    psycopg2 with the blocking client.
    """

    urls: Sequence[str]
    dsns: Sequence[str]
    topic: str
    insert: str
    label: str | None = None
    driver: str | None = None


def killed(plan: Plan, points: Iterable[str]) -> dict[str, str]:
    """Kill a coordinator at each crash point; return the tokens by the points."""
    script = COORDINATORS if plan.driver is None else ON_ASYNCIO
    arguments = json.dumps(plan._asdict() | {"points": list(points)})
    return dict(line.split() for line in run_script(script, arguments).splitlines())
