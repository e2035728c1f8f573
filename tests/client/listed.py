"""Logs that are listed together, as the commands do it."""

from __future__ import annotations

from typing import Any

from txmq.cli.command import CommandSession, connect
from txmq.cli.listed_logs import LogAdder, copy_list
from txmq.cli.output import Output
from txmq.testing.broker_thread import BrokerThread

BY = {"operator": "kim", "reason": "more room"}


def add_logs(first: BrokerThread, *others: BrokerThread, together: bool | None = None) -> Any:
    """List logs with the first one, and return the list."""
    client = connect(first.url)
    session = CommandSession(Output(as_json=True), client, first.url)
    try:
        adder = LogAdder(session, [other.url for other in others])
        listed = adder.add(together=together, moved=False, **BY)
        assert not any(copy["error"] for copy in copy_list(session, listed, **BY))
    finally:
        client.close()
    return listed


def ask(broker: BrokerThread, call: str, **args: object) -> dict[str, Any]:
    """Return the reply to a control call."""
    client = connect(broker.url)
    try:
        return client.call(call, **args)
    finally:
        client.close()


def stored(broker: BrokerThread, topic: str) -> int:
    """Return how many messages of a topic the broker has."""
    topics = ask(broker, "topic.list")["topics"]
    return sum(one["messages"] for one in topics if one["name"] == topic)
