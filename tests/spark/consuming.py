"""Consumers that fail for chosen messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Literal

import txmq
from txmq.model.message import ReceivedMessage
from txmq.testing.wait import PATIENCE_S

LOOK_S = 0.05  # between two polls of the remaining messages


def drain(
    client: txmq.Client,
    group: str,
    topic: str,
    good: Callable[[ReceivedMessage], bool] = lambda _message: True,
    mode: Literal["concurrent", "ordered"] = "ordered",
    reason: Callable[[ReceivedMessage], str] = lambda message: (
        f"{message.body!r} cannot be processed"
    ),
) -> list[bytes]:
    """Consume until nothing is left; return the bodies.

    Messages that are `good` are acked, the others become dead letters at once.
    """
    seen = []
    deadline = time.monotonic() + PATIENCE_S
    with client.consumer(group, [topic], mode=mode, start="first") as consumer:
        while left(client, group):
            assert time.monotonic() < deadline, f"{left(client, group)} messages are left"
            message = consumer.receive(LOOK_S)
            if message is None:
                continue
            seen.append(message.body)
            if good(message):
                consumer.ack(message, wait=True)
            else:
                consumer.dead_letter(message, reason(message))
    return seen


def left(client: txmq.Client, group: str) -> int:
    """Return whether messages are still to be delivered, are leased, or will be put
    back by a running plan: the number of one of these kinds, or 0.
    """
    # Plans may put letters back between the first two questions.
    return waiting(client, group) or planned(client, group) or waiting(client, group)


def waiting(client: txmq.Client, group: str) -> int:
    shown = client.call("group.show", group=group)
    return int(shown["unsettled"] + shown["retrying"] + shown["leased"])


def planned(client: txmq.Client, group: str) -> int:
    return sum(
        plan["planned"]
        for plan in client.call("plan.list")["plans"]
        if plan["group"] == group and plan["state"] in ("canary", "ramping")
    )


def let_die(
    client: txmq.Client,
    group: str,
    topic: str,
    bodies: Collection[bytes],
    mode: Literal["concurrent", "ordered"] = "ordered",
) -> None:
    """Process the topic by a group, except the messages with these bodies."""
    drain(client, group, topic, lambda message: message.body not in bodies, mode)
