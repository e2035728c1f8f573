"""The broker as a resource under another transaction manager."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg2.extensions
import pytest

from tests.client.consuming import fresh
from tests.client.proxy import Proxy
from tests.client.real import RealBroker
from txmq.client.blocking import Client
from txmq.client.resource import XaResource
from txmq.client.tokens import new_token
from txmq.errors import ConfigError, LocalProtocolError, UnknownGroup
from txmq.errors_xa import (
    XaDuplicate,
    XaError,
    XaHeuristicCommit,
    XaHeuristicRollback,
    XaInvalid,
    XaProtocol,
    XaRefused,
    XaRolledBack,
    XaTimedOut,
    XaUnavailable,
    XaUnknown,
)
from txmq.testing.forked import script
from txmq.testing.processes import running
from txmq.testing.wait import wait_until
from txmq.tx.xid import Xid
from txmq.wire.headers import Opcode

Connect = Callable[..., Client]
ROOT = Path(__file__).parents[2]
MANAGER = """
import signal, sys, txmq
from txmq.tx.xid import Xid
url, topic, *gtrids = sys.argv[1:]
client = txmq.connect(url, service="orders", timeout=20)
resource = client.xa_resource()
for gtrid in gtrids:
    xid = Xid(7, gtrid.encode(), b"b")
    resource.start(xid)
    resource.send(topic, gtrid.encode(), key="k")
    resource.end(xid)
    resource.prepare(xid)
