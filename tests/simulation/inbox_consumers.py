"""Members of a group with an inbox, and an operator who resets, skips, reprocesses and
deletes the group while they run, and restores the inbox's database.

The inbox is in memory: claims and effects are made in one step, as in a transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from twisted.internet.defer import Deferred

from tests.simulation.actors import TOPIC, Actor, Changes
from tests.simulation.history import InvariantBroken
from tests.simulation.network import RequestLost
from tests.simulation.world import SimulatedWorld
from txmq.client.protocol.awaited.inbox_opening import cut, epoch_parts, lacking
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.member import Member, MemberPhase
from txmq.client.protocol.consumer.operations import Operations
from txmq.client.protocol.consumer.requests import Request
from txmq.client.protocol.consumer.settings import consumer_settings
from txmq.core.state.ranges import RangeMap
from txmq.core.state.restores import epoch_of
from txmq.core.state.state import State
from txmq.errors import RequestRejected, TxmqError
from txmq.model.topic_partition import TopicPartition

SHARE = 0.3  # of the seeds have them
GROUP = "i"
MEMBERS = ("i0", "i1")
OPERATIONS = 6
HANDLER_S, STEP_S, REOPEN_S = 0.01, 0.003, 0.4
Place = tuple[int, int]  # partition, offset
Position = tuple[int, int, int]  # topic id, partition, epoch


@dataclass
class SimulatedInbox:
    """A database with an inbox, and what operators have asked for.

    `required_from`: from there on, each message needs an effect in its partition's
    epoch. `skipped`: offsets below are skipped from a generation on. `again`: offsets
    from which on a partition was processed once more. `epochs_deleted`: the epochs in
    which messages had taken effect when the group was deleted.
    """

    applied: dict[Position, set[int]] = field(default_factory=dict)
    effects: Counter[Place] = field(default_factory=Counter)
    ever: set[Place] = field(default_factory=set)
    log: list[tuple[Position, int]] = field(default_factory=list)
    opened: dict[Position, float] = field(default_factory=dict)
    restored_at: float = -1.0
    required_from: Counter[int] = field(default_factory=Counter)
    skipped: dict[int, tuple[int, int]] = field(default_factory=dict)
    again: list[dict[int, int]] = field(default_factory=list)
    epochs_deleted: dict[Place, int] = field(default_factory=dict)
    closed: bool = False  # members leave, and join no more, while the group is deleted

    def apply(self, position: Position, message: DeliveredMessage) -> bool:
        """Claim a message and take its effect; return False for a duplicate."""
        partition, offset = place = (message.partition, message.offset)
        claimed = self.applied.setdefault(position, set())
        if offset in claimed:
            return False
        generation, end = self.skipped.get(partition, (0, 0))
        skipped = offset < end and message.fetched.generation >= generation
        if skipped and place not in self.ever and not message.fetched.moved:
            raise InvariantBroken(f"{place} was skipped, and takes effect after all")
        if position[2] < self.epochs_deleted.get(place, 0):
            raise InvariantBroken(f"{place} takes effect in epoch {position[2]} of a deleted group")
        claimed.add(offset)
        self.log.append((position, offset))
        self.ever.add(place)
        self.effects[place] += 1
        most = 1 + sum(offset >= asked.get(partition, offset + 1) for asked in self.again)
        if self.effects[place] > most:
            raise InvariantBroken(f"{place} has {self.effects[place]} effects, not {most}")
        return True

    def restore(self, lost: int, now: float) -> None:
        """Go back to before the last so many effects."""
        for position, offset in self.log[len(self.log) - lost :]:
            self.applied[position].discard(offset)
            self.effects[position[1], offset] -= 1
        del self.log[len(self.log) - lost :]
        self.opened.clear()
        self.restored_at = now

    def group_deleted(self) -> None:
        """Note that members join a group anew, which opens the inbox anew."""
        self.opened.clear()
        for (_topic, partition, epoch), offsets in sorted(self.applied.items()):
            self.epochs_deleted |= dict.fromkeys(((partition, one) for one in offsets), epoch)

    def ranges(self, position: Position) -> list[tuple[int, int]]:
        applied = sorted(self.applied.get(position, ()))
        ranges: RangeMap[None] = RangeMap((offset, offset + 1, None) for offset in applied)
        return [item[:2] for item in ranges]

    def unopened(self, state: State) -> int:
        """Return how many partitions were not compared since the last restore."""
        group = state.groups.by_name.get(GROUP)
        if group is None:
            return 1
        return sum(
            self.opened.get((*tp, epoch_of(state, group, tp)), -1.0) <= self.restored_at + REOPEN_S
            for tp in group.positions
        )

    def check(self, state: State) -> None:
        """Check at the end that no effect is missing."""
        group = state.groups.by_name[GROUP]
        topic = state.topics[TOPIC]
        for partition, end in enumerate(topic.end_offsets):
            tp = TopicPartition(topic.topic_id, partition)
            applied = self.applied.get((*tp, epoch_of(state, group, tp)), set())
            missing = set(range(self.required_from[partition], end)) - applied
            if missing:
                raise InvariantBroken(f"{partition}/{sorted(missing)[:5]} have no effect")


class InboxConsumer(Actor):
    """A member, one after the other: each leaves after a while."""

    def __init__(self, world: SimulatedWorld, name: str, inbox: SimulatedInbox) -> None:
        super().__init__(world, name)
        self._inbox = inbox
        self._changes = Changes(world.clock, self.rng, STEP_S)
        self._join()

    def _join(self) -> None:
        settings = consumer_settings(GROUP, [TOPIC], member=self.name, lease=1.0, session=1.0)
        self._member = Member(settings, self.new_id().hex())
        self._operations = Operations(self._member)
        self._leaves_at = self._now() + self.rng.uniform(0.1, 0.6)

    def _now(self) -> float:
        return self.world.clock.seconds()

    async def run(self) -> None:
        Deferred.fromCoroutine(self._handle_all()).addErrback(self.world.failed)
        while not self.world.over:
            await self.connection.connect()
            self._member.connected(self._now())
            await self._converse()
            self._member.disconnected(self._now())
            if self._member.phase is MemberPhase.GONE:
                await self.connection.pause(0.02)
                while self._inbox.closed:
                    await self.connection.pause(STEP_S)
                self._join()

    async def _converse(self) -> None:
        member = self._member
        while self.connection.transport is not None and not self.world.over:
            if member.failure is not None:
                raise member.failure
            if member.needs_reconnect or member.phase is MemberPhase.GONE:
                self.connection.drop()
                return
            over = self.world.trouble and self._now() > self._leaves_at
            if (over or self._inbox.closed) and not member.closing:
                member.leave()
            for request in member.requests(self._now()):
                Deferred.fromCoroutine(self._send(request)).addErrback(self.world.failed)
            await self._changes.wait(member.wake_at())

    async def _send(self, request: Request) -> None:
        try:
            payload = await self.connection.request(
                request.opcode, request.payload, request.timeout_s
            )
        except RequestLost:
            pass
        except RequestRejected as error:
            request.refused(error, self._now())
        else:
            request.reply(payload, self._now())
        self._changes.note()

    async def _handle_all(self) -> None:
        while not self.world.over:
            try:
                await self._open_assigned()
            except (RequestLost, TxmqError):
                await self.connection.pause(STEP_S)
                continue
            operations = self._operations
            message = operations.receive(self._now())
            if message is None:
                await self._changes.wait()
            else:
                await self._handle(operations, message)
                self._changes.note()

    async def _handle(self, operations: Operations, message: DeliveredMessage) -> None:
        fetched = message.fetched
        assert fetched.epoch_at is not None, "a member fetched it"
        position = (fetched.topic_id, fetched.partition, fetched.epoch_at(message.offset))
        await self.connection.pause(HANDLER_S)
        if not message.in_hand:
            return
        if position not in self._inbox.opened:
            operations.give_back(message, self._now())
            return
        self.world.history.counts["duplicates"] += not self._inbox.apply(position, message)
        operations.ack(message, self._now())

    async def _open_assigned(self) -> None:
        membership = self._member.membership
        for name in sorted(self._member.assignment) if membership is not None else ():
            identities = membership.identities  # type: ignore[union-attr]
            for epoch in identities.epochs_of(name):
                position = (identities.topics[name[0]], name[1], epoch)
                opened = self._inbox.opened.get(position, -1.0)
                if self._now() - opened > REOPEN_S:
                    await self._open(self._member.group, position)

    async def _open(self, group: str, position: Position) -> None:
        began, restored_at = self._now(), self._inbox.restored_at
        at = {
            "group": group,
            "topic": TOPIC,
            "topic_id": position[0],
            "partition": position[1],
        }
        shown = await self.connection.call("inbox.show", **at)
        if shown["epoch"] != position[2]:
            if position[2] in shown["older"]:
                self._inbox.opened[position] = began
            return
        ranges = [
            item
            for epoch, start, end in epoch_parts(shown)
            for item in cut(self._inbox.ranges((*position[:2], epoch)), start, end)
        ]
        if shown["base"] is None:
            await self.connection.call("inbox.open", **at, applied=ranges)
        elif ranges_lacking := lacking(shown, ranges):
            reply = await self.connection.call("inbox.restore", **at, ranges=ranges_lacking)
            self.world.history.counts["effects restored"] += reply["restored"]
        if self._inbox.restored_at == restored_at:
            self._inbox.opened[position] = began


class InboxOperator(Actor):
    """An operator of the group and of its database."""

    def __init__(self, world: SimulatedWorld, name: str, inbox: SimulatedInbox) -> None:
        super().__init__(world, name)
        self._inbox = inbox

    async def run(self) -> None:
        await self.connection.connect()
        for _ in range(OPERATIONS):
            await self.connection.pause(self.rng.uniform(0.02, 0.15))
            await self.rng.choice((self._skip, self._again, self._back, self._delete, self._lose))()

    async def _lose(self) -> None:
        self._inbox.restore(self.rng.randint(0, len(self._inbox.log)), self._now())
        self.world.history.counts["inboxes restored"] += 1

    def _now(self) -> float:
        return self.world.clock.seconds()

    async def _until_done(
        self, name: str, *, note: Callable[[], None] | None = None, **args: object
    ) -> dict[str, object] | None:
        """Return the reply; None where the group is not there. `note` is called at each
        attempt: those whose answers are lost may have been carried out.
        """
        while True:
            if note is not None:
                note()
            try:
                return dict(await self.connection.call(name, group=GROUP, operator="sim", **args))
            except RequestLost:
                await self.connection.connect()
            except RequestRejected:
                return None

    async def _target(self) -> tuple[int, int] | None:
        """Return a partition and an offset in it."""
        shown = await self._until_done("group.reset", topic=TOPIC, to="last", dry_run=True)
        if shown is None:
            return None
        rows: list[list[int]] = shown["positions"]  # type: ignore[assignment]
        partition, _before, end, *_rest = self.rng.choice(rows)
        return partition, self.rng.randint(0, end)

    async def _reset(
        self, target: tuple[int, int], *, note: Callable[[], None] | None = None, **args: object
    ) -> bool:
        partition, offset = target
        self._inbox.skipped.pop(partition, None)
        to = {str(partition): offset}
        reply = await self._until_done("group.reset", topic=TOPIC, to=to, note=note, **args)
        return reply is not None

    async def _skip(self) -> None:
        target = await self._target()
        if target is None or not await self._reset(target):
            return
        partition, offset = target
        required = self._inbox.required_from
        required[partition] = max(required[partition], offset)
        if required[partition] > offset:
            return
        try:
            shown = await self.connection.call("group.show", group=GROUP)
        except (RequestLost, RequestRejected):
            return
        self._inbox.skipped[partition] = (int(shown["generation"]), offset)
        self.world.history.counts["skips"] += 1

    async def _back(self) -> None:
        target = await self._target()
        if target is not None and await self._reset(target):
            self._inbox.required_from[target[0]] = max(
                target[1], self._inbox.required_from[target[0]]
            )

    async def _again(self) -> None:
        target = await self._target()
        if target is None:
            return
        note = partial(self._inbox.again.append, dict([target]))
        if await self._reset(target, note=note, reprocess=True):
            self._inbox.required_from[target[0]] = target[1]
            self.world.history.counts["reprocesses"] += 1

    async def _delete(self) -> None:
        self._inbox.closed = True
        for _ in range(20):
            self._inbox.skipped.clear()
            if await self._until_done("group.delete") is not None:
                self.world.history.counts["groups deleted"] += 1
                self._inbox.group_deleted()
                break
            await self.connection.pause(0.02)
        self._inbox.closed = False
