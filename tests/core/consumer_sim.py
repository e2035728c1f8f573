"""A broker's core among consumers that fail, hang, die and come back; after each step everything is accounted for.

One seed is one run. In ordered groups the consumers keep to the client's part of the contract: one message of a key at a
time, in the order of offsets; after a failure the later messages of the key go back unprocessed, at leisure where the
failure was recorded, before the next fetch where it was not.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from tests.core.consumer_world import QUICK, World
from tests.core.driver import SECOND
from txmq.broker.core import machine
from txmq.broker.core.consumer_commands import (
    AbandonLetters,
    Ack,
    Deliver,
    ExpireLeases,
    Join,
    Leave,
    Nack,
    ReplayLetters,
    Return,
    Wanted,
)
from txmq.broker.core.consumer_events import Delivered, Returned
from txmq.broker.core.decisions import Decide
from txmq.broker.core.leases import next_due
from txmq.broker.core.moved import Kind, Moved
from txmq.broker.core.planning import Plan, plan
from txmq.broker.core.state import Rejected, State
from txmq.errors import StaleGeneration, UnknownMember
from txmq.message import Decision

Message = tuple[int, int, int]  # topic id, partition, offset
PARTITIONS = {"t": 3, "u": 1}
KEYS = 6
STRAY = 99  # a key that senders put into any partition: fenced like others, but in no order
GROUPS = {
    "park": ("ordered", "park"),
    "block": ("ordered", "block"),
    "skip": ("ordered", "skip"),
    "many": ("concurrent", "park"),
}
POSTGRES = ("postgres", 1, 1, 5, 7)


class Held(NamedTuple):
    """A message in a consumer's hands."""

    attempt: int
    lease: int


@dataclass(eq=False)
class Consumer:
    """A consumer process. `flight`: replies on their way to it; `broken`: keys of which leases below must go back.

    `back`: messages to be given back when it comes to that. `careful`: all must be here or given back before it fetches.
    """

    group: str
    name: str
    instance: str
    generation: int = 0
    alive: bool = True
    flight: deque[list[tuple[Message, Held]]] = field(default_factory=deque)
    hand: dict[Message, Held] = field(default_factory=dict)
    acks: list[Message] = field(default_factory=list)
    back: list[Message] = field(default_factory=list)
    careful: bool = False
    broken: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass
class Ledger:
    """What a group's consumers know to be true, from replies alone."""

    done: set[Message] = field(default_factory=set)
    abandoned: set[Message] = field(default_factory=set)
    was_letter: set[Message] = field(default_factory=set)
    deliveries: Counter[Message] = field(default_factory=Counter)
    effects: set[Message] = field(default_factory=set)


