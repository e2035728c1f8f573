"""Simulated operators: they replay dead letters, grow a topic and reset groups."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Iterator
from itertools import count
from typing import Any, TypeAlias

from twisted.internet.defer import Deferred

from tests.simulation.actors import PARTITIONS, TOPIC, Actor, partition_for
from tests.simulation.history import InvariantBroken
from tests.simulation.network import RequestLost
from tests.simulation.world import SimulatedWorld
from txmq.batch import BatchView
from txmq.broker.engine.log_reader import published_batches
from txmq.errors import Conflict, OffsetOutOfRange, RequestRejected, UnknownGroup, UnknownTopic
from txmq.model.keys import partition_of
from txmq.model.own_topics import AUDIT
from txmq.wire import data_requests as h
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode

Work: TypeAlias = Coroutine[Deferred[Any], Any, None]
EVERY = 40  # one of so many seeds grows the topic, one resets groups
GROWN = PARTITIONS + 1
MOVING_KEY = next(
    key for key in (f"g{n}" for n in count()) if partition_for(key) != partition_of(key, GROWN)
)
VERSIONS = 8  # of that key, half of them before it moves
GROUPS = {"c": "", "o": "o:"}  # and the prefix of their bodies in the history
NOT_NOW = (Conflict, UnknownGroup, UnknownTopic, OffsetOutOfRange)


def work_of_seed(world: SimulatedWorld, seed: int) -> Iterator[Work]:
    """Yield the work of the operators that only some seeds have.

    It draws no random numbers for the choice, so the other seeds stay the same.
    """
    if seed % EVERY == 0:
        yield TopicGrower(world, "g").run()
    if seed // 2 % EVERY == 0:
        yield GroupResetter(world, "z").run(2)


def check(world: SimulatedWorld) -> None:
    """Check at the end that messages came again after a reset, that a grown topic keeps
    the order of its keys, and that the audit topic has each replay that was made.
    """
    history = world.history
    found = audited_reasons(world)
    if len(found) != len(set(found)):
        raise InvariantBroken("the audit topic has an operator's call twice")
    made = {name for name, done in history.operations.items() if done}
    if made - set(found):
        raise InvariantBroken(f"the audit topic lacks {sorted(made - set(found))}")
    if set(found) - set(history.operations):
        raise InvariantBroken("the audit topic has what nobody has done")
    history.counts["audited"] += len(found)
    for name, times in history.times_before_reset.items():
        if history.handled[name] <= times:
            raise InvariantBroken(
                f"{name} was not processed again after a reset,"
                f" but {history.handled[name]} times in all"
            )
    processed = history.processed_versions.get(MOVING_KEY, [])
    if history.counts["grown"] and len(processed) != VERSIONS:
        raise InvariantBroken(
            f"only the versions {processed} of the moved key {MOVING_KEY} were processed"
        )


def audited_reasons(world: SimulatedWorld) -> list[str]:
    """Return the reasons of the replays in the audit topic."""
    assert world.broker is not None
    engine = world.broker.engine
    topic = engine.state.topics[AUDIT]
    entries = [
        json.loads(body)
        for _base, entry in published_batches(
            engine.state, topic.topic_id, 0, 0, engine.store.durable
        )
        for body in BatchView(engine.store.read(entry.position, entry.length)).bodies
    ]
    return [entry["reason"] for entry in entries if entry["call"] == "dlq.replay"]


class TopicGrower(Actor):
    """Send the versions of a key, and grow the topic between them, so that the key
    moves to another partition.
    """

    async def run(self) -> None:
        await self.connection.connect()
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
        reply = await self.request(Opcode.SEND, h.send_header(TOPIC, partition, 0) + data)
        receipt = h.unpack_send_receipt(reply)
        history.acknowledged[body] = None if receipt.offset < 0 else (partition, receipt.offset)

    async def _grow(self) -> None:
        grow = encode_call("topic.grow", {"name": TOPIC, "partitions": GROWN})
        while True:
            try:
                await self.connection.request(Opcode.CALL, grow)
            except RequestLost:
                await self.connection.connect()
            except Conflict:  # transactions hold keys
                await self.connection.pause(0.05)
            else:
                break
        self.world.history.counts["grown"] += 1


class GroupResetter(Actor):
    """Reset groups to earlier offsets, and note which messages must come again."""

    async def run(self, times: int) -> None:
        await self.connection.connect()
        while times:
            await self.connection.pause(0.2)
            try:
                await self._reset(self.rng.choice(list(GROUPS)))
            except RequestLost:
                await self.connection.connect()
            except NOT_NOW:
                continue
            else:
                times -= 1

    async def _reset(self, group: str) -> None:
        """Reset a group to its first offset, or to one below its floor, so that nothing
        is skipped.
        """
        history, asked = self.world.history, {"group": group, "topic": TOPIC, "operator": "sim"}
        preview = await self.connection.call("group.reset", **asked, to="first", dry_run=True)
        partition, floor, *_rest = self.rng.choice(preview["positions"])
        to = self.rng.choice(("first", {str(partition): self.rng.randint(0, floor)}))
        seen, handled = dict(history.bodies_at), history.handled.copy()
        reply = await self.connection.call("group.reset", **asked, to=to)
        after = {number: offset for number, _before, offset, *_rest in reply["positions"]}
        for (number, offset), body in seen.items():
            if offset >= after.get(number, offset + 1):
                history.times_before_reset[GROUPS[group] + body] = handled[GROUPS[group] + body]
        history.counts["resets"] += 1
        history.counts["resets in steps"] += reply["pending"]


class LetterReplayer(Actor):
    """Replay the dead letters of both groups."""

    async def run(self) -> None:
        while not self.world.over:
            try:
                await self.connection.connect()
                while not self.world.over:
                    await self.connection.pause(0.12)
                    for group in sorted(self.world.consumer_groups):
                        await self._replay(group)
            except (RequestLost, RequestRejected):
                self.connection.drop()
                await self.connection.pause(0.05)

    async def _replay(self, group: str) -> None:
        letters = (await self.connection.call("dlq.list", group=group))["letters"]
        places = [[letter["topic"], letter["partition"], letter["offset"]] for letter in letters]
        if places:
            self.world.history.counts["letters"] += len(places)
            operations = self.world.history.operations
            name = f"replay {len(operations)}"
            operations[name] = False  # its reply may be lost
            reply = await self.connection.call(
                "dlq.replay", group=group, letters=places, operator="sim", reason=name
            )
            if reply["done"]:
                operations[name] = True
            else:
                operations[name + " of nothing"] = operations.pop(name)
