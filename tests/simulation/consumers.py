"""Simulated members of a concurrent and of an ordered consumer group."""

from __future__ import annotations

from tests.simulation.actors import TOPIC, Actor
from tests.simulation.invariants import check_delivery
from tests.simulation.letter_mender import check_received
from tests.simulation.network import RequestLost
from txmq.client.protocol.consumer.acks import join
from txmq.client.protocol.consumer.fetched import decode_chunk
from txmq.errors import RequestRejected
from txmq.wire import data_requests as h
from txmq.wire.chunks import Chunk, unpack_chunks
from txmq.wire.data_requests import Opcode


class ConcurrentConsumer(Actor):
    """A member of a consumer group that dies now and then with leased messages."""

    group, mode, acks_together = "c", "concurrent", True

    async def run(self) -> None:
        while not self.world.over:
            try:
                await self.connection.connect()
                await self._member()
            except (RequestLost, RequestRejected):
                self.connection.drop()
                await self.connection.pause(0.05)

    async def _member(self) -> None:
        retry = {"delays_us": [20_000, 40_000], "retries": 2}
        options = {
            "session_ms": 1_000,
            "lease_ms": 1_000,
            "retry": retry,
            "mode": self.mode,
            "topics": [TOPIC],
        }
        joined = await self.connection.call(
            "consumer.join",
            group=self.group,
            member=self.name,
            instance=self.new_id().hex(),
            **options,
        )
        generation = joined["generation"]
        while not self.world.over:
            most, run = self.rng.choice((1, 3, 50)), self.rng.choice((0, 2, 50))
            wanted = h.Fetch(generation, 200, 1 << 16, most, self.group, self.name, run=run)
            chunks = unpack_chunks(
                await self.connection.request(Opcode.FETCH, h.pack_fetch(wanted))
            ).chunks
            bodies = [self._bodies(chunk) for chunk in chunks]
            for chunk, published in zip(chunks, bodies, strict=True):
                if self.rng.random() < self.world.trouble * 0.02:
                    self.world.history.counts["consumers killed"] += 1
                    raise RequestLost
                await self._process(generation, chunk, published)
            if self.rng.random() < 0.4:
                generation = await self._heartbeat(generation)

    async def _heartbeat(self, generation: int) -> int:
        beat = await self.connection.call(
            "consumer.heartbeat", group=self.group, member=self.name, generation=generation
        )
        return int(beat["generation"])

    def _bodies(self, chunk: Chunk) -> list[str]:
        """Return the bodies of a chunk as they were published. Its edits are checked as
        it comes: later, somebody else may have edited what was delivered again.
        """
        view, base, first = decode_chunk(chunk), chunk.base_offset, chunk.first_row
        return [
            check_received(
                self.world, self.group, chunk.partition, base + row, view.bodies[row].decode()
            )
            for row in range(first, first + chunk.rows)
        ]

    async def _process(self, generation: int, chunk: Chunk, bodies: list[str]) -> None:
        """Process a chunk message by message, or acknowledge its successes in one
        request.
        """
        together = self.acks_together and self.rng.random() < 0.5
        self.world.history.counts["runs"] += bool(chunk.further)
        done, failed = [], []
        for offset, body in enumerate(bodies, chunk.base_offset + chunk.first_row):
            check_delivery(self.world, chunk.partition, offset, body)
            if not together:
                await self._one(generation, chunk, offset, body)
            elif self.fails(self.group, body):
                failed.append(offset)
            else:
                self.world.history.handled[body] += 1
                done.append(h.AckedRange(TOPIC, chunk.partition, offset, offset + 1))
        if done:
            await self._ack(generation, *join(done))
        for offset in failed:
            await self._nack(generation, chunk.partition, offset)

    async def _one(self, generation: int, chunk: Chunk, offset: int, body: str) -> None:
        if self.fails(self.group, body):
            await self._nack(generation, chunk.partition, offset)
            return
        self.world.history.handled[body] += 1
        await self._ack(generation, h.AckedRange(TOPIC, chunk.partition, offset, offset + 1))

    async def _ack(self, generation: int, *ranges: h.AckedRange) -> None:
        await self.connection.request(
            Opcode.ACK, h.pack_ack(h.Ack(generation, self.group, self.name, ranges))
        )

    async def _nack(self, generation: int, partition: int, offset: int) -> int:
        place = {"topic": TOPIC, "partition": partition, "offset": offset}
        reply = await self.connection.call(
            "consumer.nack", group=self.group, member=self.name, generation=generation, **place
        )
        self.world.history.counts[f"moved to {reply['moved']}"] += 1
        return int(reply["fence_lease"])


class OrderedConsumer(ConcurrentConsumer):
    """A member that processes the messages of a key in order, and returns those behind
    a failed one.
    """

    group, mode, acks_together = "o", "ordered", False

    async def _member(self) -> None:
        self._fenced: dict[str, int] = {}
        await super()._member()

    async def _one(self, generation: int, chunk: Chunk, offset: int, body: str) -> None:
        key, version, _rest = body.split("|")
        if chunk.lease_id < self._fenced.get(key, 0):
            ranges = [[TOPIC, chunk.partition, offset, offset + 1]]
            await self.connection.call(
                "consumer.return",
                group=self.group,
                member=self.name,
                generation=generation,
                ranges=ranges,
            )
            self.world.history.counts["given back"] += 1
        elif self.fails(self.group, body):
            self._fenced[key] = await self._nack(generation, chunk.partition, offset)
        else:
            if int(version):
                self.world.history.record_processed(key, int(version))
            self.world.history.handled[f"o:{body}"] += 1
            await self._ack(generation, h.AckedRange(TOPIC, chunk.partition, offset, offset + 1))
