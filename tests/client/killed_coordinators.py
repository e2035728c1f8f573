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
        client, *others = [txmq.connect(url, service="orders", timeout=20) for url in plan["urls"]]
        with client.xa(*connections, timeout=20, check_after=60) as tx:
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


class Plan(NamedTuple):
    """The work of each coordinator: a row in every database, a message at every broker.

    The first broker is the home. `insert` writes the row. Row and message are `label`
    and the crash point, or the token if `label` is None.
    """

    urls: Sequence[str]
    dsns: Sequence[str]
    topic: str
    insert: str
    label: str | None = None


def killed(plan: Plan, points: Iterable[str]) -> dict[str, str]:
    """Kill a coordinator at each crash point; return the tokens by the points."""
    arguments = json.dumps(plan._asdict() | {"points": list(points)})
    return dict(line.split() for line in run_script(COORDINATORS, arguments).splitlines())
