"""Consumers with a local store killed at each of their crash points: each message has
one effect, and the broker settles all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.client.effects import effects, take_effect, with_effects
from tests.client.real import RealBroker
from tests.client.real_consumers import drain
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.model.message import Message, ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.testing.processes import run_script
from txmq.tx.postgres.session import Connection

RETRY = RetryPolicy((0.2,), retries=20)
POINTS = (
    "consumer.before_store",
    "consumer.after_store",
    "consumer.before_attempt",
    "consumer.after_attempt",
    "consumer.before_outcome",
    "consumer.after_outcome",
)
# a process that fails each message once, and dies at its crash point
CHILD = """
import os, sys, json, psycopg2, txmq
from txmq.crashpoints import VARIABLE
url, dsn, mode, runs = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])

def handle(message, connection):
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO effects VALUES (%s, %s)", (message.body.decode(), 0))
    if message.attempt == 1:
        raise KeyError("k")

children = []
for point, topic, directory in runs:
    pid = os.fork()
    if not pid:
        os.environ[VARIABLE] = point
        with txmq.connect(url, service="killed", timeout=120) as client:
            retry = txmq.RetryPolicy((0.2,), retries=20)
            consumer = client.consumer(
                topic, [topic], mode=mode, on_failure="local", local_store=directory,
                retry=retry, session=1, lease=1,
            )
            consumer.run(handle, inbox=lambda: psycopg2.connect(dsn), workers=2)
        os._exit(0)
    children.append((point, pid))
for point, pid in children:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9, point
"""


@pytest.fixture
def connect_database(database: str) -> Callable[[], Connection]:
    return with_effects(database)


def handle(message: ReceivedMessage, connection: Connection) -> None:
    take_effect(message, connection)
    if message.attempt == 1:
        raise KeyError("k")


@pytest.mark.parametrize("mode", ["concurrent", "ordered"])
def test_each_message_has_one_effect_wherever_its_process_dies(
    client: Client,
    shared_broker: RealBroker,
    database: str,
    connect_database: Callable[[], Connection],
    tmp_path: Path,
    mode: str,
) -> None:
    runs, expected = [], list[str]()
    for point in POINTS:
        topic = fresh("t")
        bodies = [f"{point}-{number}" for number in range(3)]
        client.call("topic.create", name=topic, partitions=1)
        client.send_batch(topic, [Message(body.encode(), "key") for body in bodies])
        runs.append((point, topic, str(tmp_path / topic)))
        expected += bodies
    run_script(CHILD, shared_broker.url, database, mode, json.dumps(runs))
    for _point, topic, directory in runs:
        with client.consumer(
            topic,
            [topic],
            mode=mode,  # type: ignore[arg-type]
            on_failure="local",
            local_store=directory,
            retry=RETRY,
            session=1,
            lease=1,
        ) as consumer:
            drain(client, consumer, handle, inbox=connect_database)
    assert effects(connect_database) == sorted(expected)
