"""Searches whose tables change between two of their steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.broker.support import BrokerInMemory
from txmq.broker.calls.audit import AuditCalls
from txmq.broker.calls.dispatcher import CallContext
from txmq.broker.search import audit_log
from txmq.broker.search.everywhere import SearchEverywhere
from txmq.broker.search.search import SearchQuery
from txmq.core.audit import AUDIT_TOPIC_ID
from txmq.core.topics.delayed import DelayedMessage
from txmq.core.topics.topics import CreateTopic
from txmq.store import tables as t
from txmq.wire.calls.audit import AuditList

if TYPE_CHECKING:
    from txmq.core.steps import Steps

ENTRIES = 100


@pytest.fixture
def broker() -> BrokerInMemory:
    broker = BrokerInMemory()
    broker.do(CreateTopic("t", 1))
    client = broker.connect()
    client.call("consumer.join", group="g", member="a", instance="a", topics=["t"])
    for at in range(ENTRIES):
        call = "group.resume" if at % 2 else "group.pause"
        broker.ask(call, group="g", operator="kim" if at == ENTRIES - 3 else "lee")
    return broker


def run_and_lose(broker: BrokerInMemory, name: str, steps: Steps[Any], rows: int) -> Any:
    """Run to the end; behind the first step, the first rows of a table go."""
    table = broker.engine.state.tables[name]
    next(steps)
    prefix = t.GROUP_KEY.pack(AUDIT_TOPIC_ID) if name == t.ENTRIES else b""
    for key in [key for key, _row in table.range(prefix)][:rows]:
        table.delete(key)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def test_entries_about_a_thing_are_shown_once(broker: BrokerInMemory) -> None:
    steps = audit_log.about(broker.engine, AuditList(operator="kim"))
    assert len(run_and_lose(broker, t.ENTRIES, steps, 30)) == 1


@pytest.mark.parametrize("newest", [False, True])
def test_a_page_of_the_audit_has_each_entry_once(broker: BrokerInMemory, *, newest: bool) -> None:
    args = AuditList(newest=newest, limit=1_000)
    call = CallContext("audit.list", None, lambda _reply: None)
    steps = AuditCalls(broker.engine).list_entries(call, args)
    reply = run_and_lose(broker, t.ENTRIES, steps, 10)
    offsets = [entry["offset"] for entry in reply["entries"]]
    assert len(offsets) == len({*offsets})
    assert offsets == sorted(offsets, reverse=newest)
    assert len(offsets) >= ENTRIES - 10


def test_delayed_messages_fall_due_while_they_are_searched(broker: BrokerInMemory) -> None:
    rows = broker.engine.state.tables[t.DELAYED]
    for at in range(200):
        rows.put(t.DELAYED_KEY.pack(at, at), tuple(DelayedMessage(1, 0, 9, 0, None, b"p", at)))
    search = SearchEverywhere(broker.engine, None, SearchQuery("k", limit=9), None)  # type: ignore[arg-type]  # not used
    assert run_and_lose(broker, t.DELAYED, search._unpublished(0), 150) is None
