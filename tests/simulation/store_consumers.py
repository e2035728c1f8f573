"""Members of an ordered group with local stores and an inbox. Their processes die, at
any change of their disks and elsewhere, and some disks are lost with them; an operator
adopts the stores of those.

The store on disk is a model of `txmq.recover.local`, whose own tests cut the
power. All above it is the client's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any
from uuid import UUID

from twisted.internet.defer import Deferred

from tests.simulation.actors import TOPIC, Actor
from tests.simulation.history import InvariantBroken
from tests.simulation.network import RequestLost
from tests.simulation.world import SimulatedWorld
from txmq.client.blocking.consumer.local_stores import LocalStores
from txmq.client.protocol.consumer.fetched import DeliveredMessage
from txmq.client.protocol.consumer.member import Member
from txmq.client.protocol.consumer.operations import Operations
from txmq.client.protocol.consumer.requests import Request
from txmq.client.protocol.consumer.settings import consumer_settings
from txmq.client.protocol.consumer.store_jobs import JobResult, StoredPut, StoreName
from txmq.client.protocol.consumer.stored_delivery import stored_delivery
from txmq.errors import NotLeased, RequestRejected
from txmq.model.retry import FailureReport, RetryPolicy
from txmq.recover.local import Change, Entry, Place, State, StoredMessage, StoreStats

SHARE = 0.05  # of the seeds have them
GROUP = "l"
MEMBERS = ("l0", "l1")
HANDLERS = 2  # of each member
HANDLER_S, STEP_S, DISK_S, ADOPT_S = 0.01, 0.003, 0.002, 0.05
LOG_ID = UUID(int=1)


class ProcessKilled(BaseException):
    """The process dies here."""


@dataclass(slots=True)
class StoredRow:
    """A message in the model of a store."""

    message: StoredMessage
    entry: Entry


@dataclass
class ModelDisk:
    """A disk with one store. `rows` are what its process sees, `durable` is what is
    left when that dies, at the latest after `changes_left` changes.
    """

    id: UUID
    rng: Random
    durable: dict[Place, StoredRow] = field(default_factory=dict)
    rows: dict[Place, StoredRow] = field(default_factory=dict)
    begun: dict[Place, int] = field(default_factory=dict)
    marks: dict[Place, tuple[int, bool]] = field(default_factory=dict)  # attempt, begun
    changes_left: int = 1 << 30

    def crash(self) -> None:
        self.rows, self.changes_left = dict(self.durable), 1 << 30

    def sync(self) -> None:
        """Make all changes durable. Raises ProcessKilled before or after."""
        self.changes_left -= 1
        if not self.changes_left and self.rng.random() < 0.5:
            raise ProcessKilled
        self.durable = dict(self.rows)
        if self.changes_left <= 0:
            raise ProcessKilled


class ModelStore:
    """The model of a `LocalStore` in an ordered group, on a disk."""

    def __init__(self, disk: ModelDisk) -> None:
        self._disk, self.id = disk, disk.id
        self._handed = set[Place]()

    def put(self, messages: Sequence[StoredPut]) -> None:
        for message, due, failure in messages:
            place, attempt = message.place, message.attempt
            entry = Entry(place, message.key, State.STORED, attempt, due, failure, 1, told=False)
            entry = entry._replace(generation=message.generation, epoch=message.epoch)
            self._disk.rows[place] = StoredRow(message, entry)
            self._disk.begun.pop(place, None)
        self._disk.sync()

    def record(self, changes: Sequence[Change]) -> None:
        for place, state, attempt, due, failure in changes:
            row = self._disk.rows.get(place)
            self._handed.discard(place)
            if row is None or row.entry.state is not State.STORED:
                continue
            entry = row.entry._replace(state=state, attempt=attempt, due=due, told=False)
            if failure != FailureReport():
                entry = entry._replace(failure=failure)
            message = row.message._replace(attempt=attempt)
            self._disk.rows[place] = StoredRow(message, entry)
        self._disk.sync()

    def forget(self, places: Iterable[Place]) -> None:
        for place in places:
            self._disk.rows.pop(place, None)
            self._handed.discard(place)

    def quarantine(self, places: Sequence[Place], _reason: str) -> int:
        self.forget(places)
        return len(places)

    def told(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            row = self._disk.rows.get(entry.place)
            if row is not None and row.entry == entry:
                self._disk.rows[entry.place] = StoredRow(row.message, entry._replace(told=True))

    def due(self, now: int, most: int) -> list[StoredMessage]:
        found = [
            row.message
            for row in self._heads()
            if row.entry.due <= now and row.message.place not in self._handed
        ][:most]
        self._handed |= {message.place for message in found}
        return found

    def _heads(self) -> list[StoredRow]:
        heads: dict[str | None, StoredRow] = {}
        for row in self._disk.rows.values():
            if row.entry.state is not State.ACKED:
                heads.setdefault(row.message.key, row)
        return [row for row in heads.values() if row.entry.state is State.STORED]

    def release(self, place: Place) -> None:
        self._handed.discard(place)

    def next_due(self) -> int | None:
        dues = (row.entry.due for row in self._heads() if row.message.place not in self._handed)
        return min(dues, default=None)

    def untold(self, most: int) -> list[Entry]:
        return [row.entry for row in self._disk.rows.values() if not row.entry.told][:most]

    def entries(self, after: Place | None, most: int) -> list[Entry]:
        found = sorted(place for place in self._disk.rows if after is None or place > after)
        return [self._disk.rows[place].entry for place in found[:most]]

    def entry(self, place: Place) -> Entry | None:
        row = self._disk.rows.get(place)
        return None if row is None else row.entry

    def stats(self) -> StoreStats:
        count = sum(row.entry.state is State.STORED for row in self._disk.rows.values())
        return StoreStats(
            messages=count,
            bytes=0,
            oldest=0,
            attempts=0,
            full=False,
            settled=0,
            disk_bytes=0,
            disk_full=False,
            damaged=0,
        )

    def close(self) -> None: ...


class ModelMarks:
    """The model of `HandedOut`: what a process has written outlives it."""

    def __init__(self, disk: ModelDisk) -> None:
        self._disk = disk
        self.not_begun = tuple(
            (place, attempt) for place, (attempt, begun) in disk.marks.items() if not begun
        )
        disk.marks.clear()

    def hand_out(self, place: Place, attempt: int) -> ModelMark:
        self._disk.marks[place] = (attempt, False)
        return ModelMark(self._disk, place)

    def end(self, place: Place) -> None:
        self._disk.marks.pop(place, None)


@dataclass
class ModelMark:
    """The mark of one attempt."""

    disk: ModelDisk
    place: Place

    def begin(self) -> None:
        attempt, _begun = self.disk.marks[self.place]
        self.disk.marks[self.place] = (attempt, True)


class ModelStores(LocalStores):
    """The stores of a member on a model of its disk."""

    def __init__(self, member: Member, disk: ModelDisk, now: Any) -> None:
        super().__init__(member.settings, lambda: LOG_ID, now)
        self._disk = disk

    def _open(self, name: StoreName, result: JobResult) -> None:
        del result
        store, marks = ModelStore(self._disk), ModelMarks(self._disk)
        self._serve(name.topic, store, marks)  # type: ignore[arg-type]  # models


@dataclass
class EffectsOfStores:
    """The inbox of the group, and the stores whose disks are lost."""

    applied: set[tuple[int, int]] = field(default_factory=set)
    last: dict[tuple[str, int], int] = field(default_factory=dict)  # key, partition → offset
    lost: set[str] = field(default_factory=set)


class StoreConsumer(Actor):
    """A member in one process after the other. `MEMBERS` share the effects.

    `acks_first`: for a planted bug.
    """

    acks_first = False

    def __init__(self, world: SimulatedWorld, name: str, effects: EffectsOfStores) -> None:
        super().__init__(world, name)
        self._effects = effects
        self._process = 0
        self._disk = self._new_disk()
        world.consumer_groups[GROUP] = TOPIC
        self._begin()

    def _new_disk(self) -> ModelDisk:
        return ModelDisk(UUID(bytes=self.new_id()), self.rng)

    def _begin(self) -> None:
        """Start a process."""
        settings = consumer_settings(
            GROUP,
            [TOPIC],
            mode="ordered",
            member=self.name,
            retry=RetryPolicy((0.02, 0.04), retries=8),
            lease=1.0,
            session=1.0,
            on_failure=self.rng.choice(("local", "local", "broker")),
            local_store="model",
        )
        self._member = Member(settings, self.new_id().hex(), wall_us=self.world.now)
        self._operations = Operations(self._member)
        self._stores = ModelStores(self._member, self._disk, self.world.now)
        if self.world.trouble and self.rng.random() < 0.7:
            self._disk.changes_left = self.rng.randint(1, 12)
        self._process += 1
        for work in (self._work_at_disk, self._handle_all, self._handle_all):
            Deferred.fromCoroutine(work(self._process)).addErrback(self.world.failed)

    def _now(self) -> float:
        return self.world.clock.seconds()

    def _kill(self) -> None:
        """End the process; its disk may be lost with it."""
        self._process += 1
        self.connection.drop()
        self._disk.crash()
        self.world.history.counts["stores killed"] += 1
        if self.rng.random() < 0.2:
            self._effects.lost.add(self._disk.id.hex)
            self._disk = self._new_disk()
            self.world.history.counts["stores lost"] += 1

    async def run(self) -> None:
        while not self.world.over:
            process = self._process
            await self.connection.connect()
            if process == self._process:
                self._member.connected(self._now())
                await self._converse(process)
            if process == self._process:
                self._member.disconnected(self._now())
            else:
                await self.connection.pause(0.02)
                self._begin()

    async def _converse(self, process: int) -> None:
        while self.connection.transport is not None and not self.world.over:
            if process != self._process:
                return
            if self._member.failure is not None:
                raise self._member.failure
            if self._member.needs_reconnect:
                self.connection.drop()
                return
            for request in self._member.requests(self._now()):
                send = self._send(process, request)
                Deferred.fromCoroutine(send).addErrback(self.world.failed)
            await self.connection.pause(STEP_S)

    async def _send(self, process: int, request: Request) -> None:
        try:
            payload = await self.connection.request(
                request.opcode, request.payload, request.timeout_s
            )
        except RequestLost:
            return
        except RequestRejected as error:
            if process == self._process:
                request.refused(error, self._now())
        else:
            if process == self._process:
                request.reply(payload, self._now())

    async def _work_at_disk(self, process: int) -> None:
        recovery = self._member.recovery
        assert recovery is not None
        while process == self._process and not self.world.over:
            recovery.tick(self._now())
            for job in recovery.jobs(self._now()):
                await self.connection.pause(DISK_S)
                if process != self._process:
                    return
                try:
                    result = self._stores.perform(job)
                except ProcessKilled:
                    self._kill()
                    return
                self.world.history.counts["stored"] += len(job.puts)
                await self.connection.pause(DISK_S)
                if process != self._process:
                    return
                recovery.finished(result, self._now())
            await self.connection.pause(STEP_S)

    async def _handle_all(self, process: int) -> None:
        while process == self._process and not self.world.over:
            message = self._operations.receive(self._now())
            if message is None:
                await self.connection.pause(STEP_S)
                continue
            self._check_attempt(message)
            if self.acks_first:
                self._operations.ack(message, self._now())
            await self.connection.pause(HANDLER_S)
            if process == self._process:
                self._handle(message)

    def _check_attempt(self, message: DeliveredMessage) -> None:
        stored = stored_delivery(message)
        if stored is None:
            return
        self.world.history.counts["stored retried"] += 1
        before = self._disk.begun.get(stored.place, 0)
        if message.attempt <= before:
            raise InvariantBroken(f"attempt {message.attempt} at {stored.place} after {before}")
        self._disk.begun[stored.place] = message.attempt

    def _handle(self, message: DeliveredMessage) -> None:
        body = message.body.decode()
        if self.fails(GROUP, body):
            with suppress(NotLeased):
                self._operations.nack(message, None, "failed")
            return
        if not message.in_hand and not self.acks_first:  # the transaction is rolled back
            return
        self._commit(message, body)
        if self.world.trouble and self.rng.random() < 0.03:
            self._kill()
        else:
            self._operations.ack(message, self._now())

    def _commit(self, message: DeliveredMessage, body: str) -> None:
        """Take effect once, as a transaction with an inbox does."""
        history, effects = self.world.history, self._effects
        place = (message.partition, message.offset)
        if place in effects.applied:
            history.counts["stored duplicates"] += 1
            return
        effects.applied.add(place)
        key, version, _rest = body.split("|")
        if int(version):
            history.record_processed(f"{GROUP}:{key}", int(version))
        last = effects.last.setdefault((key, message.partition), -1)
        if message.offset < last:
            raise InvariantBroken(f"{place} of key {key} takes effect after {last}")
        effects.last[key, message.partition] = message.offset
        history.handled[f"{GROUP}:{body}"] += 1


class StoreOperator(Actor):
    """An operator who adopts the stores of lost disks."""

    def __init__(self, world: SimulatedWorld, name: str, effects: EffectsOfStores) -> None:
        super().__init__(world, name)
        self._effects = effects

    async def run(self) -> None:
        await self.connection.connect()
        while not self.world.over:
            await self.connection.pause(ADOPT_S)
            try:
                await self._adopt_lost()
            except RequestLost:
                await self.connection.connect()
            except RequestRejected:
                continue

    async def _adopt_lost(self) -> None:
        listed = await self.connection.call("recover.list", group=GROUP)
        for store in listed["stores"]:
            if store["store"] in self._effects.lost:
                await self.connection.call(
                    "recover.adopt", group=GROUP, store=store["store"], force=True, operator="sim"
                )
                self.world.history.counts["stores adopted"] += 1
