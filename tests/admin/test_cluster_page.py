"""The console's page of the nodes of a cluster."""

from __future__ import annotations

from uuid import UUID

from twisted.python.failure import Failure

from tests.admin.console_support import ConsoleInMemory
from tests.broker.access.support import VERIFIER, BrokerWithUsers
from tests.broker.support import BrokerInMemory, FakeNode
from txmq.admin.follower import FollowerSite
from txmq.admin.request_checks import HttpAccess
from txmq.broker.access.guard import FollowersGuard
from txmq.broker.service import FollowerParts
from txmq.config.broker import SettingsFile
from txmq.core.users import SetUser
from txmq.wire import scram

SETTINGS = SettingsFile.model_validate(
    {"broker": {"data": "/data"}, "cluster": {"kafka": "127.0.0.1:9092"}}
)


def test_nodes_are_listed_and_another_one_is_told_to_lead() -> None:
    node = FakeNode()
    [follower] = node.others
    node.others.append(follower._replace(name="<n3>", role="silent", heard_s=100.0))
    broker = BrokerInMemory(settings=SETTINGS, cluster=node)
    broker.start()
    console = ConsoleInMemory(broker)
    page = console.get("/cluster")
    for said in ("n1 this one", "127.0.0.1:7652", "follower", "<n3>", "silent", "Epoch 3"):
        assert said in page.text
    assert "<n3>" not in page.body
    asked = console.act("cluster.step_down", sure=False, reason="slow")
    assert "another one leads" in asked.text
    assert not node.has_stepped_down
    console.act("cluster.step_down", reason="slow")
    assert node.has_stepped_down
    node.others.clear()
    assert "No other node follows" in console.get("/cluster").text


def test_a_broker_alone_says_so() -> None:
    assert "shares its log with nobody" in ConsoleInMemory().get("/cluster").text


def test_logs_that_have_topics_in_common_are_listed_with_what_may_be_done() -> None:
    console = ConsoleInMemory()
    own, second = str(console.broker.engine.store.log_id), str(UUID(int=2))
    assert "Nodes, logs" not in console.get("/").text
    listed = [{"log_id": own, "addresses": "a:7650"}, {"log_id": second, "addresses": "b:1,c:2"}]
    console.broker.ask("cluster.add_logs", logs=listed)
    assert "Nodes, logs 1, 2" in console.get("/").text
    page = console.get("/cluster").text
    assert f"{own} this one a:7650 in use; it keeps the list txmq cluster drain-log {own}" in page
    assert f"{second} b:1,c:2 in use txmq cluster drain-log {second}" in page
    console.broker.ask("cluster.drain_log", log_id=second)
    page = console.get("/cluster").text
    assert f"{second} b:1,c:2 drained" in page
    assert f"txmq cluster remove-log {second}" in page
    third = {"log_id": str(UUID(int=3)), "addresses": "d:1"}
    console.broker.ask("cluster.add_logs", logs=[third])
    console.broker.ask("cluster.drain_log", log_id=own)
    page = console.get("/cluster").text
    assert f"{own} this one a:7650 drained" in page
    assert f"txmq cluster remove-log {own}" not in page  # it stays


def test_a_follower_shows_metrics_to_those_who_may_see_the_cluster() -> None:
    console = ConsoleInMemory(BrokerWithUsers())
    broker, parts = console.broker, console.parts
    node = FakeNode()
    node.figures = node.figures._replace(leads=False)
    node.others = [node.others[0]._replace(role="leader")]
    node.me = node.me._replace(role="follower")
    guard = FollowersGuard(broker.engine, broker.clock)
    follower = FollowerParts(broker.engine, parts.settings, broker.clock, guard, None, node)
    console.factory.handle, console.factory.act = FollowerSite(follower).handle, None
    console.factory.access = HttpAccess(guard.log_in_by_http)
    assert console.get("/healthz").status == 200
    assert console.get("/metrics").status == 401
    assert console.get("/metrics", "nobody").status == 403
    assert "txmq_cluster_leader 0.0" in console.get("/metrics", "root").body
    elsewhere = console.get("/topics", "root")
    assert (elsewhere.status, "n2 does, at 127.0.0.1:7652" in elsewhere.body) == (503, True)
    # The log says so, and nobody tells the guard.
    assert console.get("/metrics", "ops").status == 200
    broker.do(SetUser("ops", (), tuple(VERIFIER), "test", b"x" * 32))  # type: ignore[arg-type]
    assert console.get("/metrics", "ops").status == 403
    broker.pass_time(60)  # for more logins
    other = scram.make_verifier("another one", b"s" * 16, scram.MIN_ITERATIONS)
    broker.do(SetUser("root", ("admin",), tuple(other), "test", b"x" * 32))  # type: ignore[arg-type]
    assert console.get("/metrics", "root").status == 401
    broker.engine.failed = Failure(OSError("gone"))
    assert console.get("/readyz").status == 503
