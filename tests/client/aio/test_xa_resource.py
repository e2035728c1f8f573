"""The broker as a resource of another transaction manager, on asyncio."""

from __future__ import annotations

import asyncio

import pytest

import txmq.aio
from tests.client.aio.interrupting import Interrupter
from tests.client.aio.running import run
from tests.client.real import RealBroker, bodies
from tests.client.scripted_member import fresh
from tests.client.xa_manager import new_xid
from txmq.aio import Client, XaResource, outcome_of
from txmq.errors import ConfigError
from txmq.errors.xa import XaError, XaProtocol, XaRolledBack, XaUnavailable, XaUnknown
from txmq.testing.wait import PATIENCE_S
from txmq.tx.xid import Xid


def connected(url: str, service: str | None = "tests") -> Client:
    return txmq.aio.connect(url, service=service, timeout=PATIENCE_S)


def ended(resource: XaResource, topic: str, body: bytes) -> Xid:
    """A branch with one message."""
    xid = new_xid()
    resource.start(xid)
    resource.send(topic, body)
    resource.end(xid)
    return xid


def test_a_manager_decides_the_branches_of_any_process(real: RealBroker) -> None:
    async def story() -> None:
        topic, owner = fresh("t"), fresh("owner")
        async with connected(real.url) as client, connected(real.url) as later:
            resource, recovering = client.xa_resource(owner), later.xa_resource(owner)
            kept, dropped, at_once, empty = (
                ended(resource, topic, body) for body in (b"1", b"2", b"3", b"4")
            )
            assert await resource.prepare(kept) == "ok"
            assert await resource.prepare(dropped) == "ok"
            assert {*await recovering.recover()} == {kept, dropped}
            await recovering.commit(kept)
            await recovering.rollback(dropped)
            await resource.commit(kept)  # a manager that lost the reply asks again
            with pytest.raises(XaProtocol):
                await resource.rollback(kept)
            await resource.commit(at_once, one_phase=True)
            await resource.rollback(empty)
            with pytest.raises(XaUnknown):
                await resource.commit(empty)
            failed = new_xid()
            resource.start(failed)
            with pytest.raises(XaProtocol):
                await resource.prepare(failed)
            resource.end(failed, "fail")
            with pytest.raises(XaRolledBack):
                await resource.prepare(failed)
            assert await resource.recover() == []
        assert bodies(real, topic) == [b"1", b"3"]

    run(story())


def test_a_cancelled_call_is_made_again(real: RealBroker) -> None:
    """At whatever await the manager is cancelled, it can end the branch."""

    async def story() -> None:
        topic, committed, step, over = fresh("t"), list[bytes](), 0, False
        named = set[str | None]()
        async with connected(real.url) as client:
            resource = client.xa_resource(fresh("owner"))
            await client.log_id()
            interrupter = Interrupter()
            while not over:
                step += 1
                body = b"%d" % step
                xid = ended(resource, topic, body)

                async def decide(xid: Xid = xid) -> None:
                    assert await resource.prepare(xid) == "ok"
                    await resource.commit(xid)

                try:
                    over = await interrupter.run(decide(), step)
                    committed.append(body)
                except asyncio.CancelledError as error:
                    named.add(outcome_of(error))
                    try:
                        await resource.rollback(xid)
                    except XaProtocol:  # it was committed
                        committed.append(body)
            assert await resource.recover() == []
        assert named <= {"not done", "unknown"}
        assert "unknown" in named
        assert bodies(real, topic) == committed

    run(story())


def test_without_a_broker_a_branch_stays_to_be_prepared(own_broker: RealBroker) -> None:
    async def story() -> None:
        async with txmq.aio.connect(own_broker.url, timeout=2.0) as client:
            with pytest.raises(ConfigError, match="owner"):
                client.xa_resource()
            resource = client.xa_resource("shop")
            xid = ended(resource, "orders", b"1")
            await client.log_id()
            await asyncio.to_thread(own_broker.kill)
            with pytest.raises(XaUnavailable):
                await resource.prepare(xid)
            await asyncio.to_thread(own_broker.start)
            while True:
                try:
                    assert await resource.prepare(xid) == "ok"
                    break
                except XaError:
                    continue
            await resource.commit(xid)

    run(story())
    assert bodies(own_broker, "orders") == [b"1"]