resource.start(Xid(7, b"never prepared", b""))
resource.send(topic, b"never prepared")
print("prepared", flush=True)
signal.pause()
"""


def new_xid() -> Xid:
    return Xid(7, new_token().bytes, b"branch")


@pytest.fixture
def client(real: RealBroker, connect: Connect) -> Client:
    return connect(real.url)


@pytest.fixture
def topic() -> str:
    return fresh("t")


@pytest.fixture
def resource(client: Client) -> Iterator[XaResource]:
    """A resource; what a test leaves prepared would stay so for ever."""
    resource = client.xa_resource(owner=fresh("owner"))
    yield resource
    for xid in resource.recover():
        resource.rollback(xid)


def bodies(broker: RealBroker, topic: str) -> list[bytes]:
    connection = broker.connection()
    try:
        known = {found["name"] for found in connection.call("topic.list", timeout=10)["topics"]}
    finally:
        connection.close()
    return [found.body for found in broker.read(topic)] if topic in known else []


def ended(resource: XaResource, topic: str, *bodies: bytes, key: str | None = None) -> Xid:
    """A branch with these messages."""
    xid = new_xid()
    resource.start(xid)
    for body in bodies:
        resource.send(topic, body, key=key)
    resource.end(xid)
    return xid


def prepared(resource: XaResource, topic: str, *bodies: bytes) -> Xid:
    xid = ended(resource, topic, *bodies)
    assert resource.prepare(xid) == "ok"
    return xid


def test_a_prepared_branch_is_committed_by_its_manager(real: RealBroker, resource: XaResource, topic: str) -> None:
    xid = prepared(resource, topic, b"1", b"2")
    assert bodies(real, topic) == []
    assert resource.recover() == [xid]
    resource.commit(xid)
    assert bodies(real, topic) == [b"1", b"2"]
    assert resource.recover() == []
    resource.commit(xid)  # a manager that lost the reply asks again
    with pytest.raises(XaProtocol):
        resource.rollback(xid)


def test_a_prepared_branch_is_rolled_back_by_its_manager(real: RealBroker, resource: XaResource, topic: str) -> None:
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


def test_a_large_branch_commits_in_one_phase_as_well(real: RealBroker, resource: XaResource, topic: str) -> None:
    xid = new_xid()
    resource.start(xid)
    for number in range(5):
        resource.send_many(topic, [b"%d" % number * (1 << 20)] * 4, [f"{number}-{n}" for n in range(4)])
    resource.end(xid)
    resource.commit(xid, one_phase=True)
    wait_until(lambda: len(bodies(real, topic)) == 20)  # it is decided, and published piece by piece after that


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


def test_a_branch_that_takes_too_long_is_rolled_back_but_never_a_prepared_one(
    real: RealBroker, resource: XaResource, topic: str
) -> None:
    resource.set_timeout(0.2)
    safe = prepared(resource, topic, b"safe")
    late = ended(resource, topic, b"late")
    working = new_xid()
    resource.start(working)
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() > begun + 0.25)
    with pytest.raises(XaTimedOut, match="XA_RBTIMEOUT"):
        resource.send(topic, b"late")
    resource.end(working)
    for xid in (working, late):
        with pytest.raises(XaTimedOut):
            resource.prepare(xid)
    resource.commit(safe)
    assert bodies(real, topic) == [b"safe"]


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
    resource.act(("ack", "nobody", "m", 1, topic, 0, 0, 1))
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
        SimpleNamespace(format_id=None, gtrid="somebody else's gid", bqual=None),  # psycopg2's, of a gid that is none
    ],
    ids=str,
)
def test_an_impossible_xid_is_refused(resource: XaResource, xid: Xid) -> None:
    with pytest.raises(XaInvalid, match="XAER_INVAL"):
        resource.start(xid)
    for name in ("../x", ""):
        with pytest.raises((LocalProtocolError, ConfigError)):
            XaResource(resource._core, {}, name)


def test_an_xid_may_be_psycopg2_s(real: RealBroker, resource: XaResource, topic: str) -> None:
    xid: Any = psycopg2.extensions.Xid(7, new_token().hex, "b")
    resource.start(xid)
    resource.send(topic, b"1")
    resource.end(xid)
    resource.prepare(xid)
    assert resource.recover() == [Xid(7, xid.gtrid.encode(), b"b")]
    resource.commit(xid)
    assert bodies(real, topic) == [b"1"]


@pytest.mark.parametrize("lost", [1, 9], ids=["one reply", "every reply"])
def test_a_lost_reply_to_prepare_is_rmfail_and_the_branch_may_be_prepared_again(
    real: RealBroker, connect: Connect, topic: str, lost: int
) -> None:
    with Proxy(real.url) as proxy:
        resource = connect(proxy.url, retries=1, timeout=5).xa_resource(owner=fresh("owner"))
        xid = ended(resource, topic, b"1")
        proxy.lose[Opcode.GROUP] = lost
        if lost > 1:
            with pytest.raises(XaUnavailable, match="XAER_RMFAIL") as failed:
                resource.prepare(xid)
            assert (failed.value.retriable, failed.value.outcome) == (True, "unknown")
            with pytest.raises(XaProtocol, match="may be prepared"):
                resource.commit(xid)
        proxy.lose.clear()
        assert resource.prepare(xid) == "ok"
        proxy.lose[Opcode.DECIDE] = 9
        with pytest.raises(XaUnavailable):
            resource.commit(xid)
        proxy.lose.clear()
        resource.commit(xid)
    assert bodies(real, topic) == [b"1"]


def test_a_lost_reply_to_a_one_phase_commit_is_asked_for_again(
    real: RealBroker, client: Client, connect: Connect, topic: str
) -> None:
    client.call("topic.create", name=topic, partitions=1)
    with Proxy(real.url) as proxy:
        resource = connect(proxy.url, retries=0, timeout=5).xa_resource(owner=fresh("owner"))
        xid = ended(resource, topic, b"1", key="k")
        proxy.lose[Opcode.GROUP] = 1
        with pytest.raises(XaUnavailable):
            resource.commit(xid, one_phase=True)
        client.call("topic.grow", name=topic, partitions=7)  # built anew, it would have another digest
        resource.commit(xid, one_phase=True)
    assert bodies(real, topic) == [b"1"]


def test_a_branch_in_doubt_is_rolled_back_even_if_it_never_arrived(connect: Connect, own_broker: RealBroker) -> None:
    client = connect(own_broker.url, timeout=1, retries=0)
    client.send("t", b"before")
    resource = client.xa_resource()
    xid = ended(resource, "t", b"1")
    token = client._branches[xid].share.token
    own_broker.kill()
    with pytest.raises(XaUnavailable):
        resource.prepare(xid)
    with pytest.raises(XaUnavailable):
        resource.recover()
    own_broker.start()
    client._branches[xid].share.sent = True  # as if it were still on its way
    resource.rollback(xid)
    assert client.call("tx.show", token=token.hex)["state"] == "ROLLED_BACK"


@pytest.mark.parametrize("commit", [True, False])
def test_an_operator_s_decision_meets_the_manager_s(
    real: RealBroker, client: Client, resource: XaResource, topic: str, *, commit: bool
) -> None:
    xid, same = prepared(resource, topic, b"1"), prepared(resource, topic, b"2")
    outcome = "ROLLBACK" if commit else "COMMIT"
    for one in (xid, same):
        token = client._branches[one].share.token.hex
        client.call("tx.decide", token=token, outcome=outcome, operator="ann", reason="its manager is gone")
    finish, agree = (resource.commit, resource.rollback) if commit else (resource.rollback, resource.commit)
    agree(same)
    assert resource.recover() == [xid, same]
    for _ in range(2):
        with pytest.raises(XaHeuristicRollback if commit else XaHeuristicCommit, match=r"ann.* its manager is gone"):
            finish(xid)
    for one in (xid, same):
        resource.forget(one)
        resource.forget(one)
    assert resource.recover() == []
    with pytest.raises(XaProtocol):
        finish(xid)


def test_recovery_is_of_one_owner_or_of_everybody(client: Client, resource: XaResource, topic: str) -> None:
    other = client.xa_resource(owner=fresh("owner"))
    mine, theirs = prepared(resource, topic, b"1"), prepared(other, topic, b"2")
    assert (resource.recover(), other.recover()) == ([mine], [theirs])
    assert {mine, theirs} <= set(resource.recover(everybody=True))
    other.rollback(theirs)


def test_branches_are_listed_under_an_owner(real: RealBroker, connect: Connect) -> None:
    assert connect(real.url).xa_resource().owner == "orders"
    with pytest.raises(ConfigError, match="owner"):
        connect(real.url, service=None).xa_resource()


@pytest.mark.parametrize("broker_too", [False, True], ids=["manager", "manager and broker"])
def test_a_killed_manager_s_branches_are_finished_by_the_next_one(
    own_broker: RealBroker, connect: Connect, tmp_path: Path, *, broker_too: bool
) -> None:
    gtrids = ["one", "two", "three"]
    with running(tmp_path, MANAGER, own_broker.url, "t", *gtrids, command=script) as manager:
        assert manager.first_line() == "prepared"
        manager.end(signal.SIGKILL)
    if broker_too:
        own_broker.kill()
        own_broker.start()
    client = connect(own_broker.url, timeout=20)
    resource = client.xa_resource()
    first, second, third = resource.recover()
    assert [xid.gtrid.decode() for xid in (first, second, third)] == gtrids
    resource.commit(first)
    if broker_too:
        own_broker.kill()
        own_broker.start()
    resource.rollback(second)
    resource.commit(third)
    assert (resource.recover(), bodies(own_broker, "t")) == ([], [b"one", b"three"])


def test_every_error_has_its_code() -> None:
    def kinds(error: type[XaError]) -> Iterator[type[XaError]]:
        for kind in error.__subclasses__():
            yield kind
            yield from kinds(kind)

    codes = {kind.__name__: kind.code for kind in kinds(XaError) if "code" in vars(kind)}
    assert len(set(codes.values())) == len(codes) == 10
    assert codes["XaUnavailable"] == "XAER_RMFAIL"
