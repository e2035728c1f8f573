"""A message that kills its consumer each time, among many harmless ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.client.real import RealBroker
from txmq.client.blocking.client import Client

ROOT = Path(__file__).parents[3]
MESSAGES, POISON = 400, 123
CONSUMERS = """
import json, os, signal, sys, txmq
plan = json.loads(sys.argv[1])
retry = txmq.RetryPolicy((0.01, 0.01))

def handle(message):
    if message.body == plan["poison"].encode():
        os.kill(os.getpid(), signal.SIGKILL)
    print(message.offset, message.attempt, flush=True)

deaths = 0
while True:
    pid = os.fork()
    if not pid:
        topic, client = plan["topic"], txmq.connect(plan["url"])
        with client.consumer(topic, [topic], member="m", retry=retry) as consumer:
            while True:
                message = consumer.receive(0.2)
                if message is not None:
                    handle(message)
                    consumer.ack(message)
                elif not client.call("group.show", group=topic)["positions"][0]["unsettled"]:
                    break
        os._exit(0)
    if not os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        print("deaths", deaths, flush=True)
        break
    deaths += 1
"""


def consumed(url: str, topic: str) -> tuple[int, list[tuple[int, int]]]:
    """Run consumers until one finds nothing left. Return the number of deaths, and
    (offset, attempt) of the handled messages.
    """
    argv = [
        sys.executable,
        "-c",
        CONSUMERS,
        json.dumps({"url": url, "topic": topic, "poison": "poison"}),
    ]
    told = subprocess.run(
        argv,
        env=dict(os.environ),
        cwd=ROOT,
        check=True,
        timeout=200,
        capture_output=True,
        text=True,
    )
    *handled, (_word, deaths) = [line.split() for line in told.stdout.splitlines()]
    return int(deaths), [(int(offset), int(attempt)) for offset, attempt in handled]


def test_only_the_message_that_kills_is_a_dead_letter(
    real: RealBroker, connect: Callable[..., Client]
) -> None:
    client = connect(real.url)
    client.call("topic.create", name="poisoned", partitions=1)
    bodies = [b"poison" if n == POISON else b"%d" % n for n in range(MESSAGES)]
    client.send_many("poisoned", bodies, keys=[str(n % 50) for n in range(MESSAGES)])
    deaths, handled = consumed(real.url, "poisoned")
    assert {offset for offset, _attempt in handled} == set(range(MESSAGES)) - {POISON}
    assert {attempt for _offset, attempt in handled} == {1}, (
        "no other message comes nearer to the dead letters"
    )
    [letter] = client.call("dlq.list", group="poisoned")["letters"]
    assert (letter["offset"], letter["deaths"], letter["attempts"]) == (POISON, deaths, 3)
    assert letter["error_text"].startswith(f"{deaths} consumers died")
