"""Simulated clients: the base class, and a producer of plain messages.

Each actor is a coroutine on the simulated clock.
"""

from __future__ import annotations

from random import Random

from twisted.internet.defer import Deferred

from tests.simulation.clock import SimulatedClock
from tests.simulation.network import ClientConnection, RequestLost
from tests.simulation.world import SimulatedWorld
from txmq.batch import encode
from txmq.model.keys import partition_of
from txmq.model.message import Message
from txmq.wire import data_requests as h
from txmq.wire.data_requests import Opcode

TOPIC, PARTITIONS = "t", 2
LOOK_S = 0.05  # after which an actor looks again, whether anything has changed or not
PLAIN_KEYS, ROW_KEYS = ("p0", "p1", "p2"), ("r0", "r1", "r2")


class Actor:
    """A client with a connection of its own."""

    def __init__(self, world: SimulatedWorld, name: str) -> None:
        self.world, self.name = world, name
        self.rng: Random = world.rng
        self.connection = ClientConnection(world.clock, world.rng, lambda: world.broker)

    def new_id(self) -> bytes:
        return self.rng.randbytes(16)

    def new_token(self) -> bytes:
        return (self.world.now() // 1_000).to_bytes(6, "big") + self.rng.randbytes(10)

    async def request(self, opcode: int, payload: bytes | list[bytes]) -> bytes:
        """Return the reply to a request that may be repeated, over as many connections
        as it takes.
        """
        while True:
            try:
                return await self.connection.request(opcode, payload)
            except RequestLost:
                await self.connection.connect()

    def batch(self, producer: bytes, sequence: int, *messages: tuple[str, str]) -> bytes:
        """Return a batch of messages, each given as (key, body)."""
        rows = [Message(body.encode(), key) for key, body in messages]
        return encode(
            rows, producer_id=producer, epoch=0, sequence=sequence, born_at=self.world.now()
        )

    def fails(self, group: str, body: str) -> bool:
        """Return whether the handler fails. Some messages fail a few times, always the
        same for one seed, and none after the last fault.
        """
        if not self.world.trouble:
            return False
        left = self.world.failures.setdefault(
            (group, body), self.rng.choice((0, 0, 0, 0, 0, 1, 2, 4))
        )
        self.world.failures[group, body] = max(0, left - 1)
        return left > 0


class Changes:
    """What the loops of one actor wait for: something has changed, or a time has come.

    To wait costs much less than to look again and again.
    """

    def __init__(self, clock: SimulatedClock, rng: Random, delay_s: float) -> None:
        """`delay_s`: seconds on average until a change is noticed."""
        self._clock, self._rng, self._delay = clock, rng, delay_s
        self._waiting: list[Deferred[None]] = []
        self._noted = False

    async def wait(self, until: float | None = None) -> None:
        """Wait for the next change, or until that time."""
        waiting: Deferred[None] = Deferred()
        self._waiting.append(waiting)
        now = self._clock.seconds()
        longest = LOOK_S if until is None else min(max(until - now, self._delay), LOOK_S)
        timer = self._clock.callLater(longest, self._come, waiting)
        await waiting
        timer.cancel()

    def note(self) -> None:
        """Have those go on that wait, a moment later."""
        if not self._noted:
            self._noted = True
            self._clock.callLater(self._delay * (0.5 + self._rng.random()), self._come)

    def _come(self, *only: Deferred[None]) -> None:
        if only:
            self._waiting.remove(*only)
        else:
            only, self._waiting, self._noted = tuple(self._waiting), [], False
        for waiting in only:
            waiting.callback(None)


def partition_for(key: str) -> int:
    return partition_of(key, PARTITIONS)


class Producer(Actor):
    """A producer that repeats unacknowledged batches with the same sequence."""

    async def run(self, batches: int) -> None:
        await self.connection.connect()
        producer, sequence, history = self.new_id(), 0, self.world.history
        for _ in range(batches):
            key = self.rng.choice(PLAIN_KEYS + ROW_KEYS)
            bodies = [
                f"{key}|0|{self.name}-{sequence + row}" for row in range(self.rng.randint(1, 3))
            ]
            history.attempted.update(bodies)
            history.sent_at.update(dict.fromkeys(bodies, self.world.clock.seconds()))
            data = self.batch(producer, sequence, *((key, body) for body in bodies))
            reply = await self.request(
                Opcode.SEND, h.send_header(TOPIC, partition_for(key), 0) + data
            )
            receipt = h.unpack_send_receipt(reply)
            for row, body in enumerate(bodies):
                where = None if receipt.offset < 0 else (partition_for(key), receipt.offset + row)
                history.acknowledged[body] = where
            history.counts["duplicate receipts"] += receipt.duplicate
            sequence += len(bodies)
            await self.connection.pause(0.02)
