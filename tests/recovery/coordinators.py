"""Coordinators of two databases and two brokers that are killed on their way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.recovery.world import World
from txmq.crashpoints import VARIABLE

ROOT = Path(__file__).parents[2]
COORDINATORS = """
import os, sys, psycopg2, txmq, txmq.client.xa
from txmq.crashpoints import VARIABLE
home, other, topic, first, last, *points = sys.argv[1:]
for point in points:
    pid = os.fork()
    if not pid:
        os.environ[VARIABLE] = point
        connections = [psycopg2.connect(first), psycopg2.connect(last)]
        client = txmq.connect(home, service="orders", timeout=20)
        second = txmq.connect(other, service="orders", timeout=20)
        with client.xa(*connections, timeout=20, check_after=60) as tx:
            token = tx.token.hex
            print(point, token, flush=True)
            for connection in connections:
                with connection.cursor() as cursor:
                    cursor.execute("INSERT INTO effects VALUES (%s)", (token,))
            tx.send(topic, token.encode())
            tx.at(second).send(topic, token.encode())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
"""


def killed(world: World, points: Iterable[str]) -> dict[str, str]:
    """One is killed at each of these crash points; gives their tokens by the points."""
    for client in world.clients:
        client.call("topic.describe", names=[world.topic], create=True)
    urls = [broker.url for broker in world.brokers]
    argv = [sys.executable, "-c", COORDINATORS, *urls, world.topic, *world.dsns.values(), *points]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    told = subprocess.run(argv, env=environment, cwd=ROOT, check=True, timeout=100, capture_output=True).stdout
    return dict(line.split() for line in told.decode().splitlines())
