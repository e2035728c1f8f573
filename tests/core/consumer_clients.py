"""Consumer processes as a simulation needs them: they work, they fail, and they keep
their part of the contract.

In an ordered group that is: one message of a key at a time, in the order of offsets;
after a failure the later messages of the key go back unprocessed, at leisure where the
failure was recorded, before the next fetch where it was not.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import TYPE_CHECKING, Any

from tests.core.consumer_processes import Consumer, Held, Ledger, Message
from tests.core.consumer_world import QUICK, World
from tests.core.driver import SECOND
from txmq.core import machine
from txmq.core.consumers import failed_messages, poison
from txmq.core.consumers.candidates import Wish
from txmq.core.consumers.commands import Ack, Deliver, Failure, Join, Nack, Return, Wanted
from txmq.core.consumers.failed_messages import Kind, Moved
from txmq.core.consumers.planning import Plan, plan
from txmq.core.events.consumers import LeasesExpired, MemberLeft
from txmq.core.state.state import Rejected
from txmq.core.transactions.decisions import Decide
from txmq.errors import StaleGeneration, UnknownMember
from txmq.model.message import Decision

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import Group

PARTITIONS = {"t": 3, "u": 1}
STRAY = 99  # a key that senders put into any partition: fenced like others, but in no order
GROUPS: dict[str, tuple[str, Wanted]] = {
    "park": ("ordered", Wanted("park", max_parked=3)),
    "block": ("ordered", Wanted("block", flood_keys=3)),
    "skip": ("ordered", Wanted("skip")),
    "many": ("concurrent", Wanted("park", flood_keys=4)),
    "cast": ("broadcast", Wanted("park", flood_keys=0)),
}
LISTENERS = ("x", "y")  # members of a broadcast group, whose names are remembered
POSTGRES = ("postgres", 1, 1, 5, 7)


class Clients(World):
    """The consumers, and what they know to be true."""

    def __init__(self, seed: int) -> None:
        super().__init__(**PARTITIONS)
        self.random = Random(seed)
        self.names = 0
        self.safe = len(self.log)  # records of the log that a crash cannot take back
        self.consumers: list[Consumer] = []
        self.dead: list[Consumer] = []  # the broker does not know yet
        self.undecided: dict[bytes, tuple[Consumer, Message, bool]] = {}
        self.ledgers: dict[str, Ledger] = defaultdict(Ledger)
        self.chains: dict[tuple[int, int], list[Message]] = defaultdict(
            list
        )  # messages of a key, as published
        self.topic_ids = {name: self.state.topics[name].topic_id for name in PARTITIONS}
        self.topic_names = {topic_id: name for name, topic_id in self.topic_ids.items()}
        self.killers: set[Message] = set()
        self.outage = False  # what all handlers need is away

    def step(self) -> None:
        """Whatever else happens while a consumer waits."""

    def do(self, command: object) -> Any:
        outcome = machine.decide(self.state, command, self.now)
        for event in () if isinstance(outcome, Rejected) else outcome.events:
            self.note_lost(event)
        since = len(self.log)
        reply = super().do(command)
        if not isinstance(outcome, Rejected) and not outcome.early:
            self.safe = len(self.log)
        for event in self.events(since):
            for move in getattr(event, "moves", ()):
                self.note_letter(self.state.consumers.by_id[event.group_id].name, *move)
        return reply

    def note_lost(self, event: object) -> None:
        """What a member, or a lease, is about to give back without a word of its
        consumer's.
        """
        if isinstance(event, MemberLeft | LeasesExpired):
            group = self.state.consumers.by_id[event.group_id]
            ledger = self.ledgers[group.name]
            members = (
                {event.member}
                if isinstance(event, MemberLeft)
                else {group.leases[n].member for n in event.leases}
            )
            for member in members:
                out = self.out(group, member)
                over = {
                    m
                    for m, number in out.items()
                    if isinstance(event, MemberLeft) or number in event.leases
                }
                if any(ledger.deaths[m] >= poison.ALONE for m in out):
                    over = out.keys() | over
                ledger.given_back(over, died=isinstance(event, LeasesExpired) or event.lost)

    def out(self, group: Group, member: str | None = None) -> dict[Message, int]:
        """What is leased to a member, or to anybody, and by which lease."""
        pieces = (
            (spot, piece) for spot, position in group.positions.items() for piece in position.leased
        )
        held = {
            (*spot, n): grant.lease
            for spot, (start, end, grant) in pieces
            for n in range(start, end)
        }
        held |= group.held_rows
        return {
            m: number for m, number in held.items() if member in (None, group.leases[number].member)
        }

    def note_letter(self, group: str, topic_id: int, partition: int, offset: int, row: Any) -> None:
        if Moved(*row).kind == Kind.LETTER:
            self.ledgers[group].was_letter.add((topic_id, partition, offset))

    def enter(self, consumer: Consumer, held: tuple[Any, ...] | None = None) -> None:
        mode, wanted = GROUPS[consumer.kind]
        wanted = wanted._replace(retry=QUICK, lease_us=6 * SECOND)
        command = Join(
            consumer.kind, consumer.name, consumer.instance, mode, ("t", "u"), wanted, held=held
        )
        reply = self.do(command._replace(static=consumer.static))
        consumer.group, consumer.generation = reply.group, reply.generation

    def never_seen(self, group: str, ranges: Any, rows: Any = ()) -> None:
        """Deliveries that do not count."""
        deliveries = self.ledgers[group].deliveries
        for topic_id, partition, start, end, *_rest in ranges:
            deliveries.subtract((topic_id, partition, offset) for offset in range(start, end))
        deliveries.subtract(row[:3] for row in rows)

    def kill(self, consumer: Consumer) -> None:
        """The process dies; the broker will find out."""
        self.consumers.remove(consumer)
        self.dead.append(consumer)

    def some(self) -> Consumer | None:
        return self.random.choice(self.consumers) if self.consumers else None

    def known(self, consumer: Consumer, reply: Any) -> bool:
        """Whether the broker knows the consumer; one that learns that it does not drops
        all and joins anew.
        """
        if not isinstance(reply, Rejected) or reply.error is not UnknownMember:
            return True
        if consumer in self.consumers:
            self.replace(consumer)
        return False

    def replace(self, consumer: Consumer) -> None:
        """A new process of the same name."""
        self.names += 1
        self.consumers.remove(consumer)
        newer = Consumer(consumer.kind, consumer.name, f"i{self.names}")
        self.consumers.append(newer)
        self.enter(newer)

    def act(self) -> None:
        """A consumer does something."""
        consumer = self.some()
        if consumer is None:
            return
        can = [self.ask] if len(consumer.flight) < 2 else []
        can += [self.arrive] * 2 if consumer.flight else []
        can += [self.work] * 5 if consumer.hand else []
        can += [self.flush] if consumer.acks else []
        can += [self.hand_back] if consumer.back and self.random.random() < 0.15 else []
        self.random.choice(can)(consumer)

    def ask(self, consumer: Consumer) -> None:
        """A fetch; the reply arrives later."""
        if consumer.careful:
            while consumer.flight:
                self.arrive(consumer)
            self.hand_back(consumer)
            consumer.careful = False
        group = self.state.consumers.groups[consumer.group]
        stale = consumer.name in group.members and consumer.generation != group.generation
        flood, most = group.flood, self.random.randint(1, 6)
        probed = flood is not None and flood.lease in group.leases
        wish = Wish(most, 1_000, run=self.random.choice((0, 3, 100)))
        found = plan(
            self.state, consumer.group, consumer.name, consumer.generation, self.end, wish, self.now
        )
        if isinstance(found, Rejected):
            self.refused(consumer, found, stale=stale)
            return
        if self.random.random() < 0.1 and self.consumers:
            self.step()  # the read takes its time
            if consumer not in self.consumers:
                return
        reply = self.take(consumer, found)
        if isinstance(reply, Rejected):
            self.refused(consumer, reply, stale=True)
            return
        assert not stale, "delivered to a member that does not know the present generation"
        out = sum(end - start for _pick, start, end, _attempt in reply.deliveries)
        assert flood is None or group.flood is None or out <= (0 if probed else 1), (
            "a flood was let through"
        )

    def take(self, consumer: Consumer, found: Plan) -> Any:
        reply = self.do(
            Deliver(
                consumer.group, consumer.name, consumer.generation, self.picks(found.candidates)
            )
        )
        if isinstance(reply, Rejected):
            return reply
        got = []
        for pick, start, end, attempt in reply.deliveries:
            c = found.candidates[pick]
            self.note_deaths(
                consumer,
                reply.lease,
                [(c.topic_id, c.partition, offset) for offset in range(start, end)],
            )
            got += [
                ((c.topic_id, c.partition, offset), Held(attempt, reply.lease))
                for offset in range(start, end)
            ]
        self.delivered(consumer, got)
        return reply

    def note_deaths(self, consumer: Consumer, lease: int, messages: list[Message]) -> None:
        known, deaths = (
            self.ledgers[consumer.group].deaths,
            self.group(consumer.group).leases[lease].deaths,
        )
        wrong = [message for message in messages if known[message] != deaths]
        assert not wrong, f"{deaths} deaths of {wrong}, not {[known[message] for message in wrong]}"

    def refused(self, consumer: Consumer, reply: Rejected, *, stale: bool) -> None:
        if self.known(consumer, reply):
            assert reply.error is StaleGeneration
            assert stale
            self.enter(consumer)

    def delivered(self, consumer: Consumer, got: list[tuple[Message, Held]]) -> None:
        ledger = self.ledgers[consumer.group]
        for message, held in got:
            ledger.deliveries[message] += 1
            assert held.attempt == ledger.deliveries[message], f"attempt of {message}: {held}"
            assert message not in ledger.done | ledger.abandoned, f"{message} was done"
        if got:
            consumer.flight.append(got)

    def arrive(self, consumer: Consumer) -> None:
        """A reply: what is of a broken key is not for this consumer."""
        for message, held in consumer.flight.popleft():
            if held.lease < consumer.broken.get(self.key_of(message), 0):
                consumer.back.append(message)
            else:
                consumer.hand[message] = held
                if message in consumer.back:
                    consumer.back.remove(message)

    def key_of(self, message: Message) -> tuple[int, int]:
        """Topic and key; a keyless message has a key of its own."""
        key = self.keys[message]
        return (message[0], key) if key is not None else (-1, hash(message))

    def hand_back(self, consumer: Consumer) -> None:
        """Messages go back unprocessed."""
        messages, consumer.back = list(dict.fromkeys(consumer.back)), []
        ranges = tuple(
            (self.topic_names[t], partition, offset, offset + 1)
            for t, partition, offset in messages
        )
        if not ranges:
            return
        reply = self.do(Return(consumer.group, consumer.name, consumer.generation, ranges))
        if self.known(consumer, reply):
            for message, one in zip(messages, ranges, strict=True):
                self.ledgers[consumer.group].deliveries[message] -= one not in reply.stale

    def work(self, consumer: Consumer) -> None:
        """A handler runs: it succeeds, fails or takes the process with it."""
        message = self.random.choice(list(consumer.hand))
        if consumer.ordered:
            key = self.key_of(message)
            message = min(m for m in consumer.hand if self.key_of(m) == key)
        chance = self.random.random()
        if message in self.killers and chance < 0.7:
            self.kill(consumer)
        elif self.outage:
            self.fail(consumer, message)
        elif chance < 0.1:
            self.in_transaction(consumer, message)
        elif chance < 0.75:
            self.effect(consumer, message)
            del consumer.hand[message]
            consumer.acks.append(message)
        else:
            self.fail(consumer, message)

    def effect(self, consumer: Consumer, message: Message) -> None:
        """A success: in an ordered group all earlier messages of the key came before
        it.
        """
        ledger = self.ledgers[consumer.group]
        chain = self.chains.get(self.key_of(message), [])
        if (
            consumer.ordered
            and message in chain
            and self.keys[message] != STRAY
            and message not in ledger.effects
        ):
            before = chain[: chain.index(message)]
            skipped = ledger.was_letter if consumer.kind == "skip" else set()
            excused = ledger.effects | ledger.abandoned | skipped
            assert set(before) <= excused, (
                f"{consumer.group}: {message} before {set(before) - excused}"
            )
        ledger.effects.add(message)

    def fail(self, consumer: Consumer, message: Message) -> None:
        topic, key = self.topic_names[message[0]], self.key_of(message)
        delay = self.random.choice((None, None, 0))
        how = self.random.choices(("failed", "dead", "postpone"), (8, 1, 1))[0]
        why = Failure(
            "E", "text", "away" if self.outage else self.random.choice(("", "one", "two"))
        )
        known = self.state.consumers.groups.get(consumer.group)
        guarded = known is not None and known.flood is not None
        fields = (
            consumer.group,
            consumer.name,
            consumer.generation,
            topic,
            *message[1:],
            self.keys[message],
            delay,
        )
        reply = self.do(Nack(*fields, why, dead=how == "dead", postpone=how == "postpone"))
        if not self.known(consumer, reply):
            return
        del consumer.hand[message]
        refused = isinstance(reply, Rejected)
        if not refused and (how == "postpone" or (guarded and how == "failed")):
            self.ledgers[consumer.group].deliveries[message] -= 1
        bound = reply.detail["fence_lease"] if refused else reply.fence_lease
        if consumer.ordered:
            self.key_failed(consumer, key, bound, careful=refused)

    def key_failed(
        self, consumer: Consumer, key: tuple[int, int], bound: int, *, careful: bool
    ) -> None:
        """The later messages of the key go back, also those that are still on their
        way.
        """
        consumer.broken[key] = bound
        consumer.careful |= careful
        for message in [
            m for m, held in consumer.hand.items() if self.key_of(m) == key and held.lease < bound
        ]:
            del consumer.hand[message]
            consumer.back.append(message)

    def in_transaction(self, consumer: Consumer, message: Message) -> None:
        """The ack is part of a transaction, whose decision may take its time."""
        self.names += 1
        token = (self.now // 1_000).to_bytes(6, "big") + self.names.to_bytes(10, "big")
        topic, partition, offset = self.topic_names[message[0]], *message[1:]
        action = (
            "ack",
            consumer.group,
            consumer.name,
            consumer.generation,
            topic,
            partition,
            offset,
            offset + 1,
        )
        if isinstance(self.store(token, [], POSTGRES, actions=(action,)), Rejected):
            return
        committed = self.random.random() < 0.6
        self.undecided[token] = (consumer, message, committed)
        del consumer.hand[message]
        if committed:
            self.effect(consumer, message)
        elif consumer.ordered or self.random.random() < 0.5:
            # a consumer whose transaction was rolled back says so before it fetches
            # again, or is gone
            self.undecided.pop(token)
            self.do(Decide(token, Decision.ROLLBACK, "producer"))
            self.rolled_back(consumer, message)
            bound = self.group(consumer.group).next_lease
            self.key_failed(consumer, self.key_of(message), bound, careful=True)

    def rolled_back(self, consumer: Consumer, message: Message) -> None:
        """Its handler came to an end; only what had failed before is still known for
        its deaths.
        """
        group = self.state.consumers.groups.get(consumer.group)
        if group is None or failed_messages.get(self.state, group, message) is None:
            self.ledgers[consumer.group].deaths[message] = 0

    def flush(self, consumer: Consumer) -> None:
        """Acks go out."""
        if not consumer.acks:
            return
        acks, consumer.acks = consumer.acks, []
        ranges = tuple(
            (self.topic_names[t], partition, offset, offset + 1) for t, partition, offset in acks
        )
        reply = self.do(Ack(consumer.group, consumer.name, consumer.generation, ranges))
        if self.known(consumer, reply):
            stale = {
                (self.topic_ids[topic], partition, start)
                for topic, partition, start, _end in reply.stale
            }
            self.ledgers[consumer.group].done.update(set(acks) - stale)
