"""Replay plans for services, by both faces of the client, on a real broker."""

from __future__ import annotations

from typing import Any

import pytest

import txmq
import txmq.twisted
from tests.client.reactor_thread import InReactor
from tests.client.real import RealBroker
from tests.client.test_letters import Connect, make_letters
from txmq.errors import Conflict, LocalProtocolError, RequestTimeout, UnknownPlan
from txmq.testing.wait import wait_until


def test_a_service_plans_a_replay(real: RealBroker, connect: Connect) -> None:
    client = connect(real.url)
    make_letters(real, client, "plans-blocking", "plans-g", 4)
    plan = client.plan("service-plan")
    with pytest.raises(UnknownPlan):
        plan.show()
    made = plan.create("plans-g", key="k1", options={"rate": 0}, operator="bot")
    assert (made.state, made.letters, made.is_over) == ("planned", 2, False)
    with pytest.raises(Conflict):
        plan.pause()
    plan.start()
    with pytest.raises(RequestTimeout):
        plan.wait(0.2)  # nobody consumes
    wait_until(lambda: len(list(plan.letters("delivered"))) == 2)
    plan.cancel(operator="bot", reason="enough")
    assert plan.wait().is_over
    plan.delete()
    [*_others, last] = client.letters("plans-g")
    places = [(last.topic, last.partition, last.offset)]
    named = client.plan("service-named")
    with pytest.raises(LocalProtocolError):
        named.create("plans-g", letters=places, key="k1")
    assert named.create("plans-g", letters=places).letters == 1
    assert named.create("plans-g", letters=places).letters == 1  # a repetition
    named.abandon(reason="of no use")
    assert (named.wait().state, named.show().ended) == ("done", 1)


def test_the_twisted_face_plans_a_replay(
    real: RealBroker, connect: Connect, in_reactor: InReactor, reactor: Any
) -> None:
    make_letters(real, connect(real.url), "plans-twisted", "plans-t", 3)

    async def use() -> int:
        client = txmq.twisted.connect(reactor, real.url, service="s")
        try:
            plan = client.plan("twisted-plan")
            made = await plan.create("plans-t", options={"second_approver": True}, operator="a")
            assert made.letters == 3
            await plan.approve(operator="b")
            await plan.abandon(reason="of no use", operator="b")
            assert (await plan.wait()).state == "done"
            return len([letter async for letter in plan.letters("ended")])
        finally:
            await client.close()

    assert in_reactor(use) == 3


def test_each_broker_of_a_cluster_has_plans(real: RealBroker, connect: Connect) -> None:
    make_letters(real, connect(real.url), "plans-cluster", "plans-c", 1)
    with txmq.connect([real.url, real.url], service="s") as cluster:
        plan = cluster.plan("cluster-plan", broker=1)
        assert plan.create("plans-c").letters == 1
        plan.cancel()
