"""A broker's part in a cluster: it follows the shared log, and leads it one day."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from math import inf
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from twisted.internet.defer import Deferred
from twisted.internet.error import ReactorNotRunning
from twisted.internet.task import LoopingCall, deferLater
from twisted.python.failure import Failure

from txmq.broker.cluster.kafka_client import KafkaAddress
from txmq.broker.cluster.kafka_genesis import read_genesis, require_known
from txmq.broker.cluster.kafka_partition import KafkaPartition
from txmq.broker.cluster.kafka_topic import check
from txmq.broker.cluster.leaders_log import copy_from_leader, password_of
from txmq.broker.cluster.replica import Replica
from txmq.broker.monitoring.cluster_node import NodeNumbers
from txmq.broker.reactor.steady_clock import ELAPSED
from txmq.errors import LogUnavailable
from txmq.store.shared.known_nodes import KnownNodes
from txmq.store.shared.node import Node, State, Timing
from txmq.store.shared.records import encode
from txmq.store.shared.rules import Place
from txmq.store.shared.stored_place import load_place
from txmq.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from txmq.broker.cluster.leaders_log import LogAt
    from txmq.broker.engine.engine import Engine
    from txmq.config.broker import ClusterSettings
    from txmq.errors import NodeEnded
    from txmq.model.cluster import ClusterView
    from txmq.store.filesystem import FileSystem
    from txmq.store.index.lmdb_tables import LmdbTables
    from txmq.store.shared.records import Genesis

TICKS = 5  # in each third of the lease
LEAVES_WITHIN_S = 5.0
RETRY_S = 1.0
T = TypeVar("T")
log = structlog.get_logger()


class OwnNode:
    """The node of one broker's process. Waits for Kafka, which may have been the reason
    to start again. Raises ConfigError for a topic that may lose what it has.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        name: str,
        address: str,
        reactor: Any,  # noqa: ANN401  # several interfaces of Twisted's
        failed: Callable[[Failure], None],
    ) -> None:
        """`failed` ends the process: once the node has ended, it is of no use."""
        self._settings, self._name, self._reactor = settings, name, reactor
        self._nonce = secrets.token_bytes(16)
        self._known = KnownNodes(name, address, __version__, self._nonce)
        self._failed = failed
        self._kafka = KafkaAddress(settings.kafka, settings.options)
        self._when_answered(lambda: check(self._kafka, self._settings.topic, self._settings.accept))
        self._partition: KafkaPartition | None = None
        self._replica: Replica | None = None
        self._node: Node | None = None
        self._tick_s = 0.0
        self._loop = LoopingCall(self._tick)
        self._leaves = False
        self.hands_over = False  # the process goes on as a follower
        self._told: tuple[str, ...] = ()  # addresses, by `on_nodes`
        self.caught_up: Deferred[None] = Deferred()  # once, since it began
        self.on_nodes: Callable[[], None] = lambda: None  # their addresses have changed
        self.on_lease: Callable[[], None] = lambda: None  # at each tick with the lease

    def _when_answered(self, ask: Callable[[], T]) -> T:
        """Ask Kafka, and ask again until it answers."""
        while True:
            try:
                return ask()
            except LogUnavailable as away:
                log.warning("cluster.waits", reason=str(away))
                time.sleep(RETRY_S)

    def genesis(self) -> Genesis:
        """Read how the log begins, for an empty data directory."""
        return self._when_answered(lambda: read_genesis(self._kafka, self._settings.topic))

    def require_known(self, place: Place) -> None:
        """Raise StoreError where the topic is not the one that this node has read."""
        self._when_answered(lambda: require_known(self._kafka, self._settings.topic, place))

    @property
    def password(self) -> str:
        """What a node must know to copy the log of this one while it leads: who may
        read the topic knows it.
        """
        return password_of(self._nonce)

    def copy_log(self, fs: FileSystem, data: Path, keep: int, log_at: LogAt) -> None:
        """Copy the log of the node that leads into a data directory, which has it up to
        `keep`; blocks.
        """
        copy_from_leader(self._kafka, self._settings.topic, fs, data, keep, log_at)

    def leader(self) -> tuple[str, str] | None:
        """Return address and password of the node that leads, None while none is
        known.
        """
        leader = self.view().leader
        return leader and (leader.address, password_of(self._read_to.nonce))

    def forget_before(self, place: Place) -> None:
        """Have the topic forget what no node needs that has read up to a place."""
        partition, node = self._partition, self._node
        if partition is not None and node is not None and node.state is State.LEADING:
            partition.forget_before(place.offset)

    def copy_to(self, engine: Engine, tables: LmdbTables) -> Callable[[], Place]:
        """Have the engine's log follow; return what tells where its tables stand."""
        self._partition = KafkaPartition(self._reactor, self._kafka, self._settings.topic)
        replica = self._replica = Replica(engine, _seconds, self._known)
        timing = Timing(self._settings.silence_s, self._settings.lease_s)
        self._node = Node(
            self._partition,
            replica,
            load_place(tables) or Place(),
            name=self._name,
            nonce=self._nonce,
            rng=Random(),  # noqa: S311  # followers wait for different times
            now=_seconds(),
            timing=timing,
        )
        replica.on_end = self._end
        engine.replicate = replica.replicate
        self._tick_s = timing.beat_s / TICKS
        return lambda: replica.place

    async def follow(self) -> None:
        """Begin to follow, and go on until everything is read that there was."""
        assert self._replica is not None
        assert self._node is not None
        self._replica.follow(self._node)
        self._loop.clock = self._reactor
        self._loop.start(self._tick_s, now=False).addErrback(self._failed)
        log.info("cluster.follows", topic=self._settings.topic)
        await self.caught_up

    async def lead(self) -> Place:
        """Follow until this node leads; return the place of its claim."""
        assert self._replica is not None
        place = await self._replica.leading
        log.info("cluster.leads", epoch=place.epoch)
        return place

    def _tick(self) -> None:
        assert self._replica is not None
        assert self._node is not None
        self._replica.tick()
        if self.has_lease():
            self.on_lease()
        if self._node.has_caught_up and self._node.state is not State.ENDED:
            self._tend_known()

    def _tend_known(self) -> None:
        if not self.caught_up.called:
            self.caught_up.callback(None)
        if self._known.is_due(_seconds()) and not self._leaves:
            self._say()
        if self._told != (told := self.addresses()):
            self._told = told
            self.on_nodes()

    def _say(self, *, leaves: bool = False) -> Deferred[None]:
        """Say something of this node to all others. Fires when it was said, or lost."""
        assert self._node is not None
        assert self._partition is not None
        said = self._known.say(self._node.place, _seconds(), leaves=leaves)
        over: Deferred[None] = Deferred()

        def reported(error: Exception | None, _offset: int | None) -> None:
            if error is not None:
                self._known.note_lost()
            over.callback(None)

        self._partition.produce(encode(said), reported)
        return over

    def view(self) -> ClusterView:
        """Return all nodes, as this one knows them."""
        return self._known.view(self._read_to, _seconds())

    def addresses(self) -> tuple[str, ...]:
        """Return where clients find the nodes, the leader first."""
        return self._known.addresses(self._read_to, _seconds())

    @property
    def _read_to(self) -> Place:
        assert self._node is not None, "it follows"
        return self._node.place

    async def lease(self) -> None:
        """Wait until the leader before this one answers nothing any more."""
        while not self.has_lease():
            await deferLater(self._reactor, self._tick_s)

    def has_lease(self) -> bool:
        """Return whether this node may answer from its state without a write."""
        return self._node is not None and self._node.is_serving(_seconds())

    async def leave(self) -> None:
        """End: another node takes over from a leader at once, and none counts on this
        one.
        """
        self._leaves = True
        node, until = self._node, _seconds() + LEAVES_WITHIN_S
        if node is not None and node.has_caught_up and node.state is not State.ENDED:
            node.step_down(_seconds())
            while node.state is State.LEADING and _seconds() < until:
                await deferLater(self._reactor, self._tick_s)
            if self.hears:  # else Kafka is away, and nobody would hear of it
                said = self._say(leaves=True)
                while self.hears and not said.called and _seconds() < until:
                    await deferLater(self._reactor, self._tick_s)
        if self._loop.running:  # a node that reads nothing would take that for silence
            self._loop.stop()
        if self._partition is not None:
            self._partition.close()
            # Connections of clients are closed meanwhile: they go on elsewhere.
            while not self._partition.is_over and _seconds() < until:
                await deferLater(self._reactor, self._tick_s)

    @property
    def hears(self) -> bool:
        """Whether something was read of late, be it the beat of a leader."""
        return self._node is not None and (
            _seconds() - self._node.read_at < self._settings.silence_s
        )

    def step_down(self) -> None:
        """Drain, let another node lead, and follow in a new image of this process."""
        self.hands_over = True
        with suppress(ReactorNotRunning):  # it ends already
            self._reactor.stop()

    def numbers(self) -> NodeNumbers:
        """Return what operators see of this node."""
        node, now = self._node, _seconds()
        assert node is not None, "the data directory is open"
        leads = node.state is State.LEADING
        return NodeNumbers(
            leads,
            node.place.epoch,
            max(0.0, now - node.read_at),
            max(0.0, now - node.confirmed_at) if leads and node.confirmed_at > -inf else 0.0,
            node.claims,
            node.questions,
        )

    def _end(self, error: NodeEnded) -> None:
        if not self._leaves:
            self._failed(Failure(error))


def _seconds() -> float:
    return time.clock_gettime(ELAPSED)
