"""A replay plan over letters of which a fifth is poison, beside fresh messages."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

import txmq
from tests.reporting import Report
from tests.system.test_adoption_kills import broker
from txmq.testing.wait import PATIENCE_S, wait_until

PARTITIONS, OF_KEY = 4, 20  # messages of a key; every fifth of them is poison
POISON = 5
FRESH = 10  # one fresh message for so many letters
LONG_S = 15 * PATIENCE_S  # for 100,000 letters
DEADLY = txmq.RetryPolicy(dead=("ValueError",))
# Failures are told at once, and acks together: of thousands under way, many failures
# may come in a row, at which a rule would stop.
SETTINGS = {
    "rate": 0, "ramp_s": 0, "canary": 10, "in_flight": 2_000, "stop_after": 0, "start": True,
}  # fmt: skip


def is_poison(key: str, version: int) -> bool:
    """Return True for every fifth letter of a key, and for no fresh message."""
    return version < OF_KEY and (version + int(key[1:])) % POISON == 0


@contextmanager
def consuming(
    url: str, consumers: int, handle: Callable[[txmq.ReceivedMessage], None]
) -> Iterator[None]:
    """Run consumers of the ordered group, each with a connection of its own."""
    stop = Event()
    with ExitStack() as opened:
        threads = []
        for _ in range(consumers):
            client = opened.enter_context(txmq.connect(url, timeout=PATIENCE_S))
            consumer = opened.enter_context(
                client.consumer(
                    "g", ["t"], mode="ordered", on_exhausted="skip", retry=DEADLY, flood_keys=0
                )
            )
            run = {"workers": 2, "stop": stop}
            threads.append(Thread(target=consumer.run, args=(handle,), kwargs=run, daemon=True))
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(PATIENCE_S)
                assert not thread.is_alive()


def open_letters(client: txmq.Client) -> set[tuple[int, int]]:
    """Return partition and offset of all letters of the group."""
    found, where = set[tuple[int, int]](), dict[str, Any]()
    while True:
        page = client.call("dlq.list", group="g", select={}, limit=1_000, **where)
        found |= {(one["partition"], one["offset"]) for one in page["letters"]}
        if page["next"] is None:
            return found
        where = {"cursor": page["next"]}


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_a_plan_with_poison_puts_each_letter_in_one_place_in_order(
    count: int, tmp_path: Path, report: Report
) -> None:
    keys = [f"k{number}" for number in range(count // OF_KEY)]
    with broker(tmp_path) as (url, _process), txmq.connect(url, timeout=PATIENCE_S) as client:
        client.call("topic.create", name="t", partitions=PARTITIONS)
        for version in range(OF_KEY):
            client.send_many("t", [b"%d" % version] * len(keys), keys=keys)

        def die(_message: txmq.ReceivedMessage) -> None:
            raise ValueError("not mended yet")

        def letters() -> int:
            return int(client.call("dlq.stats", group="g")["letters"])

        with consuming(url, 1, die):
            wait_until(lambda: letters() == count, LONG_S, what="all have died")

        seen: dict[str, list[int]] = defaultdict(list)  # versions of a key, in order
        died = Counter[tuple[int, int]]()

        def handle(message: txmq.ReceivedMessage) -> None:
            version, key = int(message.body), message.key or ""
            if is_poison(key, version):
                died[message.partition, message.offset] += 1
                raise ValueError("poison")
            seen[key].append(version)

        with consuming(url, 2, handle):
            client.call("plan.create", name="p", group="g", select={}, settings=SETTINGS)
            fresh = [OF_KEY + number for number in range(OF_KEY // FRESH)]
            for version in fresh:
                client.send_many("t", [b"%d" % version] * len(keys), keys=keys)

            def shown() -> dict[str, Any]:
                plan: dict[str, Any] = client.call("plan.show", name="p")
                assert plan["state"] != "paused", plan["why"]
                return plan

            wait_until(lambda: shown()["state"] == "done", LONG_S, what="the plan is through")
            everything = count - count // POISON + len(fresh) * len(keys)
            wait_until(
                lambda: sum(map(len, seen.values())) >= everything,
                LONG_S,
                what="the fresh messages are processed",
            )
        poison = count // POISON
        plan = client.call("plan.show", name="p")
        outcomes = (plan["letters"], plan["processed"], plan["died_again"], plan["skipped"])
        assert outcomes == (count, count - poison, poison, 0)
        assert set(died.values()) == {1}, "poison is put back once"
        assert len(died) == letters() == poison
        assert open_letters(client) == died.keys(), "what died again is a letter, and no other"
        assert seen.keys() == set(keys)
        for key, versions in seen.items():
            # a group that skips dead letters has gone on: fresh messages may come first
            back = [version for version in versions if version < OF_KEY]
            assert back == [at for at in range(OF_KEY) if not is_poison(key, at)], key
            assert [version for version in versions if version >= OF_KEY] == fresh, key
    report({"letters": count, "poison": poison, "fresh": len(fresh) * len(keys)})
