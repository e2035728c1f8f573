"""A spooling producer, a broker that comes and goes, and disks that lose power; one
seed drives all of it.

The producer is the client's own chain of spools and its drain. The broker is the real
core. Frames and replies are lost with their connections, processes die, directories are
copied, topics grow, and sessions are forgotten.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast
from unittest.mock import patch

from tests.core.driver import Driver
from tests.recover.spool.disks import Disk, directory_on
from tests.recover.spool.disks import batch as encoded_batch
from txmq.batch import BatchView, verify
from txmq.client.protocol.conversation import Conversation
from txmq.client.protocol.sender import spool_drain
from txmq.client.protocol.sender.multi_send import MAX_BATCHES
from txmq.client.protocol.sender.spool_chain import SpoolChain
from txmq.client.protocol.sender.spool_drain import SpoolDrain
from txmq.client.protocol.sender.topics import TopicCache
from txmq.core.topics.sends import SkipSequences, StoreBatch
from txmq.core.topics.topics import CreateTopic, GrowTopic
from txmq.errors import RequestRejected, UnknownTopic
from txmq.model.keys import partition_of
from txmq.model.message import message_id
from txmq.wire.batched import BatchedReply, pack_replies, unpack_requests
from txmq.wire.data_requests import Opcode, pack_send_receipt, unpack_send
from txmq.wire.frames import Frame
from txmq.wire.status import OK, error_reply

TOPIC, CLOSED = "orders", "closed"
KEYS = [f"k{n}" for n in range(4)]


class SimulatedBroker:
    """The core of a broker behind frames. `published` has id and body of messages."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.driver.do(CreateTopic(TOPIC, 3))
        self.published: dict[tuple[str, int], list[tuple[str, str]]] = {}

    def describe(self, topic: str, within: float | None) -> dict[str, Any]:
        del within
        found = self.driver.state.topics[topic]
        fields = {"partitions": len(found.end_offsets), "epoch": found.epoch, "topic_id": 1}
        return {"topics": [fields]}

    def answer(self, request: Frame) -> Frame:
        several = request.opcode == Opcode.SENDS
        sends = unpack_requests(request.payload) if several else [request.payload]
        replies = [self._send(send) for send in sends]
        if several:
            return request._replace(payload=b"".join(pack_replies(replies)))
        return request._replace(status=replies[0].status, payload=replies[0].payload)

    def _send(self, payload: bytes) -> BatchedReply:
        topic, partition, epoch, batch = unpack_send(payload)
        header = verify(batch)
        reply = self.driver.do(StoreBatch(topic, epoch, partition, batch, header))
        if isinstance(reply, RequestRejected):
            return BatchedReply(*error_reply(reply))
        if not reply.duplicate:
            own = self.published.setdefault((topic, partition), [])
            for row, body in enumerate(BatchView(batch).bodies):
                own.append((message_id(header.producer_id, header.sequence + row), body.decode()))
        return BatchedReply(OK, pack_send_receipt(reply))

    def has(self, name: str) -> bool:
        return any(name == found for own in self.published.values() for found, _body in own)

    def grow(self, rng: Random) -> None:
        partitions = len(self.driver.state.topics[TOPIC].end_offsets)
        if partitions < 9:
            self.driver.do(GrowTopic(TOPIC, partitions + rng.randrange(1, 3)))

    def forget_sessions(self) -> None:
        self.driver.state.producers.clear()


@dataclass
class Connection:
    """Requests and replies under way."""

    requests: list[Frame] = field(default_factory=list)
    replies: list[Frame] = field(default_factory=list)
    last: int = 0
    most: int = MAX_BATCHES  # in a frame

    def request(self, opcode: int, payload: Any) -> tuple[int, list[bytes]]:
        self.last += 1
        data = payload if isinstance(payload, bytes) else b"".join(payload)
        self.requests.append(Frame(opcode, 0, self.last, data))
        return self.last, [data]


