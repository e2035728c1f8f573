"""A broker's part in a cluster: it follows the shared log, and leads it one day."""

from __future__ import annotations

import secrets
import time
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from twisted.internet.task import LoopingCall, deferLater
from twisted.python.failure import Failure

from txmq.broker.cluster.kafka_client import KafkaAddress
from txmq.broker.cluster.kafka_genesis import read_genesis, require_known
from txmq.broker.cluster.kafka_partition import KafkaPartition
from txmq.broker.cluster.kafka_topic import check
from txmq.broker.cluster.replica import Replica
from txmq.broker.reactor.steady_clock import ELAPSED
from txmq.errors import LogUnavailable
from txmq.store.shared.node import Node, State, Timing
from txmq.store.shared.rules import Place
from txmq.store.shared.stored_place import load_place

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.engine.engine import Engine
    from txmq.config.broker import ClusterSettings
    from txmq.errors import NodeEnded
    from txmq.store.index.lmdb_tables import LmdbTables
    from txmq.store.shared.records import Genesis

TICKS = 5  # in each third of the lease
LEAVES_WITHIN_S = 5.0
RETRY_S = 1.0
T = TypeVar("T")
log = structlog.get_logger()


class Membership:
    """The node of one broker's process. Waits for Kafka, which may have been the reason
    to start again. Raises ConfigError for a topic that may lose what it has.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        name: str,
        reactor: Any,  # noqa: ANN401  # several interfaces of Twisted's
        failed: Callable[[Failure], None],
    ) -> None:
        """`failed` ends the process: once the node has ended, it is of no use."""
        self._settings, self._name, self._reactor = settings, name, reactor
        self._failed = failed
        self._kafka = KafkaAddress(settings.kafka, settings.options)
        self._when_answered(lambda: check(self._kafka, self._settings.topic, self._settings.accept))
        self._partition: KafkaPartition | None = None
        self._replica: Replica | None = None
        self._node: Node | None = None
        self._tick_s = 0.0
        self._leaves = False
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

    def forget_before(self, place: Place) -> None:
        """Have the topic forget what no node needs that has read up to a place."""
        partition, node = self._partition, self._node
        if partition is not None and node is not None and node.state is State.LEADING:
            partition.forget_before(place.offset)

    def copy_to(self, engine: Engine, tables: LmdbTables) -> Callable[[], Place]:
        """Have the engine's log follow; return what tells where its tables stand."""
        self._partition = KafkaPartition(self._reactor, self._kafka, self._settings.topic)
        replica = self._replica = Replica(engine, _seconds)
        timing = Timing(self._settings.silence_s, self._settings.lease_s)
        self._node = Node(
            self._partition,
            replica,
            load_place(tables) or Place(),
            name=self._name,
            nonce=secrets.token_bytes(16),
            rng=Random(),  # noqa: S311  # followers wait for different times
            now=_seconds(),
            timing=timing,
        )
        replica.on_end = self._end
        engine.replicate = replica.replicate
        self._tick_s = timing.beat_s / TICKS
        return lambda: replica.place

    async def lead(self) -> Place:
        """Follow until this node leads; return the place of its claim."""
        assert self._replica is not None
        assert self._node is not None
        self._replica.follow(self._node)
        loop = LoopingCall(self._tick)
        loop.clock = self._reactor
        loop.start(self._tick_s, now=False).addErrback(self._failed)
        log.info("cluster.follows", topic=self._settings.topic)
        place = await self._replica.leading
        log.info("cluster.leads", epoch=place.epoch)
        return place

    def _tick(self) -> None:
        assert self._replica is not None
        self._replica.tick()
        if self.has_lease():
            self.on_lease()

    async def lease(self) -> None:
        """Wait until the leader before this one answers nothing any more."""
        while not self.has_lease():
            await deferLater(self._reactor, self._tick_s)

    def has_lease(self) -> bool:
        """Return whether this node may answer from its state without a write."""
        return self._node is not None and self._node.is_serving(_seconds())

    async def leave(self) -> None:
        """End: a leader says so, and another one takes over at once."""
        self._leaves = True
        node, until = self._node, _seconds() + LEAVES_WITHIN_S
        if node is not None:
            node.step_down(_seconds())
            while node.state is State.LEADING and _seconds() < until:
                await deferLater(self._reactor, self._tick_s)
        if self._partition is not None:
            self._partition.close()
            # Connections of clients are closed meanwhile: they go on elsewhere.
            while not self._partition.is_over and _seconds() < until:
                await deferLater(self._reactor, self._tick_s)

    def _end(self, error: NodeEnded) -> None:
        if not self._leaves:
            self._failed(Failure(error))


def _seconds() -> float:
    return time.clock_gettime(ELAPSED)
