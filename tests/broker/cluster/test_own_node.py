"""Nodes that know one another, over librdkafka's mock of Kafka."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.error import ReactorNotRunning
from twisted.internet.task import Clock

from tests.broker.cluster.mock_cluster import TOPIC, MockCluster
from tests.broker.support import at_once
from txmq.broker.cluster import own_node
from txmq.broker.cluster.kafka_genesis import begin_log
from txmq.broker.cluster.own_node import OwnNode
from txmq.broker.data_directory.storage import open_directory
from txmq.broker.engine.engine import Engine
from txmq.config.broker import BrokerSettings, ClusterSettings
from txmq.store.filesystem import RealFileSystem
from txmq.store.log.segment import HEADER_SIZE
from txmq.store.shared import known_nodes
from txmq.store.shared.node import State
from txmq.store.shared.records import Genesis
from txmq.testing.wait import PATIENCE_S

GENESIS = Genesis(UUID(int=1), 0, HEADER_SIZE, 1_000)
TURN_S = 0.01
NEVER_S = 86_400.0  # nodes claim when the test tells them to
Roles = dict[str, str]


class Reactor(Clock):
    """A reactor of the machine's time, in the test's thread."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: SimpleQueue[tuple[Callable[..., object], tuple[object, ...]]] = SimpleQueue()
        self._began = time.monotonic()
        self.has_stopped = False

    def stop(self) -> None:
        """Stop once, as Twisted's does."""
        if self.has_stopped:
            raise ReactorNotRunning
        self.has_stopped = True

    def callFromThread(self, callable: Callable[..., object], *args: object) -> None:  # noqa: A002, N802
        self._calls.put((callable, args))

    def run_until(self, done: Callable[[], object], what: str) -> None:
        ends_at = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > ends_at:
                raise TimeoutError(f"not within {PATIENCE_S} s: {what}")
            with suppress(Empty):
                function, args = self._calls.get(timeout=TURN_S)
                function(*args)
            self.advance(time.monotonic() - self._began - self.seconds())


class Node:
    """A node with its copy of the log, which writes nothing when it leads."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self._world = name, world
        (data := world.directory / name).mkdir(mode=0o700)
        begins: Any = SimpleNamespace(genesis=lambda: GENESIS)
        opened = open_directory(RealFileSystem(), BrokerSettings(data=data), 1, begins)
        self._log, self._tables = opened.log, opened.tables
        reactor: Any = world.reactor
        engine = Engine(opened.log, opened.state, clock=reactor, now=lambda: 5, in_thread=at_once)
        settings = ClusterSettings(
            kafka=world.kafka.address.servers, topic=TOPIC, silence_s=NEVER_S, lease_s=0.3
        )
        self.failures: list[object] = []
        self.told: list[tuple[str, ...]] = []  # the addresses, each time they changed
        self.own = OwnNode(settings, name, f"{name}:1", reactor, self.failures.append)
        self.own.on_nodes = lambda: self.told.append(self.own.addresses())
        self.own.copy_to(engine, opened.tables)
        self.following = Deferred.fromCoroutine(self.own.follow())
        world.until(lambda: self.following.called, f"{name} has caught up")

    @property
    def roles(self) -> Roles:
        return {node.name: node.role for node in self.own.view().nodes}

    def lead(self) -> None:
        """Have it claim the log, again where it had not read all."""
        node = self.own._node
        assert node is not None

        def leads() -> bool:
            node.claim(node._now)
            return node.state is State.LEADING

        self._world.until(leads, f"{self.name} leads")

    def leave(self) -> None:
        left = Deferred.fromCoroutine(self.own.leave())
        self._world.until(lambda: left.called, f"{self.name} has left")
        self._world.nodes.remove(self)
        self.close()
        # the timer of each node that is left: this one claims nothing any more
        assert len(self._world.reactor.getDelayedCalls()) == len(self._world.nodes)

    def close(self) -> None:
        self._tables.close()
        self._log.close()


class World:
    """The nodes of one log."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.kafka, self.reactor = directory, MockCluster(), Reactor()
        self.nodes: list[Node] = []
        begin_log(self.kafka.address, TOPIC, GENESIS)

    def until(self, done: Callable[[], object], what: str) -> None:
        self.reactor.run_until(done, what)

    def add(self, name: str) -> Node:
        self.nodes.append(Node(self, name))
        return self.nodes[-1]

    def all_know(self, roles: Roles) -> None:
        self.until(
            lambda: all(node.roles == roles for node in self.nodes),
            f"all know {roles}: {[node.roles for node in self.nodes]}",
        )

    def clients_know(self, *addresses: str) -> None:
        self.until(
            lambda: all(node.told[-1] == addresses for node in self.nodes),
            f"clients know {addresses}",
        )

    def close(self) -> None:
        for node in self.nodes:
            partition = node.own._partition
            assert partition is not None
            partition.close()
            node.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(own_node, "check", lambda *_given: None)  # the mock describes nothing
    monkeypatch.setattr(known_nodes, "ANSWERS_AFTER_S", 0.05)
    world = World(tmp_path)
    yield world
    world.close()


def test_nodes_join_and_leave_and_all_know(world: World) -> None:
    first = world.add("n1")
    first.lead()
    world.all_know({"n1": "leader"})
    second, third = world.add("n2"), world.add("n3")
    world.all_know({"n1": "leader", "n2": "follower", "n3": "follower"})
    world.clients_know("n1:1", "n2:1", "n3:1")
    second.leave()
    world.all_know({"n1": "leader", "n2": "left", "n3": "follower"})
    world.clients_know("n1:1", "n3:1")
    first.leave()
    third.lead()
    world.all_know({"n1": "left", "n2": "left", "n3": "leader"})
    world.clients_know("n3:1")
    view = third.own.view()
    assert (view.log_id, view.answered_by, view.leader) == (
        str(GENESIS.log_id),
        "n3",
        view.nodes[2],
    )
    assert [node.failures for node in (first, second, third)] == [[], [], []]


def test_a_node_that_ends_without_a_word_is_silent_then(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_nodes, "SAYS_EVERY_S", 0.1)
    monkeypatch.setattr(known_nodes, "SILENT_AFTER_S", 1.0)
    world.add("n1").lead()
    world.all_know({"n1": "leader"})
    second = world.add("n2")
    world.all_know({"n1": "leader", "n2": "follower"})
    partition = second.own._partition
    assert partition is not None
    world.nodes.remove(second)
    partition.close()
    second.own._node = None
    world.all_know({"n1": "leader", "n2": "silent"})


def test_a_follower_that_ends_does_not_wait_while_kafka_is_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_node, "LEAVES_WITHIN_S", NEVER_S)
    world.add("n1").lead()
    second = world.add("n2")
    world.all_know({"n1": "leader", "n2": "follower"})
    world.kafka.cut()
    monkeypatch.setattr(second.own, "_say", lambda **_given: Deferred())  # it is never said
    second.own._settings = second.own._settings.model_copy(update={"silence_s": 1.0})
    second.leave()


def test_a_leader_that_is_told_twice_steps_down_once(world: World) -> None:
    node = world.add("n1")
    for _ in range(2):
        node.own.step_down()
    assert node.own.hands_over
    assert world.reactor.has_stopped


def test_a_leader_that_ends_steps_down_for_nobody(world: World) -> None:
    node = world.add("n1")
    world.reactor.stop()
    node.own.step_down()
