"""Kill a member of an ordered group, and measure when its partitions are read again and
how others are delayed.

    python -m tests.bench.clients.rebalance URL PARTITIONS MEMBERS LEASE_S

Prints {"moved", "moved_s", "before_ms", "others_ms"}. Each partition gets a message
every quarter of a second. `moved_s` is from the kill until the last partition of the
dead member is read again. `before_ms` and `others_ms` are the longest delays of
messages of other partitions, before the kill and after it.
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


class ReadMessage(NamedTuple):
    """The times at which a message was sent and read."""

    partition: int
    sent: float
    came: float


def member(url: str, lease_s: float, read: list[ReadMessage], end: Event) -> txmq.Client:
    """Join the group and read in a thread."""
    client = txmq.connect(url, timeout=WITHIN_S)
    consumer = client.consumer(GROUP, [TOPIC], mode="ordered", lease=lease_s, session=lease_s)

    def note(message: ReceivedMessage) -> None:
        read.append(ReadMessage(message.partition, float(message.body), time.time()))

    Thread(target=consumer.run, args=(note,), kwargs={"stop": end}, daemon=True).start()
    return client


def victim(url: str, lease_s: float, ready: Pipe) -> None:
    """Run a member until it is killed."""
    member(url, lease_s, [], Event())
    ready.send(None)
    Event().wait()


def publish(client: txmq.Client, partitions: int, end: Event) -> None:
    """Send messages to each partition in turn, again and again."""
    while not end.wait(EVERY_S):
        for partition in range(partitions):
            client.send_async(TOPIC, repr(time.time()).encode(), partition=partition)
        client.flush()


def partitions_of_members(client: txmq.Client) -> dict[str, set[int]]:
    """Return the partitions of each member."""
    listed = client.call("group.show", group=GROUP)["member_list"]
    return {one["member"]: {partition for _topic, partition in one["assignment"]} for one in listed}


def slowest_ms(read: list[ReadMessage], partitions: set[int], since: float, until: float) -> float:
    """Return the longest delay of the messages sent in that time."""
    took = [
        one.came - one.sent
        for one in list(read)
        if one.partition in partitions and since <= one.sent < until
    ]
    return max(took) * 1_000


def measure(url: str, partitions: int, members: int, lease_s: float) -> dict[str, float]:
    """Kill a member and measure."""
    with ExitStack() as stack, txmq.connect(url, timeout=WITHIN_S) as client:
        end, read = Event(), list[ReadMessage]()
        stack.callback(end.set)
        client.call("topic.create", name=TOPIC, partitions=partitions)
        ready, child_end = multiprocessing.get_context("spawn").Pipe(duplex=False)
        process = multiprocessing.get_context("spawn").Process(
            target=victim, args=(url, lease_s, child_end), daemon=True
        )
        process.start()
        stack.callback(process.kill)
        ready.recv()
        [name] = partitions_of_members(client)
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
        moved = partitions_of_members(client)[name]
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


def back(read: list[ReadMessage], moved: set[int], killed: float) -> dict[int, float]:
    """Return the times of the first reads of these partitions after the kill."""
    first: dict[int, float] = {}
    for one in list(read):
        if one.partition in moved and one.came > killed:
            first.setdefault(one.partition, one.came)
    return first


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))))
