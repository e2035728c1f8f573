"""Clients: producers, services with a database, consumers, an operator. Each is a
coroutine on the simulated clock.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from tests.simulation.database import Fenced
from tests.simulation.history import Broken
from tests.simulation.network import Lost, Peer
from txmq.batch import encode
from txmq.client.protocol.consumer.acks import join
from txmq.client.protocol.consumer.fetched import view_of
from txmq.errors import Conflict, RequestRejected
from txmq.model.bundle import GroupState
from txmq.model.keys import partition_of
from txmq.model.message import Decision, Message
from txmq.wire import headers as h
from txmq.wire.chunks import Chunk, unpack_chunks
from txmq.wire.group import (
    Description,
    Part,
    PartBatch,
    group_digest,
    pack_part,
    unpack_group_receipt,
)
from txmq.wire.headers import Opcode

if TYPE_CHECKING:
    from random import Random

    from tests.simulation.world import World

TOPIC, PARTITIONS = "t", 2
POSTGRES = ("postgres", 1, 1, 5, None)
PLAIN_KEYS, ROW_KEYS = ("p0", "p1", "p2"), ("r0", "r1", "r2")


class Actor:
    """What all clients share."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.rng: Random = world.rng
        self.peer = Peer(world.clock, world.rng, lambda: world.node)

    def new_id(self) -> bytes:
        return self.rng.randbytes(16)

    def new_token(self) -> bytes:
        return (self.world.now() // 1_000).to_bytes(6, "big") + self.rng.randbytes(10)

    async def insist(self, opcode: int, payload: bytes | list[bytes]) -> bytes:
        """Ask until there is a reply; requests of this kind may be repeated."""
        while True:
            try:
                return await self.peer.request(opcode, payload)
            except Lost:
                await self.peer.connect()

    def batch(self, producer: bytes, sequence: int, *messages: tuple[str, str]) -> bytes:
        """A batch of (key, body)."""
        rows = [Message(body.encode(), key) for key, body in messages]
        return encode(
            rows, producer_id=producer, epoch=0, sequence=sequence, born_at=self.world.now()
        )


def place_of(key: str) -> int:
    return partition_of(key, PARTITIONS)


class Producer(Actor):
    """Sends batches with a sequence, and repeats what was not acknowledged with the
    same one.
    """

    async def run(self, batches: int) -> None:
        await self.peer.connect()
        producer, sequence, history = self.new_id(), 0, self.world.history
        for _ in range(batches):
            key = self.rng.choice(PLAIN_KEYS + ROW_KEYS)
            bodies = [
                f"{key}|0|{self.name}-{sequence + row}" for row in range(self.rng.randint(1, 3))
            ]
            history.attempted.update(bodies)
            history.started.update(dict.fromkeys(bodies, self.world.clock.seconds()))
            data = self.batch(producer, sequence, *((key, body) for body in bodies))
            reply = await self.insist(Opcode.SEND, h.send_header(TOPIC, place_of(key), 0) + data)
            receipt = h.unpack_send_receipt(reply)
            for row, body in enumerate(bodies):
                where = None if receipt.offset < 0 else (place_of(key), receipt.offset + row)
                history.acknowledged[body] = where
            history.counts["duplicate receipts"] += receipt.duplicate
            sequence += len(bodies)
            await self.peer.pause(0.02)


class Service(Actor):
    """Changes a row and sends messages as one decision; its process dies now and then
    at the worst moments.
    """

    async def run(self, transactions: int) -> None:
        await self.peer.connect()
        for _ in range(transactions):
            await self._transaction()
            await self.peer.pause(0.02)

    async def _transaction(self) -> None:
        database, history, rng = self.world.database, self.world.history, self.rng
        token, key = self.new_token(), rng.choice(ROW_KEYS)
        version = await database.lock(key)
        parts = self.group(
            token, [(key, version), *((name, 0) for name in self.some_keys())], POSTGRES
        )
        outcome = "roll back"
        with suppress(Lost, Fenced):
            if len(parts) > 1 and rng.random() < 0.15:
                await self._store(parts[:-1])
                outcome = rng.choice(("roll back", "die before"))
            elif await self._store(parts):
                history.stored[token] = self.world.clock.seconds()
                database.insert_token(token)
                outcome = rng.choices(
                    ("commit", "roll back", "die before", "die after"), (70, 10, 10, 10)
                )[0]
        if outcome == "die before":
            self.peer.drop()
            await self.peer.pause(
                0.1
            )  # until the database notices that the backend's client is gone
        if outcome in ("commit", "die after") and token not in database.fences:
            database.commit(token, key, version)
            history.counts["committed"] += 1
        else:
            database.roll_back(token, key)
            history.dead_tokens.add(token)
        if outcome == "die after":
            self.peer.drop()
        elif outcome in ("commit", "roll back"):
            await self._tell(token, committed=token in database.committed)
        if self.peer.link is None:
            await self.peer.connect()

    def some_keys(self) -> list[str]:
        """Of messages that go with a transaction: none, one, or so many that it is a
        large one.
        """
        return self.rng.choices(PLAIN_KEYS, k=self.rng.choice((0, 0, 0, 1, 1, 3, 6)))

    def group(
        self,
        token: bytes,
        rows: list[tuple[str, int]],
        decider: tuple[object, ...],
        *,
        commit: bool = False,
    ) -> list[Part]:
        """In one part or, if there are more than two messages, perhaps in several."""
        bodies = [f"{key}|{version}|{token.hex()}-{n}" for n, (key, version) in enumerate(rows)]
        self.world.history.attempted.update(bodies)
        self.world.history.groups[token] = bodies
        batches = [
            PartBatch(TOPIC, place_of(key), 0, self.batch(token, n, (key, body)))
            for n, ((key, _version), body) in enumerate(zip(rows, bodies, strict=True))
        ]
        each = self.rng.choice((1, 2, 4)) if len(batches) > 2 else len(batches)
        self.world.history.counts["large"] += len(batches) > 2
        check = 0 if decider[0] in ("local", "job") else 300_000
        parts = [
            Part(
                token,
                number,
                0,
                False,
                False,
                bytes(32),
                None,
                tuple(batches[start : start + each]),
            )
            for number, start in enumerate(range(0, len(batches), each))
        ]
        parts[0] = parts[0]._replace(description=Description(decider, "sim", (), check))
        return [
            *parts[:-1],
            parts[-1]._replace(sealed=True, commit=commit, digest=group_digest(parts)),
        ]

    async def sent(self, parts: list[Part]) -> GroupState:
        """Where the group stands after these parts. Raises Lost."""
        state = GroupState.OPEN
        for part in parts:
            state = GroupState(
                unpack_group_receipt(await self.peer.request(Opcode.GROUP, pack_part(part))).state
            )
        return state

    async def stored_parts(self, parts: list[Part]) -> GroupState:
        """As `sent`, all parts again until it succeeds."""
        while True:
            try:
                return await self.sent(parts)
            except Lost:
                await self.peer.connect()

    async def _store(self, parts: list[Part]) -> bool:
        """Until the lock has been held for too long."""
        for _ in range(3):
            try:
                state = await self.sent(parts)
            except Lost:
                await self.peer.connect()
            else:
                return state in (GroupState.UNDECIDED, GroupState.PUBLISHED, GroupState.COMMITTED)
        return False

    async def _tell(self, token: bytes, *, committed: bool) -> None:
        decision = Decision.COMMIT if committed else Decision.ROLLBACK
        try:
            await self.peer.request(
                Opcode.DECIDE, h.pack_decide(h.Decide(decision, token, 0, "producer"))
            )
        except Conflict as error:
            raise Broken(f"the database said {decision.name}: {error}") from error
        except (Lost, RequestRejected):
            self.world.history.counts["decisions lost"] += 1  # the resolver finds out


class Local(Service):
    """Broker-local transactions, and jobs of several groups with one decision."""

    async def run(self, transactions: int) -> None:
        await self.peer.connect()
        for _ in range(transactions):
            await (self._job() if self.rng.random() < 0.4 else self._local())
            await self.peer.pause(0.03)

    async def _local(self) -> None:
        token, history = self.new_token(), self.world.history
        keys = (self.rng.choice(PLAIN_KEYS + ROW_KEYS), PLAIN_KEYS[1], *self.some_keys())
        parts = self.group(token, [(key, 0) for key in keys], ("local",), commit=True)
        if len(parts) > 1 and self.rng.random() < 0.1:
            parts.pop()
        done = await self.stored_parts(parts) in (GroupState.COMMITTED, GroupState.PUBLISHED)
        (history.decided if done else history.dead_tokens).add(token)

    async def _job(self) -> None:
        job, tokens, history = self.new_token(), [], self.world.history
        for _ in range(3):
            token = self.new_token()
            parts = self.group(
                token, [(key, 0) for key in (PLAIN_KEYS[2], *self.some_keys())], ("job", job)
            )
            if await self.stored_parts(parts) is GroupState.UNDECIDED:
                tokens.append(token)
            else:
                history.dead_tokens.add(token)
        winners = [token for token in tokens if self.rng.random() < 0.7]
        history.dead_tokens.update(set(tokens) - set(winners))
        decision = {
            "token": job.hex(),
            "outcome": "COMMIT",
            "winners": [token.hex() for token in winners],
        }
        for _ in range(1 + (self.rng.random() < 0.5)):  # a driver may say it twice
            while True:
                try:
                    await self.peer.call("job.decide", **decision)
                except Lost:
                    await self.peer.connect()
                else:
                    break
        history.decided.update(winners)
        late = self.new_token()
        if (
            await self.stored_parts(self.group(late, [(PLAIN_KEYS[2], 0)] * 3, ("job", job)))
            != GroupState.ROLLED_BACK
        ):
            raise Broken("a group was stored for a job that is decided")
        history.dead_tokens.add(late)


class Consumer(Actor):
    """A member of a group; dies now and then with messages in hand."""

    group, mode, acks_together = "c", "concurrent", True

    async def run(self) -> None:
        while not self.world.over:
            try:
                await self.peer.connect()
                await self._member()
            except (Lost, RequestRejected):
                self.peer.drop()
                await self.peer.pause(0.05)

    async def _member(self) -> None:
        retry = {"delays": [20_000, 40_000], "attempts": 2}
        options = {
            "session_ms": 1_000,
            "lease_ms": 1_000,
            "retry": retry,
            "mode": self.mode,
            "topics": [TOPIC],
        }
        joined = await self.peer.call(
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
                await self.peer.request(Opcode.FETCH, h.pack_fetch(wanted))
            ).chunks
            for chunk in chunks:
                if self.rng.random() < self.world.trouble * 0.02:
                    self.world.history.counts["consumers killed"] += 1
                    raise Lost
                await self._process(generation, chunk)
            if self.rng.random() < 0.4:
                generation = await self._heartbeat(generation)

    async def _heartbeat(self, generation: int) -> int:
        beat = await self.peer.call(
            "consumer.heartbeat", group=self.group, member=self.name, generation=generation
        )
        return int(beat["generation"])

    async def _process(self, generation: int, chunk: Chunk) -> None:
        """Message by message, or all and then an ack of all that did not fail."""
        view, together = view_of(chunk), self.acks_together and self.rng.random() < 0.5
        self.world.history.counts["runs"] += bool(chunk.further)
        done, failed = [], []
        for row in range(chunk.first_row, chunk.first_row + chunk.rows):
            offset, body = chunk.base_offset + row, view.bodies[row].decode()
            self.world.delivered(chunk.partition, offset, body)
            if not together:
                await self._one(generation, chunk, offset, body)
            elif self._fails(body):
                failed.append(offset)
            else:
                self.world.history.handled[body] += 1
                done.append(h.Acked(TOPIC, chunk.partition, offset, offset + 1))
        if done:
            await self._ack(generation, *join(done))
        for offset in failed:
            await self._nack(generation, chunk.partition, offset)

    def _fails(self, body: str) -> bool:
        """Some messages fail a few times, the same ones for the same seed; none once
        trouble is over.
        """
        if not self.world.trouble:
            return False
        left = self.world.failures.setdefault(
            (self.group, body), self.rng.choice((0, 0, 0, 0, 0, 1, 2, 4))
        )
        self.world.failures[self.group, body] = max(0, left - 1)
        return left > 0

    async def _one(self, generation: int, chunk: Chunk, offset: int, body: str) -> None:
        if self._fails(body):
            await self._nack(generation, chunk.partition, offset)
            return
        self.world.history.handled[body] += 1
        await self._ack(generation, h.Acked(TOPIC, chunk.partition, offset, offset + 1))

    async def _ack(self, generation: int, *ranges: h.Acked) -> None:
        await self.peer.request(
            Opcode.ACK, h.pack_ack(h.Ack(generation, self.group, self.name, ranges))
        )

    async def _nack(self, generation: int, partition: int, offset: int) -> int:
        place = {"topic": TOPIC, "partition": partition, "offset": offset}
        reply = await self.peer.call(
            "consumer.nack", group=self.group, member=self.name, generation=generation, **place
        )
        self.world.history.counts[f"moved to {reply['moved']}"] += 1
        return int(reply["fence_lease"])


class Ordered(Consumer):
    """Processes each key's messages in the order they come, and gives back those of a
    key that has failed.
    """

    group, mode, acks_together = "o", "ordered", False

    async def _member(self) -> None:
        self._fenced: dict[str, int] = {}
        await super()._member()

    async def _one(self, generation: int, chunk: Chunk, offset: int, body: str) -> None:
        key, version, _rest = body.split("|")
        if chunk.lease_id < self._fenced.get(key, 0):
            ranges = [[TOPIC, chunk.partition, offset, offset + 1]]
            await self.peer.call(
                "consumer.return",
                group=self.group,
                member=self.name,
                generation=generation,
                ranges=ranges,
            )
            self.world.history.counts["given back"] += 1
        elif self._fails(body):
            self._fenced[key] = await self._nack(generation, chunk.partition, offset)
        else:
            if int(version):
                self.world.history.succeeded(key, int(version))
            self.world.history.handled[f"o:{body}"] += 1
            await self._ack(generation, h.Acked(TOPIC, chunk.partition, offset, offset + 1))


class Operator(Actor):
    """Replays dead letters, some in a transaction of its own."""

    async def run(self) -> None:
        while not self.world.over:
            try:
                await self.peer.connect()
                while not self.world.over:
                    await self.peer.pause(0.12)
                    for group in ("c", "o"):
                        await self._replay(group)
            except (Lost, RequestRejected):
                self.peer.drop()
                await self.peer.pause(0.05)

    async def _replay(self, group: str) -> None:
        letters = (await self.peer.call("dlq.list", group=group))["letters"]
        places = [[letter["topic"], letter["partition"], letter["offset"]] for letter in letters]
        if places:
            self.world.history.counts["letters"] += len(places)
            await self.peer.call("dlq.replay", group=group, letters=places)