class Sim(World):
    """One run."""

    def __init__(self, seed: int) -> None:
        super().__init__(**PARTITIONS)
        self.random = Random(seed)
        self.names = 0
        self.safe = len(self.log)  # records of the log that a crash cannot take back
        self.consumers: list[Consumer] = []
        self.dead: list[Consumer] = []  # the broker does not know yet
        self.undecided: dict[bytes, tuple[Consumer, Message, bool]] = {}
        self.ledgers: dict[str, Ledger] = defaultdict(Ledger)
        self.chains: dict[tuple[int, int], list[Message]] = defaultdict(list)  # messages of a key, as published
        self.counts: Counter[str] = Counter()
        self.topic_ids = {name: self.state.topics[name].topic_id for name in PARTITIONS}
        self.topic_names = {topic_id: name for name, topic_id in self.topic_ids.items()}
        self.killers: set[Message] = set()
        self.groups = self.random.sample(list(GROUPS), 2)
        self.join()
        self.join()

    def do(self, command: object) -> Any:
        outcome = machine.decide(self.state, command, self.now)
        since = len(self.log)
        reply = super().do(command)
        if not isinstance(outcome, Rejected) and not outcome.early:
            self.safe = len(self.log)
        for event in self.events(since):
            for move in getattr(event, "moves", ()):
                self.note_letter(self.state.consumers.by_id[event.group_id].name, *move)
        return reply

    def note_letter(self, group: str, topic_id: int, partition: int, offset: int, row: Any) -> None:
        if Moved(*row).kind == Kind.LETTER:
            self.counts["letters"] += 1
            self.ledgers[group].was_letter.add((topic_id, partition, offset))

    # What happens

    def step(self) -> None:
        """Something happens."""
        names, weights = zip(*STEPS.items(), strict=True)
        name = self.random.choices(names, weights)[0]
        self.counts[name] += 1
        getattr(self, name)()

    def send(self) -> None:
        topic = self.random.choice(list(PARTITIONS))
        partition = self.random.randrange(PARTITIONS[topic])
        mine = [key for key in range(KEYS) if key % PARTITIONS[topic] == partition] + [STRAY, None]
        keys = [self.random.choice(mine) for _ in range(self.random.randint(1, 4))]
        base = self.state.topics[topic].ends[partition]
        self.publish(topic, *keys, partition=partition)
        self.safe = len(self.log)
        for row, key in enumerate(keys):
            message = (self.topic_ids[topic], partition, base + row)
            if key is not None:
                self.chains[self.topic_ids[topic], key].append(message)
            if self.random.random() < 0.03:
                self.killers.add(message)

    def join(self) -> None:  # type: ignore[override]  # a step, not the world's call
        if len(self.consumers) >= 5:
            return
        self.names += 1
        group = self.random.choice(self.groups)
        consumer = Consumer(group, f"c{self.names}", f"i{self.names}")
        self.consumers.append(consumer)
        self.enter(consumer)

    def enter(self, consumer: Consumer, held: tuple[Any, ...] | None = None) -> None:
        mode, policy = GROUPS[consumer.group]
        wanted = Wanted(policy, QUICK, 6 * SECOND)
        command = Join(consumer.group, consumer.name, consumer.instance, mode, ("t", "u"), wanted, held=held)
        consumer.generation = self.do(command).generation

    def again(self) -> None:
        """A process of the same name takes over."""
        consumer = self.some()
        if consumer is not None:
            self.names += 1
            self.consumers.remove(consumer)
            newer = Consumer(consumer.group, consumer.name, f"i{self.names}")
            self.consumers.append(newer)
            self.enter(newer)

    def reconnect(self) -> None:
        """The connection breaks: replies on their way are lost, the process goes on."""
        consumer = self.some()
        if consumer is not None:
            consumer.flight.clear()
            consumer.back.clear()
            held = [*consumer.hand, *consumer.acks]
            ranges = tuple((self.topic_names[t], partition, offset, offset + 1) for t, partition, offset in held)
            since = len(self.log)
            self.enter(consumer, ranges)
            for event in self.events(since):
                if isinstance(event, Returned):
                    assert not {row[:3] for row in event.rows} & set(held)
                    self.never_seen(consumer.group, event.ranges, event.rows)

    def leave(self) -> None:
        consumer = self.some()
        if consumer is not None and self.random.random() < 0.3:
            self.flush(consumer)
            self.hand_back(consumer)
            if consumer not in self.consumers:
                return
            self.consumers.remove(consumer)
            self.do(Leave(consumer.group, consumer.name, consumer.instance))

    def kill(self, consumer: Consumer | None = None) -> None:
        consumer = consumer or self.some()
        if consumer is not None:
            self.consumers.remove(consumer)
            self.dead.append(consumer)

    def lose(self) -> None:
        """The engine misses somebody: a dead process, or one that only hangs."""
        hangs = self.some() if self.random.random() < 0.3 else None
        consumer = self.dead.pop(0) if self.dead else hangs
        if consumer is not None:
            self.do(Leave(consumer.group, consumer.name, consumer.instance, lost=True))

    def tick(self) -> None:
        self.now += self.random.choice((1, SECOND // 10, SECOND // 2, SECOND, 3 * SECOND))
        while self.do(ExpireLeases()).more:
            pass

    def crash(self) -> None:
        """The broker crashes: what was not awaited may be gone."""
        keep = self.random.randint(self.safe, len(self.log))
        for _place, event in self.log[keep:]:
            if isinstance(event, Delivered):
                name = self.state.consumers.by_id[event.group_id].name
                self.never_seen(name, event.ranges)
        del self.log[keep:]
        self.state = self.replayed()
        self.boot()
        self.safe = len(self.log)
        for consumer in self.consumers:
            consumer.flight.clear()

    def never_seen(self, group: str, ranges: Any, rows: Any = ()) -> None:
        """Deliveries that do not count."""
        deliveries = self.ledgers[group].deliveries
        for topic_id, partition, start, end, *_rest in ranges:
            deliveries.subtract((topic_id, partition, offset) for offset in range(start, end))
        deliveries.subtract(row[:3] for row in rows)

    def decide(self) -> None:
        if not self.undecided:
            return
        token = self.random.choice(list(self.undecided))
        consumer, message, committed = self.undecided.pop(token)
        self.do(Decide(token, Decision.COMMIT if committed else Decision.ROLLBACK, "resolver"))
        if committed:
            self.ledgers[consumer.group].done.add(message)

    def operate(self) -> None:
        """An operator looks at the dead letters."""
        group = self.random.choice(self.groups)
        letters = self.letters(group)
        if not letters:
            return
        some = tuple(self.random.sample(letters, self.random.randint(1, len(letters))))
        named = tuple((self.topic_names[t], partition, offset) for t, partition, offset in some)
        if self.random.random() < 0.7:
            for message in some:
                self.ledgers[group].deliveries[message] = 0
            assert self.do(ReplayLetters(group, named)).refused == ()
        else:
            assert self.do(AbandonLetters(group, named, "no use")).refused == ()
            self.ledgers[group].abandoned.update(some)

    def letters(self, group: str) -> list[Message]:
        from txmq.broker.core.consumer_queries import letters

        if group not in self.state.consumers.groups:
            return []
        found, _following = letters(self.state, group, 0, 1_000)  # type: ignore[misc]  # the group is there
        open_ones = [letter.fields for letter in found if letter.fields["state"] == "dead"]
        return [(self.topic_ids[f["topic"]], f["partition"], f["offset"]) for f in open_ones]

    # What consumers do

    def some(self) -> Consumer | None:
        return self.random.choice(self.consumers) if self.consumers else None

    def known(self, consumer: Consumer, reply: Any) -> bool:
        """Whether the broker knows the consumer; one that learns that it does not drops all and joins anew."""
        if not isinstance(reply, Rejected) or reply.error is not UnknownMember:
            return True
        if consumer in self.consumers:
            self.names += 1
            self.consumers.remove(consumer)
            newer = Consumer(consumer.group, consumer.name, f"i{self.names}")
            self.consumers.append(newer)
            self.enter(newer)
        return False

    def act(self) -> None:
        """A consumer does something."""
        consumer = self.some()
        if consumer is None:
            return
        can = [self.ask] if len(consumer.flight) < 2 else []
        can += [self.arrive] * 2 if consumer.flight else []
        can += [self.work] * 5 if consumer.hand else []
        can += [self.flush] if consumer.acks else []
        can += [self.hand_back] if consumer.back else []
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
        most = self.random.randint(1, 6)
        found = plan(self.state, consumer.group, consumer.name, consumer.generation, self.end, most, 1_000, self.now)
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

    def take(self, consumer: Consumer, found: Plan) -> Any:
        reply = self.do(Deliver(consumer.group, consumer.name, consumer.generation, self.picks(found.candidates)))
        if isinstance(reply, Rejected):
            return reply
        got = []
        for pick, start, end, attempt in reply.deliveries:
            c = found.candidates[pick]
            got += [((c.topic_id, c.partition, offset), Held(attempt, reply.lease)) for offset in range(start, end)]
        self.delivered(consumer, got)
        return reply

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
        messages, consumer.back = consumer.back, []
        ranges = tuple((self.topic_names[t], partition, offset, offset + 1) for t, partition, offset in messages)
        if not ranges:
            return
        reply = self.do(Return(consumer.group, consumer.name, consumer.generation, ranges))
        if self.known(consumer, reply):
            for message, one in zip(messages, ranges, strict=True):
                self.ledgers[consumer.group].deliveries[message] -= one not in reply.stale

    def work(self, consumer: Consumer) -> None:
        """A handler runs: it succeeds, fails or takes the process with it."""
        message = self.random.choice(list(consumer.hand))
        if GROUPS[consumer.group][0] == "ordered":
            key = self.key_of(message)
            message = min(m for m in consumer.hand if self.key_of(m) == key)
        chance = self.random.random()
        if message in self.killers and chance < 0.7:
            self.kill(consumer)
        elif chance < 0.1:
            self.in_transaction(consumer, message)
        elif chance < 0.75:
            self.effect(consumer, message)
            del consumer.hand[message]
            consumer.acks.append(message)
        else:
            self.fail(consumer, message)

    def effect(self, consumer: Consumer, message: Message) -> None:
        """A success: in an ordered group all earlier messages of the key came before it."""
        ledger = self.ledgers[consumer.group]
        self.counts["effects"] += message not in ledger.effects
        mode, policy = GROUPS[consumer.group]
        chain = self.chains.get(self.key_of(message), [])
        if mode == "ordered" and message in chain and self.keys[message] != STRAY and message not in ledger.effects:
            before = chain[: chain.index(message)]
            excused = ledger.effects | ledger.abandoned | (ledger.was_letter if policy == "skip" else set())
            assert set(before) <= excused, f"{consumer.group}: {message} before {set(before) - excused}"
        ledger.effects.add(message)

    def fail(self, consumer: Consumer, message: Message) -> None:
        topic, key = self.topic_names[message[0]], self.key_of(message)
        delay = self.random.choice((None, None, 0))
        dead = self.random.random() < 0.1
        fields = (consumer.group, consumer.name, consumer.generation, topic, *message[1:], self.keys[message], delay)
        reply = self.do(Nack(*fields, dead=dead))
        if not self.known(consumer, reply):
            return
        del consumer.hand[message]
        refused = isinstance(reply, Rejected)
        bound = reply.detail["fence_lease"] if refused else reply.fence_lease
        if GROUPS[consumer.group][0] == "ordered" and (not refused or self.keys[message] is not None):
            self.key_failed(consumer, key, bound, careful=refused)

    def key_failed(self, consumer: Consumer, key: tuple[int, int], bound: int, *, careful: bool) -> None:
        """The later messages of the key go back, also those that are still on their way."""
        consumer.broken[key] = bound
        consumer.careful |= careful
        for message in [m for m, held in consumer.hand.items() if self.key_of(m) == key and held.lease < bound]:
            del consumer.hand[message]
            consumer.back.append(message)

    def in_transaction(self, consumer: Consumer, message: Message) -> None:
        """The ack is part of a transaction, whose decision may take its time."""
        self.names += 1
        token = (self.now // 1_000).to_bytes(6, "big") + self.names.to_bytes(10, "big")
        topic, partition, offset = self.topic_names[message[0]], *message[1:]
        action = ("ack", consumer.group, consumer.name, consumer.generation, topic, partition, offset, offset + 1)
        if isinstance(self.store(token, [], POSTGRES, actions=(action,)), Rejected):
            return
        self.counts["transactions"] += 1
        committed = self.random.random() < 0.6
        self.undecided[token] = (consumer, message, committed)
        del consumer.hand[message]
        if committed:
            self.effect(consumer, message)
        elif GROUPS[consumer.group][0] == "ordered" or self.random.random() < 0.5:
            # a consumer whose transaction was rolled back says so before it fetches again, or is gone
            self.undecided.pop(token)
            self.do(Decide(token, Decision.ROLLBACK, "producer"))
            bound = self.group(consumer.group).next_lease
            self.key_failed(consumer, self.key_of(message), bound, careful=True)

    def flush(self, consumer: Consumer) -> None:
        """Acks go out."""
        if not consumer.acks:
            return
        acks, consumer.acks = consumer.acks, []
        ranges = tuple((self.topic_names[t], partition, offset, offset + 1) for t, partition, offset in acks)
        reply = self.do(Ack(consumer.group, consumer.name, consumer.generation, ranges))
        if self.known(consumer, reply):
            stale = {(self.topic_ids[topic], partition, start) for topic, partition, start, _end in reply.stale}
            self.ledgers[consumer.group].done.update(set(acks) - stale)

    def drain(self) -> None:
        """All faults end: everything must come to its end."""
        self.killers.clear()
        while self.undecided:
            self.decide()
        while self.dead:
            self.lose()
        for _ in range(400):
            self.now = next_due(self.state, self.now) or self.now
            self.tick()
            for group in self.groups:
                for message in self.letters(group):
                    self.ledgers[group].deliveries[message] = 0
                    self.do(ReplayLetters(group, ((self.topic_names[message[0]], *message[1:]),)))
            for consumer in list(self.consumers):
                self.finish(consumer)
            if all(self.ended(group) for group in {c.group for c in self.consumers}):
                return
        raise AssertionError("not drained")

    def finish(self, consumer: Consumer) -> None:
        """The consumer does all it has, and fetches once more."""
        self.enter(consumer)
        self.hand_back(consumer)
        found = plan(self.state, consumer.group, consumer.name, consumer.generation, self.end, 50, 10_000, self.now)
        if isinstance(found, Plan):
            self.take(consumer, found)
        while consumer.flight:
            self.arrive(consumer)
        self.hand_back(consumer)
        for message in sorted(consumer.hand):
            self.effect(consumer, message)
            consumer.acks.append(message)
        consumer.hand.clear()
        self.flush(consumer)

    def ended(self, name: str) -> bool:
        group, ledger = self.group(name), self.ledgers[name]
        return not group.leases and not group.fences and ledger.done | ledger.abandoned == set(self.keys)


STEPS = {
    "act": 100, "send": 9, "tick": 4, "join": 1.5, "decide": 3, "operate": 2, "lose": 1, "reconnect": 0.7, "kill": 0.3,
    "leave": 0.3, "again": 0.3, "crash": 0.3,
}  # fmt: skip


def replayed_equals(sim: Sim) -> None:
    """Recovery makes the same state of the log, and of the tables."""
    from tests.core.consumer_world import rows

    again: State = sim.replayed()
    assert again.consumers == sim.state.consumers
    assert rows(again) == rows(sim.state)
    machine.save(sim.state)
    assert machine.load(sim.state.tables).consumers == sim.state.consumers
