"""A broker's core with consumers around it: topics of messages that are nothing but a
key, members that fetch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tests.core.driver import SECOND, Driver
from txmq.core import machine
from txmq.core.consumers.candidates import Candidate, Wish
from txmq.core.consumers.commands import (
    Ack,
    Deliver,
    ExpireLeases,
    Failure,
    Join,
    Nack,
    Pick,
    Return,
    Wanted,
)
from txmq.core.consumers.planning import Plan, plan
from txmq.core.events.base import BatchStored, Booted
from txmq.core.state.state import Rejected
from txmq.core.topics.topics import CreateTopic
from txmq.model.retry import RetryPolicy
from txmq.store.tables import NAMES

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import Group
    from txmq.core.state.state import State

BATCH = 100  # bytes
EVERYTHING = 1 << 40
QUICK = RetryPolicy((1_000_000, 2_000_000))  # two retries, after 1 and 2 s


class Got(NamedTuple):
    """A message that a member got."""

    topic: str
    partition: int
    offset: int
    attempt: int


class World(Driver):
    """Commands in, events on a list."""

    def __init__(self, **topics: int) -> None:
        super().__init__()
        self.keys: dict[tuple[int, int, int], int | None] = {}
        self.last_reply: Any = None
        for name, partitions in topics.items():
            self.do(CreateTopic(name, partitions))

    def publish(self, topic: str, *keys: int | None, partition: int = 0) -> None:
        """One batch, a message a key."""
        known = self.state.topics[topic]
        base = known.ends[partition]
        for row, key in enumerate(keys):
            self.keys[known.topic_id, partition, base + row] = key
        sequence = sum(known.ends)
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

    def boot(self) -> None:
        self.record(Booted(self.state.boot_epoch + 1, "broker"))

    def group(self, name: str = "g") -> Group:
        return self.state.consumers.groups[name]

    def join(
        self, member: str, *topics: str, group: str = "g", mode: str = "concurrent", **wanted: Any
    ) -> Any:
        """Join as a process of its own; options of `Join` and `Wanted` alike."""
        own = {
            name: wanted.pop(name)
            for name in ("instance", "starts", "held", "named", "static")
            if name in wanted
        }
        own.setdefault("instance", member)
        return self.do(
            Join(group, member, mode=mode, topics=topics or ("t",), wanted=Wanted(**wanted), **own)
        )

    def generation(self, group: str = "g") -> int:
        return self.state.consumers.groups[group].generation

    def picks(self, candidates: tuple[Candidate, ...]) -> tuple[Pick, ...]:
        """What an engine reads."""
        return tuple(Pick(c, self._keys(c) if c.needs_keys else None) for c in candidates)

    def _keys(self, c: Candidate) -> tuple[int | None, ...]:
        return tuple(self.keys[c.topic_id, c.partition, c.start + row] for row in range(c.rows))

    def plan(
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
        return plan(
            self.state,
            "g",
            member,
            self.generation(),
            durable,
            Wish(most, size, 0, run, left_out),
            self.now,
        )

    def fetch(
        self, member: str, group: str = "g", *, most: int = 1_000, generation: int | None = None
    ) -> Any:
        """What the member gets, message by message; a Rejected where it is refused."""
        generation = self.generation(group) if generation is None else generation
        found = plan(
            self.state, group, member, generation, self.end, Wish(most, EVERYTHING), self.now
        )
        if isinstance(found, Rejected):
            return found
        return self.deliver(member, generation, found, group)

    def deliver(self, member: str, generation: int, found: Plan, group: str = "g") -> Any:
        if not found.candidates and not found.steps:
            return []
        picks = self.picks(found.candidates)
        reply = self.last_reply = self.do(Deliver(group, member, generation, picks))
        if isinstance(reply, Rejected):
            return reply
        got = []
        for pick, start, end, attempt in reply.deliveries:
            name = self.state.topics_by_id[picks[pick].candidate.topic_id].name
            partition = picks[pick].candidate.partition
            got += [Got(name, partition, offset, attempt) for offset in range(start, end)]
        return self.fetch(member, group, generation=generation) if reply.again else got

    def expire(self) -> None:
        """All leases run out."""
        self.now += 60 * SECOND
        self.do(ExpireLeases())

    def early(self, member: str) -> bool:
        """Whether what the member would get may go out before it is durable."""
        picks = self.picks(self.plan(member).candidates)
        outcome = machine.decide(
            self.state, Deliver("g", member, self.generation(), picks), self.now
        )
        assert not isinstance(outcome, Rejected)
        return outcome.early

    def offsets(self, member: str, **options: Any) -> list[int]:
        """Offsets that the member gets, whatever the partition."""
        return [message.offset for message in self.fetch(member, **options)]

    def ack(
        self,
        member: str,
        *ranges: tuple[int, int],
        topic: str = "t",
        partition: int = 0,
        **options: Any,
    ) -> Any:
        group, generation = self._who(options)
        return self.do(
            Ack(group, member, generation, tuple((topic, partition, *one) for one in ranges))
        )

    def give_back(
        self,
        member: str,
        *ranges: tuple[int, int],
        topic: str = "t",
        partition: int = 0,
        **options: Any,
    ) -> Any:
        group, generation = self._who(options)
        return self.do(
            Return(group, member, generation, tuple((topic, partition, *one) for one in ranges))
        )

    def nack(
        self, member: str, offset: int, *, topic: str = "t", partition: int = 0, **options: Any
    ) -> Any:
        group, generation = self._who(options)
        spotted = (self.state.topics[topic].topic_id, partition, offset)
        options.setdefault("failure", Failure("E", "text", "print"))
        return self.do(
            Nack(
                group,
                member,
                generation,
                topic,
                partition,
                offset,
                self.keys.get(spotted),
                **options,
            )
        )

    def _who(self, options: dict[str, Any]) -> tuple[str, int]:
        group = options.pop("group", "g")
        return group, options.pop("generation", None) or self.generation(group)

    def events(self, since: int = 0) -> list[Any]:
        """Events recorded, from number `since` on."""
        return [event for _place, event in self.log[since:]]


def rows(state: State) -> dict[str, list[tuple[bytes, Any]]]:
    """Everything in the tables."""
    return {name: list(state.tables[name].range(b"")) for name in NAMES}
