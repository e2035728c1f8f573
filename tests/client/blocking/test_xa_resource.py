"""The broker as a resource of another transaction manager."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psycopg2.extensions
import pytest

from tests.client.real import RealBroker, bodies
from tests.client.scripted_member import fresh
from tests.client.xa_manager import (
    Connect,
    client,
    ended,
    new_xid,
    prepared,
    resource,
    topic,
)
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction.xa_resource import XaResource
from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ConfigError, LocalProtocolError, UnknownGroup
from txmq.errors.xa import XaDuplicate, XaInvalid, XaProtocol, XaRefused, XaRolledBack, XaUnknown
from txmq.model.actions import AckAction
from txmq.testing.wait import wait_until
from txmq.tx.xid import Xid

__all__ = ["client", "resource", "topic"]


def test_a_prepared_branch_is_committed_by_its_manager(
    real: RealBroker, resource: XaResource, topic: str
) -> None:
    xid = prepared(resource, topic, b"1", b"2")
    assert bodies(real, topic) == []
    assert resource.recover() == [xid]
    resource.commit(xid)
    assert bodies(real, topic) == [b"1", b"2"]
    assert resource.recover() == []
    resource.commit(xid)  # a manager that lost the reply asks again
    with pytest.raises(XaProtocol):
        resource.rollback(xid)


def test_a_prepared_branch_is_rolled_back_by_its_manager(
    real: RealBroker, resource: XaResource, topic: str
) -> None:
    xid = prepared(resource, topic, b"1")
    resource.rollback(xid)
    resource.rollback(xid)
    assert (bodies(real, topic), resource.recover()) == ([], [])


def test_one_phase_is_one_step(real: RealBroker, resource: XaResource, topic: str) -> None:
    xid = ended(resource, topic, b"1")
    resource.commit(xid, one_phase=True)
    assert bodies(real, topic) == [b"1"]
    with pytest.raises(XaUnknown):
        resource.commit(xid, one_phase=True)
    with pytest.raises(XaProtocol):
        resource.commit(prepared(resource, topic, b"2"), one_phase=True)


def test_a_large_branch_commits_in_one_phase_as_well(
    real: RealBroker, resource: XaResource, topic: str
) -> None:
    xid = new_xid()
    resource.start(xid)
    for number in range(5):
        resource.send_many(
            topic, [b"%d" % number * (1 << 20)] * 4, [f"{number}-{n}" for n in range(4)]
        )
    resource.end(xid)
    resource.commit(xid, one_phase=True)
    # it is decided, and published piece by piece after that
    wait_until(lambda: len(bodies(real, topic)) == 20)


def test_an_empty_branch_is_read_only_and_forgotten(resource: XaResource, topic: str) -> None:
    xid = ended(resource, topic)
    assert resource.prepare(xid) == "read-only"
    for forgotten in (resource.prepare, resource.commit, resource.rollback):
        with pytest.raises(XaUnknown):
            forgotten(xid)
    resource.commit(ended(resource, topic), one_phase=True)


def test_work_is_suspended_resumed_and_joined(
    real: RealBroker, client: Client, resource: XaResource, topic: str
) -> None:
    one, two = new_xid(), new_xid()
    resource.start(one)
    resource.send(topic, b"1")
    resource.end(one, "suspend")
    resource.start(two)
    resource.send(topic, b"2")
    resource.end(two)
    resource.start(one, resume=True)
    resource.send(topic, b"3")
    resource.end(one)
    other = client.xa_resource(owner=resource.owner)
    other.start(one, join=True)
    other.send(topic, b"4")
    other.end(one)
    assert resource.prepare(one) == "ok"
    resource.commit(one)
    resource.rollback(two)
    assert sorted(bodies(real, topic)) == [b"1", b"3", b"4"]


def test_a_failed_branch_is_rolled_back(real: RealBroker, resource: XaResource, topic: str) -> None:
    xid = new_xid()
    resource.start(xid)
    resource.send(topic, b"1")
    resource.end(xid, "fail")
    with pytest.raises(XaRolledBack, match="XA_RBROLLBACK"):
        resource.prepare(xid)
    with pytest.raises(XaUnknown):
        resource.rollback(xid)
    assert bodies(real, topic) == []


def test_acks_take_effect_with_the_branch(client: Client, resource: XaResource, topic: str) -> None:
    for number in range(2):
        client.send(topic, b"%d" % number, key="k")
    consumer = client.consumer(fresh("g"), topics=[topic], start="first")
    messages = iter(consumer)
    for finish in (resource.commit, resource.rollback):
        xid = new_xid()
        resource.start(xid)
        resource.ack(next(messages))
        resource.end(xid)
        assert resource.prepare(xid) == "ok"
        finish(xid)
    assert next(messages).body == b"1"
    consumer.close()


def test_calls_out_of_turn_are_refused(resource: XaResource, topic: str) -> None:
    with pytest.raises(XaProtocol, match="XAER_PROTO"):
        resource.send(topic, b"outside")
    xid = new_xid()
    resource.start(xid)
    for early in (resource.prepare, resource.rollback, resource.commit):
        with pytest.raises(XaProtocol):
            early(xid)
    with pytest.raises(XaProtocol):
        resource.start(new_xid())
    resource.end(xid)
    with pytest.raises(XaProtocol):
        resource.start(xid, resume=True)
    for late in (resource.end, resource.commit):
        with pytest.raises(XaProtocol):
            late(xid)
    with pytest.raises(XaDuplicate, match="XAER_DUPID"):
        resource.start(xid)
    with pytest.raises(XaUnknown, match="XAER_NOTA"):
        resource.start(new_xid(), join=True)
    for unknown in (resource.commit, resource.rollback, resource.forget):
        with pytest.raises(XaUnknown):
            unknown(new_xid())


def test_an_xid_of_another_process_is_refused_when_it_is_prepared(
    real: RealBroker, connect: Connect, resource: XaResource, topic: str
) -> None:
    xid = prepared(resource, topic, b"1")
    other = connect(real.url).xa_resource()
    other.start(xid)
    other.send(topic, b"2")
    other.end(xid)
    with pytest.raises(XaDuplicate):
        other.prepare(xid)
    other.commit(xid)  # it is the same manager's, or so it says
    assert bodies(real, topic) == [b"1"]


def test_what_the_broker_refuses_is_not_prepared(
    real: RealBroker, client: Client, resource: XaResource, topic: str
) -> None:
    client.send(topic, b"before")
    xid = new_xid()
    resource.start(xid)
    resource.send(topic, b"1")
    resource.act(AckAction("nobody", "m", 1, topic, 0, 0, 1))
    resource.end(xid)
    with pytest.raises(XaRefused, match="XA_RBOTHER") as refused:
        resource.prepare(xid)
    assert isinstance(refused.value.__cause__, UnknownGroup)
    assert (resource.recover(), bodies(real, topic)) == ([], [b"before"])
    with pytest.raises(XaUnknown):
        resource.rollback(xid)


@pytest.mark.parametrize(
    "xid",
    [
        Xid(-1, b"g", b"b"),
        Xid(1 << 31, b"g", b"b"),
        Xid(1, bytes(65), b""),
        Xid(1, b"", bytes(65)),
        (1, b"g"),
        ("1", b"g", b"b"),
        # psycopg2's, of a gid that is none
        SimpleNamespace(format_id=None, gtrid="somebody else's gid", bqual=None),
    ],
    ids=str,
)
def test_an_impossible_xid_is_refused(client: Client, resource: XaResource, xid: Xid) -> None:
    with pytest.raises(XaInvalid, match="XAER_INVAL"):
        resource.start(xid)
    for name in ("../x", ""):
        with pytest.raises((LocalProtocolError, ConfigError)):
            XaResource(client._core, {}, name)


def test_an_xid_may_be_psycopg2_s(real: RealBroker, resource: XaResource, topic: str) -> None:
    xid: Any = psycopg2.extensions.Xid(7, new_token().hex, "b")
    resource.start(xid)
    resource.send(topic, b"1")
    resource.end(xid)
    resource.prepare(xid)
    assert resource.recover() == [Xid(7, xid.gtrid.encode(), b"b")]
    resource.commit(xid)
    assert bodies(real, topic) == [b"1"]
