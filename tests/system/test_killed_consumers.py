"""Consumers of an ordered group that are killed again and again."""

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
from tests.system.order_system import SupervisedWorkers, supervised
from tests.system.ordered_worker import GROUP, effects_file, running_pids
from tests.system.supervisor import SupervisorConfig, WorkerSpec
from txmq import connect
from txmq.client.blocking.client import Client
from txmq.testing.own_broker import OwnBroker
from txmq.testing.processes import whole_lines
from txmq.testing.wait import PATIENCE_S, wait_until

TOPIC, PARTITIONS, GROWN, KEYS, WORKERS = "versions", 8, 12, 48, 8
AT_ONCE = 480  # messages sent together
SETTINGS = "[consumers]\nlost_connection_grace_s = 0.1\n"
KILLS, SOAK_KILLS, SOAK_EVERY_S = 16, 60, 1.0


class VersionedMessages:
    """Messages of many keys, each with the next version of its key, and their
    effects.
    """

    def __init__(self, client: Client, config: SupervisorConfig) -> None:
        self._client, self.config = client, config
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
        """Return the key and the version of each effect, in their order."""
        lines = whole_lines(effects_file(Path(self.config.directory)))
        return [(key, int(version)) for key, version in (line.split() for line in lines)]

    def wait_for_effects(self, least: int) -> None:
        """Wait for so many effects in all."""
        wait_until(lambda: len(self.effects()) >= least, what=f"{least} effects")

    def check(self) -> dict[str, int]:
        """Check that all versions had an effect, none before the version before it;
        return counts.
        """
        wait_until(lambda: set(self.effects()) >= self._all(), what="every version of every key")
        wait_until(lambda: self._unfinished() == 0, what="the group has settled everything")
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

    def _unfinished(self) -> int:
        shown = self._client.call("group.show", group=GROUP)
        return sum(
            int(shown[name])
            for name in ("unsettled", "leased", "retrying", "parked", "fences", "letters")
        )


@contextmanager
def running_consumers(
    directory: Path,
) -> Iterator[tuple[OwnBroker, SupervisedWorkers, VersionedMessages]]:
    """Run a broker and eight consumers of one ordered group for the block."""
    with (
        OwnBroker(directory / "broker", SETTINGS) as broker,
        connect(broker.url, timeout=PATIENCE_S) as client,
    ):
        client.call("topic.create", name=TOPIC, partitions=PARTITIONS)
        (directory / "journals").mkdir()
        workers = tuple(WorkerSpec(f"worker-{number}") for number in range(WORKERS))
        config = SupervisorConfig(
            "ordered_worker", broker.url, "", TOPIC, str(directory / "journals"), workers
        )
        with supervised(directory, config) as running_workers:
            yield broker, running_workers, VersionedMessages(client, config)


def kill_a_worker(running_workers: SupervisedWorkers, random: Random) -> None:
    """Kill a worker, and wait until its death is recorded."""
    wait_until(
        lambda: running_workers.process.alive and running_pids(running_workers.config),
        what="workers",
    )
    worker, pid = random.choice(sorted(running_pids(running_workers.config).items()))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: pid in running_workers.dead_pids()[worker], what=f"{pid} is dead")


def test_each_key_keeps_its_order_while_consumers_are_killed(
    tmp_path: Path, report: Report
) -> None:
    random = Random(5)
    with running_consumers(tmp_path) as (broker, running_workers, versions):
        for number in range(KILLS):
            done = len(versions.effects())
            versions.send()
            versions.wait_for_effects(done + AT_ONCE // 4)
            kill_a_worker(running_workers, random)
            if number == KILLS // 2:
                with connect(broker.url) as client:
                    client.call("topic.grow", name=TOPIC, partitions=GROWN)
        counts = versions.check()
        kills = sum(running_workers.deaths().values())
    assert kills == KILLS
    report({"kills": kills} | counts)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_minute_of_a_kill_every_second(tmp_path: Path, report: Report) -> None:
    random, broker_kills = Random(6), 0
    with running_consumers(tmp_path) as (broker, running_workers, versions):
        for number in range(SOAK_KILLS):
            began = time.monotonic()
            versions.send()
            if number % 10 == 9:
                broker.kill()  # raises if it was not alive
                broker.start()
                broker_kills += 1
            else:
                kill_a_worker(running_workers, random)
            time.sleep(max(0.0, began + SOAK_EVERY_S - time.monotonic()))
        counts = versions.check()
        kills = sum(running_workers.deaths().values())
    assert kills + broker_kills == SOAK_KILLS
    report({"kills": kills, "broker kills": broker_kills} | counts)
