"""A member of an ordered group is killed: until its partitions are read again, and what
the others notice of it.

python -m tests.bench.clients.rebalance URL PARTITIONS MEMBERS LEASE_S   prints moved, moved_s, before_ms, others_ms

Each partition gets a message every quarter of a second. `moved_s` is from the kill to
the last of the dead member's partitions that is read again; `before_ms` and `others_ms`
are the longest that a message of another partition took from its sender to its reader,
before the kill and after it.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe
from threading import Event, Thread
from typing import NamedTuple

import txmq
from txmq.model.message import ReceivedMessage
from txmq.testing.wait import wait_until

TOPIC, GROUP = "bench", "bench"
EVERY_S, SETTLES_S, WITHIN_S = 0.25, 3.0, 60.0


class Read(NamedTuple):
    """A message that was read: when it was sent, and when it came, by the machine's
    clock.
    """

    partition: int
    sent: float
    came: float


def member(url: str, lease_s: float, read: list[Read], end: Event) -> txmq.Client:
    """Joins, and reads in a thread of its own."""
    client = txmq.connect(url, timeout=WITHIN_S)
    consumer = client.consumer(GROUP, [TOPIC], mode="ordered", lease_s=lease_s, session_s=lease_s)

    def note(message: ReceivedMessage) -> None:
        read.append(Read(message.partition, float(message.body), time.time()))

    Thread(target=consumer.run, args=(note,), kwargs={"stop": end}, daemon=True).start()
    return client


def victim(url: str, lease_s: float, told: Pipe) -> None:
    """A member that lives until it is killed."""
    member(url, lease_s, [], Event())
    told.send(None)
    Event().wait()


def publish(client: txmq.Client, partitions: int, end: Event) -> None:
    """A message for each partition, again and again."""
    while not end.wait(EVERY_S):
        for partition in range(partitions):
            client.send_async(TOPIC, repr(time.time()).encode(), partition=partition)
        client.flush()


def shares(client: txmq.Client) -> dict[str, set[int]]:
    """The partitions of each member."""
    listed = client.call("group.show", group=GROUP)["member_list"]
    return {one["member"]: {partition for _topic, partition in one["assignment"]} for one in listed}


def slowest_ms(read: list[Read], partitions: set[int], since: float, until: float) -> float:
    """Of the messages of these partitions that were sent in that time."""
    took = [
        one.came - one.sent
        for one in list(read)
        if one.partition in partitions and since <= one.sent < until
    ]
    return max(took) * 1_000


def measure(url: str, partitions: int, members: int, lease_s: float) -> dict[str, float]:
    """Kill and watch."""
    with ExitStack() as stack, txmq.connect(url, timeout=WITHIN_S) as client:
        end, read = Event(), list[Read]()
        stack.callback(end.set)
        client.call("topic.create", name=TOPIC, partitions=partitions)
        told, tells = multiprocessing.get_context("spawn").Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(
            target=victim, args=(url, lease_s, tells), daemon=True
        )
        process.start()
        stack.callback(process.kill)
        told.recv()
        [name] = shares(client)
        for _ in range(members - 1):
            stack.enter_context(member(url, lease_s, read, end))
        Thread(target=publish, args=(client, partitions, end), daemon=True).start()
        most = partitions - partitions // members
        wait_until(
            lambda: len({one.partition for one in list(read)}) >= most,
            timeout_s=WITHIN_S,
            what="the others",
        )
        time.sleep(SETTLES_S)
        moved = shares(client)[name]
        others = set(range(partitions)) - moved
        killed = time.time()
        process.kill()
        wait_until(
            lambda: back(read, moved, killed).keys() == moved,
            timeout_s=WITHIN_S,
            what="the partitions",
        )
        again = max(back(read, moved, killed).values())
        time.sleep(SETTLES_S)
        return {
            "moved": len(moved),
            "moved_s": again - killed,
            "before_ms": slowest_ms(read, others, killed - SETTLES_S + 1, killed),
            "others_ms": slowest_ms(read, others, killed, again + 1),
        }


def back(read: list[Read], moved: set[int], killed: float) -> dict[int, float]:
    """When each of these partitions was read for the first time after the kill."""
    first: dict[int, float] = {}
    for one in list(read):
        if one.partition in moved and one.came > killed:
            first.setdefault(one.partition, one.came)
    return first


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