class Producer:
    """A process with a spool, on the disk that the one before has left."""

    def __init__(self, world: SpoolWorld, disk: Disk) -> None:
        self._world, self.disk = world, disk
        self.chain = SpoolChain(directory_on(disk), 1 << 30)
        disk.watch(*self.chain.spools)
        self.topics = TopicCache(world.broker.describe, None)
        self.drain: SpoolDrain | None = None
        self.connection: Connection | None = None
        self._session, self._sequence = world.rng.randbytes(16), 0

    def store(self) -> None:
        """Store messages of one key, and give them receipts."""
        world, rng = self._world, self._world.rng
        key = rng.choice(KEYS)
        bodies = [world.next_body(key) for _ in range(rng.choice((1, 1, 2, 5)))]
        topic = CLOSED if rng.random() < 0.03 else TOPIC
        batch = encoded_batch(self._sequence, *bodies, topic=topic, key=key, session=self._session)
        self._sequence += len(bodies)
        known = self.topics.cached(topic)
        rows = [batch]
        if known is None:
            rows = list(batch.rows())
        else:
            partition = partition_of(key, known.partitions)
            rows = [batch._replace(partition=partition, epoch=known.epoch)]
        self.chain.own.stage(rows, 1)
        self.chain.own.flush()
        world.acked(topic, bodies)
        if rng.random() < 0.1:
            self._session, self._sequence = rng.randbytes(16), 0

    def step(self) -> None:
        """Do one step of the drain, as the sender's thread does."""
        if self.connection is None:
            self.connection = Connection(most=MAX_BATCHES if self._world.rng.random() < 0.6 else 1)
        if self.drain is None:
            if self.chain.empty:
                return
            self.drain = SpoolDrain(self.chain.first, self.topics)
        drain, broker = self.drain, self._world.broker
        drain.paused_until = 0.0
        if drain.done and not drain.awaits_replies:
            self.chain.finish_first()
            self.drain = None
            return
        for topic in sorted(drain.unknown_topics):
            if topic == CLOSED:
                drain.topic_refreshed(topic, UnknownTopic("there is none"))
            else:
                self.topics.refresh(topic)
                drain.topic_refreshed(topic)
        if drain.in_doubt is not None:
            drain.settle(stored=broker.has(drain.in_doubt.message_id))
        if drain.to_skip is not None:
            broker.driver.do(SkipSequences(*drain.to_skip))
            drain.skipped()
        with patch.object(spool_drain, "MAX_BATCHES", self.connection.most):
            drain.next_writes(cast("Conversation", self.connection))

    def exchange(self) -> None:
        """Let a request arrive, or a reply."""
        connection, rng = self.connection, self._world.rng
        if connection is None:
            return
        if connection.requests and (rng.random() < 0.5 or not connection.replies):
            connection.replies.append(self._world.broker.answer(connection.requests.pop(0)))
        elif connection.replies:
            reply = connection.replies.pop(0)
            if self.drain is not None:
                self.drain.receive([reply])

    def lose_connection(self) -> None:
        """Lose what is under way; a part of the requests may still arrive."""
        connection, self.connection = self.connection, None
        if connection is None:
            return
        for request in connection.requests[: self._world.rng.randrange(3)]:
            self._world.broker.answer(request)
        if self.drain is not None:
            self.drain.connection_lost()


class SpoolWorld:
    """One seed's world. `run` returns counts of what happened, or raises."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.seed = seed
        self.broker = SimulatedBroker()
        self.counts: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        self._acked: dict[str, list[str]] = {TOPIC: [], CLOSED: []}
        self.producer = Producer(self, Disk())

    def next_body(self, key: str) -> bytes:
        self._numbers[key] += 1
        return f"{key}.{self._numbers[key]}".encode()

    def acked(self, topic: str, bodies: list[bytes]) -> None:
        self._acked[topic] += [body.decode() for body in bodies]

    def run(self, steps: int = 150) -> Counter[str]:
        for _ in range(steps):
            self._step()
        for copies in range(2):  # and once more what a copy of the disk has
            image = self.producer.disk.copy()
            self.drain_all()
            if copies == 0 and self.rng.random() < 0.5:
                self.counts["copies"] += 1
                self._continue_on(image)
        self.check()
        return self.counts

    def _step(self) -> None:
        producer, draw = self.producer, self.rng.random()
        if draw < 0.25:
            producer.store()
        elif draw < 0.9:
            producer.step()
            for _ in range(self.rng.randrange(4)):
                producer.exchange()
        elif draw < 0.93:
            self.counts["lost connections"] += producer.connection is not None
            producer.lose_connection()
        elif draw < 0.95:
            self.counts["restarts"] += 1
            self._continue_on(producer.disk.restart())
        elif draw < 0.97:
            self.counts["power cuts"] += 1
            self._continue_on(producer.disk.crash(self.rng))
        elif draw < 0.98:
            self.broker.grow(self.rng)
        elif draw < 0.983:
            self._lose_a_copy()
        else:
            self._forget_sessions()

    def _continue_on(self, disk: Disk) -> None:
        """Go on with another process; the one before is dead."""
        dead, self.producer = self.producer, Producer(self, disk)
        dead.chain.abandon()

    def _lose_a_copy(self) -> None:
        """Let a copy of the disk drain a while, and never come back."""
        self.counts["lost copies"] += 1
        copy = Producer(self, self.producer.disk.copy())
        for _ in range(self.rng.randrange(40)):
            copy.step()
            copy.exchange()
        copy.chain.abandon()

    def _forget_sessions(self) -> None:
        if not self.counts["lost copies"]:  # what the broker still has, copies do not double
            self.counts["forgotten"] += 1
            self.broker.forget_sessions()

    def drain_all(self) -> None:
        """Let the producer drain its spools."""
        producer = self.producer
        for _ in range(20_000):
            if producer.chain.empty and producer.drain is None:
                return
            producer.step()
            producer.exchange()
        raise AssertionError(f"seed {self.seed}: the spool is never drained")

    def check(self) -> None:
        published = [body for own in self.broker.published.values() for _id, body in own]
        doubled = [body for body, times in Counter(published).items() if times > 1]
        assert not doubled, f"seed {self.seed}: doubled {doubled[:3]}"
        lost = set(self._acked[TOPIC]) - set(published)
        assert not lost, f"seed {self.seed}: lost {sorted(lost)[:3]}"
        for place, own in self.broker.published.items():
            for key in KEYS:
                numbers = [int(b.partition(".")[2]) for _id, b in own if b.startswith(f"{key}.")]
                assert numbers == sorted(numbers), f"seed {self.seed}: order in {place}"
        self.counts["published"] += len(published)
