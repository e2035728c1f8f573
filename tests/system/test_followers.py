"""Consumers of an ordered group that are killed again and again: every key comes whole,
in its order.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random

import pytest

from tests.reporting import Report
from tests.system.farm import Job, Lane, run_farm
from tests.system.following import GROUP, alive, effects_of
from tests.system.shop import Farm
from txmq import connect
from txmq.client import Client
from txmq.testing.broker import OwnBroker
from txmq.testing.processes import running
from txmq.testing.wait import wait_until

TOPIC, PARTITIONS, GROWN, KEYS, WORKERS = "versions", 8, 12, 48, 8
AT_ONCE = 480  # messages sent together
SETTINGS = "[consumers]\nlost_connection_grace_s = 0.1\n"
PATIENCE_S = 120.0
KILLS, SOAK_KILLS, SOAK_EVERY_S = 16, 60, 1.0


class Versions:
    """Messages of many keys, each with the next version of its key; and what became of
    them.
    """

    def __init__(self, client: Client, job: Job) -> None:
        self._client, self.job = client, job
        self.sent: Counter[str] = Counter()
        self._numbers = count()

    def send(self) -> None:
        keys = [f"k{next(self._numbers) % KEYS}" for _ in range(AT_ONCE)]
        bodies = []
        for key in keys:
            self.sent[key] += 1
            bodies.append(str(self.sent[key]).encode())
        self._client.send_many(TOPIC, bodies, keys=keys)

    def effects(self) -> list[tuple[str, int]]:
        """Key and version of each effect, in the order in which they took place."""
        path = effects_of(Path(self.job.directory))
        lines = path.read_text().splitlines() if path.exists() else []
        return [(key, int(version)) for key, version in (line.split() for line in lines)]

    def progressed(self, least: int) -> None:
        """Returns once there are so many effects."""
        wait_until(lambda: len(self.effects()) >= least, PATIENCE_S, what=f"{least} effects")

    def judge(self) -> dict[str, int]:
        """Fails where a version is missing, or came before the one before it; returns
        counts.
        """
        wait_until(
            lambda: set(self.effects()) >= self._all(),
            PATIENCE_S,
            what="every version of every key",
        )
        wait_until(lambda: self._left() == 0, PATIENCE_S, what="nothing is left to do")
        reached: Counter[str] = Counter()
        for key, version in self.effects():
            assert version <= reached[key] + 1, (
                f"version {version} of {key} before {reached[key] + 1}"
            )
            reached[key] = max(reached[key], version)
        assert reached == self.sent
        return {"messages": sum(self.sent.values()), "effects": len(self.effects())}

    def _all(self) -> set[tuple[str, int]]:
        return {(key, version) for key, last in self.sent.items() for version in range(1, last + 1)}

    def _left(self) -> int:
        shown = self._client.call("group.show", group=GROUP)
        return sum(
            int(shown[name])
            for name in ("lag", "leased", "retrying", "parked", "fences", "letters")
        )


@contextmanager
def following(directory: Path) -> Iterator[tuple[OwnBroker, Farm, Versions]]:
    """A broker, eight consumers of one ordered group, and what they follow."""
    with (
        OwnBroker(directory / "broker", SETTINGS) as broker,
        connect(broker.url, timeout=PATIENCE_S) as client,
    ):
        client.call("topic.create", name=TOPIC, partitions=PARTITIONS)
        (directory / "journals").mkdir()
        lanes = tuple(Lane(f"lane-{number}") for number in range(WORKERS))
        job = Job("following", broker.url, "", TOPIC, str(directory / "journals"), lanes)
        with running(directory / "farm", job.encode(), command=run_farm) as process:
            yield broker, Farm(job, process), Versions(client, job)
            job.stop.touch()
            if process.status():
                raise process.ended()


def kill_one(farm: Farm, random: Random) -> None:
    """Kills a worker, and returns once it is known to be dead."""
    wait_until(lambda: farm.process.alive and alive(farm.job), PATIENCE_S, what="workers")
    lane, pid = random.choice(sorted(alive(farm.job).items()))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid in farm.dead()[lane], PATIENCE_S, what=f"{pid} is dead")


def test_each_key_keeps_its_order_while_consumers_are_killed(
    tmp_path: Path, report: Report
) -> None:
    random = Random(5)
    with following(tmp_path) as (broker, farm, versions):
        for number in range(KILLS):
            done = len(versions.effects())
            versions.send()
            versions.progressed(done + AT_ONCE // 4)
            kill_one(farm, random)
            if number == KILLS // 2:
                with connect(broker.url) as client:
                    client.call("topic.grow", name=TOPIC, partitions=GROWN)
        counts = versions.judge()
        kills = sum(farm.hits().values())
    assert kills == KILLS
    report({"kills": kills} | counts)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_minute_of_a_kill_every_second(tmp_path: Path, report: Report) -> None:
    random, broker_kills = Random(6), 0
    with following(tmp_path) as (broker, farm, versions):
        for number in range(SOAK_KILLS):
            began = time.monotonic()
            versions.send()
            if number % 10 == 9:
                broker.kill()  # raises if it was not alive
                broker.start()
                broker_kills += 1
            else:
                kill_one(farm, random)
            time.sleep(max(0.0, began + SOAK_EVERY_S - time.monotonic()))
        counts = versions.judge()
        kills = sum(farm.hits().values())
    assert kills + broker_kills == SOAK_KILLS
    report({"kills": kills, "broker kills": broker_kills} | counts)
