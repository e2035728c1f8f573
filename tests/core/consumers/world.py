"""A broker's core with consumers: messages consist of their key, members fetch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tests.core.driver import Driver
from txmq.core import machine
from txmq.core.consumers.candidates import Candidate, FetchLimits
from txmq.core.consumers.commands import (
    AckMessages,
    AdvanceGroupWork,
    CandidateRead,
    Deliver,
    ExpireLeases,
    JoinGroup,
    NackMessage,
    RequestedSettings,
    ReturnMessages,
)
from txmq.core.consumers.fetch_choice import ChosenCandidates, choose_candidates
from txmq.core.events.base import Booted
from txmq.core.events.topics import BatchStored
from txmq.core.topics.topics import CreateTopic, DeleteTopic
from txmq.errors import RequestRejected
from txmq.model.retry import FailureReport, RetryPolicy
from txmq.model.units import SECOND
from txmq.store.tables import NAMES

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.state.state import State

BATCH = 100  # bytes
EVERYTHING = 1 << 40
QUICK = RetryPolicy((1, 2))  # two retries, after 1 and 2 s


class Received(NamedTuple):
    """A message that a member received."""

    topic: str
    partition: int
    offset: int
    attempt: int


class ConsumersWorld(Driver):
    """A core that is driven by commands and records its events on a list."""

    def __init__(self, **topics: int) -> None:
        super().__init__()
        self.keys: dict[tuple[int, int, int], int | None] = {}
        self.last_reply: Any = None
        self.accepted = set[int]()  # offsets of the last delivery that no filter may pass over
        for name, partitions in topics.items():
            self.do(CreateTopic(name, partitions))

    def publish(self, topic: str, *keys: int | None, partition: int = 0) -> None:
        """Publish one batch with a message for each key."""
        known = self.state.topics[topic]
        base = known.end_offsets[partition]
        for row, key in enumerate(keys):
            self.keys[known.topic_id, partition, base + row] = key
        sequence = sum(known.end_offsets)
        event = BatchStored(
            known.topic_id,
            partition,
            base,
            len(keys),
            BATCH,
            0,
            known.topic_id.to_bytes(16),
            0,
            sequence,
        )
        self.record(event)

    def delete_topic(self, name: str) -> None:
        """Delete a topic, with what groups have of it."""
        self.do(DeleteTopic(name))
        while self.do(AdvanceGroupWork()).more:
            pass

    def boot(self) -> None:
        self.record(Booted(self.state.boot_epoch + 1, "broker"))

    def group(self, name: str = "g") -> ConsumerGroup:
        return self.state.groups.by_name[name]

    def join(
        self, member: str, *topics: str, group: str = "g", mode: str = "concurrent", **wanted: Any
    ) -> Any:
        """Join as a process of its own; options of `JoinGroup` and `RequestedSettings`
        alike.
        """
        own = {
            name: wanted.pop(name)
            for name in ("instance", "held", "named", "static", "continued")
            if name in wanted
        }
        own.setdefault("instance", member)
        return self.do(
            JoinGroup(
                group,
                member,
                mode=mode,
                topics=topics or ("t",),
                wanted=RequestedSettings(**wanted),
                **own,
            )
        )

    def generation(self, group: str = "g") -> int:
        return self.state.groups.by_name[group].generation

    def read_candidates(self, candidates: tuple[Candidate, ...]) -> tuple[CandidateRead, ...]:
        """Read candidates as an engine does."""
        return tuple(
            CandidateRead(c, self._keys(c) if c.needs_keys else None)
            if c.wanted
            else CandidateRead(c, unwanted=True)
            for c in candidates
        )

    def _keys(self, c: Candidate) -> tuple[int | None, ...]:
        return tuple(self.keys[c.topic_id, c.partition, c.start + row] for row in range(c.rows))

    def choose(
        self,
        member: str,
        *,
        most: int = 1_000,
        size: int = EVERYTHING,
        durable: int | None = None,
        run: int = 0,
        without: tuple[str, ...] = (),
    ) -> Any:
        left_out = frozenset(self.state.topics[topic].topic_id for topic in without)
        durable = self.end if durable is None else durable
        return choose_candidates(
            self.state,
            "g",
            member,
            self.generation(),
            durable,
            FetchLimits(most, size, 0, run, left_out),
            self.now,
        )

    def fetch(
        self, member: str, group: str = "g", *, most: int = 1_000, generation: int | None = None
    ) -> Any:
        """Return the messages that the member gets, or a RequestRejected."""
        generation = self.generation(group) if generation is None else generation
        limits = FetchLimits(most, EVERYTHING)
        try:
            found = choose_candidates(
                self.state, group, member, generation, self.end, limits, self.now
            )
        except RequestRejected as refused:
            return refused
        return self.deliver(member, generation, found, group)

    def deliver(
        self, member: str, generation: int, found: ChosenCandidates, group: str = "g"
    ) -> Any:
        if not found.candidates and not found.fences_can_advance:
            return []
        picks = self.read_candidates(found.candidates)
        reply = self.last_reply = self.do(Deliver(group, member, generation, picks))
        if isinstance(reply, RequestRejected):
            return reply
        got, self.accepted = [], set()
        for pick, start, end, attempt, accepted in reply.deliveries:
            self.accepted |= set(range(start, end)) if accepted else set()
            name = self.state.topics_by_id[picks[pick].candidate.topic_id].name
            partition = picks[pick].candidate.partition
            got += [Received(name, partition, offset, attempt) for offset in range(start, end)]
        return self.fetch(member, group, generation=generation) if reply.again else got

    def expire(self) -> None:
        """Expire all leases."""
        self.now += 60 * SECOND
        self.do(ExpireLeases(self.now))

    def early(self, member: str, durable: int = 0) -> bool:
        """Return True if the member's next delivery may be answered before it is
        durable, when the log is `durable` up to there.
        """
        picks = self.read_candidates(self.choose(member).candidates)
        outcome = machine.decide(
            self.state, Deliver("g", member, self.generation(), picks, durable), self.now
        )
        assert not isinstance(outcome, RequestRejected)
        return outcome.early

    def offsets(self, member: str, **options: Any) -> list[int]:
        """Return the offsets that the member gets, whatever the partition."""
        return [message.offset for message in self.fetch(member, **options)]

    def ack(
        self,
        member: str,
        *ranges: tuple[int, int],
        topic: str = "t",
        partition: int = 0,
        filtered: tuple[tuple[int, int], ...] = (),
        **options: Any,
    ) -> Any:
        group, generation = self._who(options)
        done, passed = (
            tuple((topic, partition, *one) for one in some) for some in (ranges, filtered)
        )
        return self.do(AckMessages(group, member, generation, done, passed))

    def return_messages(
        self,
        member: str,
        *ranges: tuple[int, int],
        topic: str = "t",
        partition: int = 0,
        **options: Any,
    ) -> Any:
        group, generation = self._who(options)
        return self.do(
            ReturnMessages(
                group, member, generation, tuple((topic, partition, *one) for one in ranges)
            )
        )

    def nack(
        self, member: str, offset: int, *, topic: str = "t", partition: int = 0, **options: Any
    ) -> Any:
        group, generation = self._who(options)
        ref = (self.state.topics[topic].topic_id, partition, offset)
        options.setdefault("failure", FailureReport("E", "text", "print"))
        return self.do(
            NackMessage(
                group,
                member,
                generation,
                topic,
                partition,
                offset,
                self.keys.get(ref),
                **options,
            )
        )

    def _who(self, options: dict[str, Any]) -> tuple[str, int]:
        group = options.pop("group", "g")
        return group, options.pop("generation", None) or self.generation(group)

    def events(self, since: int = 0) -> list[Any]:
        """Return the recorded events from number `since` on."""
        return [event for _place, event in self.log[since:]]


def rows(state: State) -> dict[str, list[tuple[bytes, Any]]]:
    """Return all rows of all tables."""
    return {name: list(state.tables[name].range(b"")) for name in NAMES}
