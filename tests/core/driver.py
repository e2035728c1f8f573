"""A driver of the pure core: its log is a list, its clock a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.batch import encode, verify
from txmq.broker.engine.log_reader import published_batches
from txmq.core import machine
from txmq.core.events import base as events
from txmq.core.events.base import RecordContext
from txmq.core.retention.outcome_expiry import ExpireOutcomes
from txmq.core.state.state import State
from txmq.core.topics.sends import StoreBatch
from txmq.core.transactions.half_storage import BundleBatch, StorePart
from txmq.core.transactions.large_publication import AdvanceBacklog, CheckedPieces
from txmq.errors import RequestRejected
from txmq.model.decider import ByBroker, Decider
from txmq.model.message import Message
from txmq.model.units import SECOND
from txmq.store.tables import MemoryTables

if TYPE_CHECKING:
    from collections.abc import Iterable

RECORD = 64  # positions need only grow


class Driver:
    """The core of a broker without disk, network and reactor."""

    def __init__(self) -> None:
        self.state = State(MemoryTables())
        self.log: list[tuple[RecordContext, events.Event]] = []
        self.bytes: dict[int, bytes] = {}
        self.now = 1_700_000_000 * SECOND
        self.end = RECORD
        self.sequences: dict[bytes, int] = {}
        self._checked: CheckedPieces | None = None

    def do(self, command: object) -> Any:
        """Submit a command, record and apply its events, and return the reply."""
        outcome = machine.decide(self.state, command, self.now)
        if isinstance(outcome, RequestRejected):
            return outcome
        attachment = outcome.attachment
        for event in outcome.events:
            self.record(event, attachment)
            attachment = b""
        return outcome.reply

    def record(self, event: events.Event, attachment: bytes = b"") -> None:
        context = RecordContext(
            self.end,
            self.end + RECORD + len(attachment),
            self.end + RECORD,
            self.now,
            self.state.boot_epoch,
        )
        self.end = context.end
        self.bytes[context.attachment_position] = attachment
        # apply what recovery will read, not the objects of the decision
        again = events.decode(events.KINDS[type(event)], events.encode(event))
        self.log.append((context, again))
        machine.apply(self.state, again, context)

    def advance(self) -> bool:
        """Do a step of the backlog. Return False if there was nothing to do."""
        before = len(self.log), self._checked
        reply = self.do(AdvanceBacklog(self.end, self._checked))
        self._checked = reply.checked
        return (len(self.log), self._checked) != before

    def work_off(self) -> int:
        """Do steps until the backlog is empty or waits. Return their number."""
        steps = 0
        while self.advance():
            steps += 1
        return steps

    def sweep(self, connected: frozenset[bytes] = frozenset()) -> int:
        """Expire outcomes. Return the number of steps."""
        command, steps = ExpireOutcomes(connected=connected), 0
        while command is not None:
            command, steps = self.do(command), steps + 1
        return steps

    def replayed(self) -> State:
        """Return the state after a recovery of the log."""
        state = State(MemoryTables())
        for context, event in self.log:
            machine.apply(state, event, context)
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
        reply = self.do(StoreBatch(topic, 0, partition, data, verify(data)))
        if not isinstance(reply, RequestRejected):
            self.sequences[producer] = sequence + len(bodies)
        return reply

    def store(
        self,
        token: bytes,
        sends: Iterable[tuple[str, int, str | None, str]],
        decider: Decider | None,
        **options: Any,
    ) -> Any:
        """Store a bundle of single messages (topic, partition, key, body)."""
        batches = []
        for place, (topic, partition, key, body) in enumerate(sends):
            data = encode(
                [Message(body.encode(), key)],
                producer_id=token,
                epoch=0,
                sequence=place,
                born_at=self.now,
            )
            batches.append(BundleBatch(topic, 0, partition, data, verify(data)))
        fields: dict[str, Any] = {
            "part": 0,
            "sealed": True,
            "commit": decider == ByBroker(),
            "digest": b"d" * 32,
            "epoch": 0,
            "service": "s",
        }
        fields |= {"actions": (), "check_after": 6 * SECOND} | options
        return self.do(StorePart(token=token, batches=tuple(batches), decider=decider, **fields))

    def bodies(self, topic: str, partition: int = 0) -> list[str]:
        """Return the visible bodies of a partition. Offsets must be contiguous."""
        from txmq.batch import BatchView

        topic_id = self.state.topics[topic].topic_id
        seen: list[str] = []
        for base, entry in published_batches(self.state, topic_id, partition, 0, self.end):
            assert base == len(seen)
            seen += [
                body.decode() for body in BatchView(self.read(entry.position, entry.length)).bodies
            ]
        return seen

    def read(self, position: int, length: int) -> bytes:
        start = max(p for p in self.bytes if p <= position)
        return self.bytes[start][position - start : position - start + length]


def token(core: Driver, number: int) -> bytes:
    """Return a token of the driver's time with this number."""
    return (core.now // 1_000).to_bytes(6, "big") + number.to_bytes(10, "big")
