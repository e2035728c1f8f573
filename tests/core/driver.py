"""Drives the pure core: a log that is a list, a clock that is a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.batch import encode, verify
from txmq.broker.log_reader import published
from txmq.core import machine
from txmq.core.events import base as events
from txmq.core.events.base import Place
from txmq.core.retention.outcome_expiry import Sweep
from txmq.core.state.state import Rejected, State
from txmq.core.topics.sends import Send
from txmq.core.transactions.half_storage import GroupBatch, StorePart
from txmq.core.transactions.large_publication import Advance, Progress
from txmq.model.message import Message
from txmq.store.tables import MemoryTables

if TYPE_CHECKING:
    from collections.abc import Iterable

SECOND = 1_000_000
RECORD = 64  # positions need only grow


class Driver:
    """A broker's core with everything around it left out."""

    def __init__(self) -> None:
        self.state = State(MemoryTables())
        self.log: list[tuple[Place, events.Event]] = []
        self.bytes: dict[int, bytes] = {}
        self.now = 1_700_000_000 * SECOND
        self.end = RECORD
        self.sequences: dict[bytes, int] = {}
        self._checked: Progress | None = None

    def do(self, command: object) -> Any:
        """The reply to a command, its events recorded and applied."""
        outcome = machine.decide(self.state, command, self.now)
        if isinstance(outcome, Rejected):
            return outcome
        attachment = outcome.attachment
        for event in outcome.events:
            self.record(event, attachment)
            attachment = b""
        return outcome.reply

    def record(self, event: events.Event, attachment: bytes = b"") -> None:
        place = Place(
            self.end,
            self.end + RECORD + len(attachment),
            self.end + RECORD,
            self.now,
            self.state.boot_epoch,
        )
        self.end = place.end
        self.bytes[place.attachment] = attachment
        again = events.decode(
            events.KINDS[type(event)], events.encode(event)
        )  # what recovery will see, not what we hold
        self.log.append((place, again))
        machine.apply(self.state, again, place)

    def advance(self) -> bool:
        """One step of the backlog; False = there is nothing to do."""
        before = len(self.log), self._checked
        reply = self.do(Advance(self.end, self._checked))
        self._checked = reply.checked
        return (len(self.log), self._checked) != before

    def work_off(self) -> int:
        """Step by step until the backlog is empty, or waits; returns how many steps it
        took.
        """
        steps = 0
        while self.advance():
            steps += 1
        return steps

    def sweep(self, connected: frozenset[bytes] = frozenset()) -> int:
        """Forget what is older than it is kept; returns in how many steps."""
        command, steps = Sweep(connected=connected), 0
        while command is not None:
            command, steps = self.do(command), steps + 1
        return steps

    def replayed(self) -> State:
        """The state that recovery makes of the log."""
        state = State(MemoryTables())
        for place, event in self.log:
            machine.apply(state, event, place)
        return state

    def send(
        self,
        topic: str,
        *bodies: str,
        key: str | None = None,
        partition: int = 0,
        producer: bytes = b"p" * 16,
    ) -> Any:
        sequence = self.sequences.get(producer, 0)
        data = encode(
            [Message(b.encode(), key) for b in bodies],
            producer_id=producer,
            epoch=0,
            sequence=sequence,
            born_at=self.now,
        )
        reply = self.do(Send(topic, 0, partition, data, verify(data)))
        if not isinstance(reply, Rejected):
            self.sequences[producer] = sequence + len(bodies)
        return reply

    def store(
        self,
        token: bytes,
        sends: Iterable[tuple[str, int, str | None, str]],
        decider: tuple[object, ...],
        **options: Any,
    ) -> Any:
        """Store a group of single messages (topic, partition, key, body)."""
        batches = []
        for place, (topic, partition, key, body) in enumerate(sends):
            data = encode(
                [Message(body.encode(), key)],
                producer_id=token,
                epoch=0,
                sequence=place,
                born_at=self.now,
            )
            batches.append(GroupBatch(topic, 0, partition, data, verify(data)))
        fields: dict[str, Any] = {
            "part": 0,
            "sealed": True,
            "commit": decider == ("local",),
            "digest": b"d" * 32,
            "epoch": 0,
            "service": "s",
        }
        fields |= {"actions": (), "check_after": 6 * SECOND} | options
        return self.do(StorePart(token=token, batches=tuple(batches), decider=decider, **fields))

    def bodies(self, topic: str, partition: int = 0) -> list[str]:
        """What a reader of the partition sees, in order; offsets must be contiguous
        from 0.
        """
        from txmq.batch import BatchView

        topic_id = self.state.topics[topic].topic_id
        seen: list[str] = []
        for base, entry in published(self.state, topic_id, partition, 0, self.end):
            assert base == len(seen)
            seen += [
                body.decode() for body in BatchView(self.read(entry.position, entry.length)).bodies
            ]
        return seen

    def read(self, position: int, length: int) -> bytes:
        start = max(p for p in self.bytes if p <= position)
        return self.bytes[start][position - start : position - start + length]


def token(core: Driver, number: int) -> bytes:
    """The token of that number, made at the driver's time."""
    return (core.now // 1_000).to_bytes(6, "big") + number.to_bytes(10, "big")
