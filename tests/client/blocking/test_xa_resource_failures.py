"""The XA resource with lost replies, decisions of operators, and dead managers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.proxy import Proxy
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
from txmq.errors import ConfigError
from txmq.errors.xa import (
    XaError,
    XaHeuristicCommit,
    XaHeuristicRollback,
    XaProtocol,
    XaTimedOut,
    XaUnavailable,
)
from txmq.testing.forked import run_source
from txmq.testing.processes import running
from txmq.wire.data_requests import Opcode

__all__ = ["client", "resource", "topic"]


ROOT = Path(__file__).parents[3]
MANAGER = """
import signal, sys, txmq
from txmq.tx.xid import Xid
url, topic, *gtrids = sys.argv[1:]
client = txmq.connect(url, service="orders", timeout=120)
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


def test_a_branch_that_takes_too_long_is_rolled_back_but_never_a_prepared_one(
    real: RealBroker, client: Client, resource: XaResource, topic: str
) -> None:
    resource.set_timeout(30)
    safe = prepared(resource, topic, b"safe")
    late = ended(resource, topic, b"late")
    working = new_xid()
    resource.start(working)
    for xid in (safe, late, working):
        branch = client._branches[xid]
        assert branch._deadline is not None
        branch._deadline -= 30  # as if that time had passed
    with pytest.raises(XaTimedOut, match="XA_RBTIMEOUT"):
        resource.send(topic, b"late")
    resource.end(working)
    for xid in (working, late):
        with pytest.raises(XaTimedOut):
            resource.prepare(xid)
    resource.commit(safe)
    assert bodies(real, topic) == [b"safe"]


@pytest.mark.parametrize("lost", [1, 9], ids=["one reply", "every reply"])
def test_a_lost_reply_to_prepare_is_rmfail_and_the_branch_may_be_prepared_again(
    real: RealBroker, connect: Connect, topic: str, lost: int
) -> None:
    with Proxy(real.url) as proxy:
        resource = connect(proxy.url, retries=1).xa_resource(owner=fresh("owner"))
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
        resource = connect(proxy.url, retries=0).xa_resource(owner=fresh("owner"))
        xid = ended(resource, topic, b"1", key="k")
        proxy.lose[Opcode.GROUP] = 1
        with pytest.raises(XaUnavailable):
            resource.commit(xid, one_phase=True)
        # built anew, it would have another digest
        client.call("topic.grow", name=topic, partitions=7)
        resource.commit(xid, one_phase=True)
    assert bodies(real, topic) == [b"1"]


def test_a_branch_in_doubt_is_rolled_back_even_if_it_never_arrived(
    connect: Connect, own_broker: RealBroker
) -> None:
    client = connect(own_broker.url, timeout=3, retries=0)
    client.send("t", b"before")
    resource = client.xa_resource()
    xid = ended(resource, "t", b"1")
    token = client._branches[xid].bundle.token
    own_broker.kill()
    with pytest.raises(XaUnavailable):
        resource.prepare(xid)
    with pytest.raises(XaUnavailable):
        resource.recover()
    own_broker.start()
    client._branches[xid].bundle.sent = True  # as if it were still on its way
    resource.rollback(xid)
    assert client.call("tx.show", token=token.hex)["state"] == "ROLLED_BACK"


@pytest.mark.parametrize("commit", [True, False])
def test_an_operator_s_decision_meets_the_manager_s(
    real: RealBroker, client: Client, resource: XaResource, topic: str, *, commit: bool
) -> None:
    xid, same = prepared(resource, topic, b"1"), prepared(resource, topic, b"2")
    outcome = "ROLLBACK" if commit else "COMMIT"
    for one in (xid, same):
        token = client._branches[one].bundle.token.hex
        client.call(
            "tx.decide", token=token, outcome=outcome, operator="ann", reason="its manager is gone"
        )
    finish, agree = (
        (resource.commit, resource.rollback) if commit else (resource.rollback, resource.commit)
    )
    agree(same)
    assert set(resource.recover()) == {xid, same}
    for _ in range(2):
        with pytest.raises(
            XaHeuristicRollback if commit else XaHeuristicCommit, match=r"ann.* its manager is gone"
        ):
            finish(xid)
    for one in (xid, same):
        resource.forget(one)
        resource.forget(one)
    assert resource.recover() == []
    with pytest.raises(XaProtocol):
        finish(xid)


def test_recovery_is_of_one_owner_or_of_everybody(
    client: Client, resource: XaResource, topic: str
) -> None:
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
    with running(tmp_path, MANAGER, own_broker.url, "t", *gtrids, command=run_source) as manager:
        assert manager.first_line() == "prepared"
        manager.terminate(signal.SIGKILL)
    if broker_too:
        own_broker.kill()
        own_broker.start()
    client = connect(own_broker.url)
    resource = client.xa_resource()
    # in no order: tokens may be of one millisecond
    found = {xid.gtrid.decode(): xid for xid in resource.recover()}
    assert found.keys() == set(gtrids)
    first, second, third = map(found.__getitem__, gtrids)
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
