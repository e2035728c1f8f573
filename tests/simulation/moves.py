"""Operators who move what others are at work on: a topic grows, and groups go back to
offsets that they have passed.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, TypeAlias

from tests.simulation.actors import PARTITIONS, TOPIC, Actor, place_of
from tests.simulation.history import Broken
from tests.simulation.network import Lost
from txmq.errors import Conflict, OffsetOutOfRange, UnknownGroup, UnknownTopic
from txmq.model.keys import partition_of
from txmq.wire import headers as h
from txmq.wire.calls import encode_call
from txmq.wire.headers import Opcode

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from typing import Any

    from twisted.internet.defer import Deferred

    from tests.simulation.world import World

Work: TypeAlias = "Coroutine[Deferred[Any], Any, None]"
EVERY = 40  # of so many seeds one has each of the two; some have both
GROWN = PARTITIONS + 1
MOVING_KEY = next(
    key for key in (f"g{n}" for n in count()) if place_of(key) != partition_of(key, GROWN)
)
VERSIONS = 8  # of that key, half of them before it moves
GROUPS = {"c": "", "o": "o:"}  # and how their deliveries are noted in the history
LATER = (Conflict, UnknownGroup, UnknownTopic, OffsetOutOfRange)


def of_seed(world: World, seed: int) -> Iterator[Work]:
    """What there is of it; the seeds that have neither are as they would be without."""
    if seed % EVERY == 0:
        yield Grower(world, "g").run()
    if seed // 2 % EVERY == 0:
        yield Resetter(world, "z").run(2)


def check(world: World) -> None:
    """When all is calm and drained: what was asked for again has come again."""
    history = world.history
    for name, times in history.again.items():
        if history.handled[name] <= times:
            raise Broken(
                f"{name} was not processed again after a reset, but {history.handled[name]} times in all"
            )
    if history.counts["grown"] and len(history.processed.get(MOVING_KEY, ())) != VERSIONS:
        raise Broken(
            f"of {MOVING_KEY}, which has moved, {history.processed.get(MOVING_KEY)} were processed"
        )


class Grower(Actor):
    """Sends the versions of a key, and lets the topic grow in between, so that the key
    has another partition then.
    """

    async def run(self) -> None:
        await self.peer.connect()
        self._producer = self.new_id()
        for version in range(1, VERSIONS + 1):
            if version == VERSIONS // 2 + 1:
                await self._grow()
            partitions = PARTITIONS if version <= VERSIONS // 2 else GROWN
            await self._send(version, partition_of(MOVING_KEY, partitions))

    async def _send(self, version: int, partition: int) -> None:
        history, body = (
            self.world.history,
            f"{MOVING_KEY}|{version}|{self._producer[:4].hex()}-{version}",
        )
        history.attempted.add(body)
        data = self.batch(self._producer, version - 1, (MOVING_KEY, body))
        reply = await self.insist(Opcode.SEND, h.send_header(TOPIC, partition, 0) + data)
        receipt = h.unpack_send_receipt(reply)
        history.acknowledged[body] = None if receipt.offset < 0 else (partition, receipt.offset)

    async def _grow(self) -> None:
        grow = encode_call("topic.grow", {"name": TOPIC, "partitions": GROWN})
        while True:
            try:
                await self.peer.request(Opcode.CALL, grow)
            except Lost:
                await self.peer.connect()
            except Conflict:  # transactions hold keys
                await self.peer.pause(0.05)
            else:
                break
        self.world.history.counts["grown"] += 1


class Resetter(Actor):
    """Lets groups go back, and notes what has to come again."""

    async def run(self, times: int) -> None:
        await self.peer.connect()
        while times:
            await self.peer.pause(0.2)
            try:
                await self._reset(self.rng.choice(list(GROUPS)))
            except Lost:
                await self.peer.connect()
            except LATER:
                continue
            else:
                times -= 1

    async def _reset(self, group: str) -> None:
        """To the first offset, or another one that is done with: nothing is skipped."""
        history, asked = self.world.history, {"group": group, "topic": TOPIC, "operator": "sim"}
        preview = await self.peer.call("group.reset", **asked, to="first", dry_run=True)
        partition, floor, *_rest = self.rng.choice(preview["positions"])
        to = self.rng.choice(("first", {str(partition): self.rng.randint(0, floor)}))
        seen, handled = dict(history.places), history.handled.copy()
        reply = await self.peer.call("group.reset", **asked, to=to)
        after = {number: offset for number, _before, offset, *_rest in reply["positions"]}
        for (number, offset), body in seen.items():
            if offset >= after.get(number, offset + 1):
                history.again[GROUPS[group] + body] = handled[GROUPS[group] + body]
        history.counts["resets"] += 1
        history.counts["resets in slices"] += reply["pending"]
