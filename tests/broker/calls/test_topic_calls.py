"""Topics that nobody has made: who names one is told, and may get it made."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.broker.access.support import BrokerWithUsers
from tests.broker.support import BrokerInMemory
from txmq.config.broker import load_broker
from txmq.core.topics.topics import CreateTopic
from txmq.errors import UnknownTopic


def named(broker: BrokerInMemory, *names: str) -> Any:
    return broker.ask("topic.describe", names=names, create=True)


def test_a_configured_broker_makes_no_topic_that_somebody_only_names() -> None:
    broker = BrokerInMemory(settings=load_broker(None, {"data": "/data"}))
    for name in ("orders", "_txmq.ordres"):
        broker.do(CreateTopic(name, 1))
    refused = named(broker, "orders", "ordres")
    assert (type(refused), refused.message) == (UnknownTopic, "there is no topic 'ordres'")
    assert refused.hint == "did you mean 'orders'? Else create it: txmq topic create ordres"
    assert broker.ask("topic.show", name="ordres").hint == refused.hint
    assert named(broker, "invoices").hint == "create it: txmq topic create invoices"


def test_a_topic_that_is_made_at_its_first_use_is_told_of() -> None:
    broker = BrokerInMemory()
    broker.do(CreateTopic("orders", 1))
    with capture_logs() as logs:
        reply = named(broker, "orders", "ordres", "invoices")
    assert (reply["created"], reply["similar"]) == (["ordres", "invoices"], "orders")
    assert [(one["event"], one["topics"], one["similar"]) for one in logs] == [
        ("topic.created_at_use", ["ordres", "invoices"], "orders")
    ]
    assert [one["partitions"] for one in reply["topics"]] == [1, 8, 8]
    assert "created" not in named(broker, "orders", "ordres")


@pytest.mark.parametrize(
    ("named_so", "meant"),
    [
        ("ordres", True), ("order", True), ("orderss", True), ("Orders", True), ("rders", True),
        ("orrders", True), ("odrers", True), ("invoices", False), ("orde", False),
        ("oerdrs", False),
    ],
)  # fmt: skip
def test_one_slip_is_seen_through(named_so: str, meant: bool) -> None:  # noqa: FBT001
    broker = BrokerInMemory(settings=load_broker(None, {"data": "/data"}))
    for name in ("orders", "tax"):
        broker.do(CreateTopic(name, 1))
    assert ("'orders'" in named(broker, named_so).hint) is meant
    assert "did you mean" not in named(broker, "fax").hint, "short names are alike by chance"


@pytest.mark.parametrize("may_see", [False, True])
def test_no_name_is_told_to_a_user_who_may_not_see_it(may_see: bool) -> None:  # noqa: FBT001
    broker = BrokerWithUsers()
    broker.do(CreateTopic("orders", 1))
    broker.grant("nobody", "describe", "topic:ordres")
    if may_see:
        broker.grant("nobody", "describe", "topic:orders")
    reply: Any = broker.log_in("nobody").call("topic.describe", names=["ordres"])
    assert ("orders'?" in str(reply)) is may_see
