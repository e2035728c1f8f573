"""Simulated consumers: they work, they fail, and they keep their part of the contract.

In an ordered group that is: one message of a key at a time, in the order of offsets.
After a failure the later messages of the key are returned unprocessed: at any time if
the failure was recorded, before the next fetch if it was not.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import TYPE_CHECKING, Any

from tests.core.consumers.simulated_processes import (
    ConsumerLedger,
    ConsumerProcess,
    HeldMessage,
    Message,
)
from tests.core.consumers.world import QUICK, ConsumersWorld
from txmq.core import machine
from txmq.core.consumers.candidates import FetchLimits
from txmq.core.consumers.commands import (
    AckMessages,
    Deliver,
    JoinGroup,
    NackMessage,
    RequestedSettings,
    ReturnMessages,
)
from txmq.core.consumers.fetch_choice import ChosenCandidates, choose_candidates
from txmq.core.events.consumers import LeasesExpired, MemberLeft
from txmq.core.state import failed_messages
from txmq.core.state.failed_rows import FailedKind, FailedMessage
from txmq.core.transactions.decisions import DecideTransaction
from txmq.errors import RequestRejected, StaleGeneration, UnknownMember
from txmq.model.decider import ByPostgres
from txmq.model.message import Decision
from txmq.model.retry import FailureReport
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import ConsumerGroup

PARTITIONS = {"t": 3, "u": 1}
STRAY = 99  # a key that senders put into any partition: fenced like others, but in no order
GROUPS: dict[str, tuple[str, RequestedSettings]] = {
    "park": ("ordered", RequestedSettings("park", max_parked=3)),
    "block": ("ordered", RequestedSettings("block", flood_keys=3)),
    "skip": ("ordered", RequestedSettings("skip")),
    "many": ("concurrent", RequestedSettings("park", flood_keys=4)),
    "cast": ("broadcast", RequestedSettings("park", flood_keys=0)),
}
LISTENERS = ("x", "y")  # members of a broadcast group, whose names are remembered
POSTGRES = ByPostgres(1, 1, 5, 7, 1)


class Clients(ConsumersWorld):
    """The consumers of a simulation, and what they may expect."""

    fates = (8, 1, 1)  # weights: a message fails, is dead at once, or is postponed

    def __init__(self, seed: int) -> None:
        super().__init__(**PARTITIONS)
        self.random = Random(seed)
        self.names = 0
        self.safe = len(self.log)  # records of the log that a crash cannot take back
        self.consumers: list[ConsumerProcess] = []
        self.dead: list[ConsumerProcess] = []  # the broker does not know yet
        self.undecided: dict[bytes, tuple[ConsumerProcess, Message, bool]] = {}
        self.ledgers: dict[str, ConsumerLedger] = defaultdict(ConsumerLedger)
        # messages of a key, as published
        self.chains: dict[tuple[int, int], list[Message]] = defaultdict(list)
        self.topic_ids = {name: self.state.topics[name].topic_id for name in PARTITIONS}
        self.topic_names = {topic_id: name for name, topic_id in self.topic_ids.items()}
        self.killers: set[Message] = set()
        self.outage = False  # what all handlers need is away

    def step(self) -> None:
        """Run one step of the world while a consumer waits."""

    def do(self, command: object) -> Any:
        outcome = machine.decide(self.state, command, self.now)
        for event in () if isinstance(outcome, RequestRejected) else outcome.events:
            self.note_lost(event)
        since = len(self.log)
        reply = super().do(command)
        if not isinstance(outcome, RequestRejected) and not outcome.early:
            self.safe = len(self.log)
        for event in self.events(since):
            for move in getattr(event, "moves", ()):
                self.note_letter(self.state.groups.by_id[event.group_id].name, *move)
        return reply

    def note_lost(self, event: object) -> None:
        """Note the messages of a member, or of a lease, that is about to be lost."""
        if isinstance(event, MemberLeft | LeasesExpired):
            group = self.state.groups.by_id[event.group_id]
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
                if any(ledger.deaths[m] >= failed_messages.ISOLATED_AFTER for m in out):
                    over = out.keys() | over
                ledger.returned(over, died=isinstance(event, LeasesExpired) or event.lost)

    def out(self, group: ConsumerGroup, member: str | None = None) -> dict[Message, int]:
        """Return the messages leased to a member, or to any, and their leases."""
        pieces = (
            (tp, piece) for tp, position in group.positions.items() for piece in position.leased
        )
        held = {
            (*tp, n): grant.lease for tp, (start, end, grant) in pieces for n in range(start, end)
        }
        held |= group.leased_rows
        return {
            m: number for m, number in held.items() if member in (None, group.leases[number].member)
        }

    def note_letter(self, group: str, topic_id: int, partition: int, offset: int, row: Any) -> None:
        if FailedMessage(*row).kind == FailedKind.LETTER:
            self.ledgers[group].was_letter.add((topic_id, partition, offset))

    def enter(self, consumer: ConsumerProcess, held: tuple[Any, ...] | None = None) -> None:
        mode, wanted = GROUPS[consumer.kind]
        wanted = wanted._replace(retry=QUICK, lease_us=6 * SECOND)
        command = JoinGroup(
            consumer.kind, consumer.name, consumer.instance, mode, ("t", "u"), wanted, held=held
        )
        reply = self.do(command._replace(static=consumer.static))
        consumer.group, consumer.generation = reply.group, reply.generation

    def forget_deliveries(self, group: str, ranges: Any, rows: Any = ()) -> None:
        """Forget deliveries that do not count."""
        deliveries = self.ledgers[group].deliveries
        for topic_id, partition, start, end, *_rest in ranges:
            deliveries.subtract((topic_id, partition, offset) for offset in range(start, end))
        deliveries.subtract(row[:3] for row in rows)

    def kill(self, consumer: ConsumerProcess) -> None:
        """End the process; the broker has to find out."""
        self.consumers.remove(consumer)
        self.dead.append(consumer)

    def some(self) -> ConsumerProcess | None:
        return self.random.choice(self.consumers) if self.consumers else None

    def known(self, consumer: ConsumerProcess, reply: Any) -> bool:
        """Return True if the broker knows the consumer; otherwise the consumer joins
        anew.
        """
        if not isinstance(reply, RequestRejected) or type(reply) is not UnknownMember:
            return True
        if consumer in self.consumers:
            self.replace(consumer)
        return False

    def replace(self, consumer: ConsumerProcess) -> None:
        """Start a new process with the same name."""
        self.names += 1
        self.consumers.remove(consumer)
        newer = ConsumerProcess(consumer.kind, consumer.name, f"i{self.names}")
        self.consumers.append(newer)
        self.enter(newer)

    def act(self) -> None:
        """Let a consumer do something."""
        consumer = self.some()
        if consumer is not None:
            self.act_as(consumer)

    def act_as(self, consumer: ConsumerProcess) -> None:
        """Let this consumer do something."""
        can = [self.send_fetch] if len(consumer.replies) < 2 else []
        can += [self.arrive] * 2 if consumer.replies else []
        can += [self.work] * 5 if consumer.held else []
        can += [self.flush] if consumer.acks else []
        can += (
            [self.return_unprocessed] if consumer.to_return and self.random.random() < 0.15 else []
        )
        self.random.choice(can)(consumer)

    def send_fetch(self, consumer: ConsumerProcess) -> None:
        """Send a fetch; the reply arrives later."""
        if consumer.careful:
            while consumer.replies:
                self.arrive(consumer)
            self.return_unprocessed(consumer)
            consumer.careful = False
        group = self.state.groups.by_name[consumer.group]
        stale = consumer.name in group.members and consumer.generation != group.generation
        flood, most = group.breaker, self.random.randint(1, 6)
        probed = flood is not None and flood.lease in group.leases
        wish = FetchLimits(most, 1_000, max_run_rows=self.random.choice((0, 3, 100)))
        try:
            found = choose_candidates(
                *(self.state, consumer.group, consumer.name, consumer.generation),
                *(self.end, wish, self.now),
            )
        except RequestRejected as refused:
            self.refused(consumer, refused, stale=stale)
            return
        if self.random.random() < 0.1 and self.consumers:
            self.step()  # the read takes its time
            if consumer not in self.consumers:
                return
        reply = self.receive(consumer, found)
        if isinstance(reply, RequestRejected):
            self.refused(consumer, reply, stale=True)
            return
        assert not stale, "delivered to a member that does not know the present generation"
        out = sum(end - start for _pick, start, end, *_rest in reply.deliveries)
        assert flood is None or group.breaker is None or out <= (0 if probed else 1), (
            "a flood was let through"
        )

    def receive(self, consumer: ConsumerProcess, found: ChosenCandidates) -> Any:
        reply = self.do(
            Deliver(
                consumer.group,
                consumer.name,
                consumer.generation,
                self.read_candidates(found.candidates),
            )
        )
        if isinstance(reply, RequestRejected):
            return reply
        got = []
        for pick, start, end, attempt, _accepted in reply.deliveries:
            c = found.candidates[pick]
            self.note_deaths(
                consumer,
                reply.lease,
                [(c.topic_id, c.partition, offset) for offset in range(start, end)],
            )
            got += [
                ((c.topic_id, c.partition, offset), HeldMessage(attempt, reply.lease))
                for offset in range(start, end)
            ]
        self.delivered(consumer, got)
        return reply

    def note_deaths(self, consumer: ConsumerProcess, lease: int, messages: list[Message]) -> None:
        known, deaths = (
            self.ledgers[consumer.group].deaths,
            self.group(consumer.group).leases[lease].deaths,
        )
        wrong = [message for message in messages if known[message] != deaths]
        assert not wrong, f"{deaths} deaths of {wrong}, not {[known[message] for message in wrong]}"

    def refused(self, consumer: ConsumerProcess, reply: RequestRejected, *, stale: bool) -> None:
        if self.known(consumer, reply):
            assert type(reply) is StaleGeneration
            assert stale
            self.enter(consumer)

    def delivered(self, consumer: ConsumerProcess, got: list[tuple[Message, HeldMessage]]) -> None:
        ledger = self.ledgers[consumer.group]
        for message, held in got:
            ledger.deliveries[message] += 1
            assert held.attempt == ledger.deliveries[message], f"attempt of {message}: {held}"
            assert message not in ledger.done | ledger.abandoned, f"{message} was done"
        if got:
            consumer.replies.append(got)

    def arrive(self, consumer: ConsumerProcess) -> None:
        """Process a reply; messages of a broken key are not kept."""
        for message, held in consumer.replies.popleft():
            if held.lease < consumer.broken.get(self.key_of(message), 0):
                consumer.to_return.append(message)
            else:
                consumer.held[message] = held
                if message in consumer.to_return:
                    consumer.to_return.remove(message)

    def key_of(self, message: Message) -> tuple[int, int]:
        """Return topic and key; a message without a key counts as a key of its own."""
        key = self.keys[message]
        return (message[0], key) if key is not None else (-1, hash(message))

    def return_unprocessed(self, consumer: ConsumerProcess) -> None:
        """Return messages unprocessed."""
        messages, consumer.to_return = list(dict.fromkeys(consumer.to_return)), []
        ranges = tuple(
            (self.topic_names[t], partition, offset, offset + 1)
            for t, partition, offset in messages
        )
        if not ranges:
            return
        reply = self.do(ReturnMessages(consumer.group, consumer.name, consumer.generation, ranges))
        if self.known(consumer, reply):
            for message, one in zip(messages, ranges, strict=True):
                self.ledgers[consumer.group].deliveries[message] -= one not in reply.stale

    def work(self, consumer: ConsumerProcess) -> None:
        """Run a handler: it succeeds, fails, or kills its process."""
        message = self.random.choice(list(consumer.held))
        if consumer.ordered:
            key = self.key_of(message)
            message = min(m for m in consumer.held if self.key_of(m) == key)
        chance = self.random.random()
        if message in self.killers and chance < 0.7:
            self.kill(consumer)
        elif self.outage:
            self.fail(consumer, message)
        elif chance < 0.1:
            self.in_transaction(consumer, message)
        elif chance < 0.75:
            self.effect(consumer, message)
            del consumer.held[message]
            consumer.acks.append(message)
        else:
            self.fail(consumer, message)

    def effect(self, consumer: ConsumerProcess, message: Message) -> None:
        """Record a success: in an ordered group all earlier messages of the key came
        before it.
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

    def fail(self, consumer: ConsumerProcess, message: Message) -> None:
        topic, key = self.topic_names[message[0]], self.key_of(message)
        delay = self.random.choice((None, None, 0))
        how = self.random.choices(("failed", "dead", "postpone"), self.fates)[0]
        why = FailureReport(
            "E", "text", "away" if self.outage else self.random.choice(("", "one", "two"))
        )
        known = self.state.groups.by_name.get(consumer.group)
        guarded = known is not None and known.breaker is not None
        fields = (
            consumer.group,
            consumer.name,
            consumer.generation,
            topic,
            *message[1:],
            self.keys[message],
            delay,
        )
        reply = self.do(NackMessage(*fields, why, dead=how == "dead", postpone=how == "postpone"))
        if not self.known(consumer, reply):
            return
        del consumer.held[message]
        refused = isinstance(reply, RequestRejected)
        if not refused and (how == "postpone" or (guarded and how == "failed")):
            self.ledgers[consumer.group].deliveries[message] -= 1
        bound = reply.detail["fence_lease"] if refused else reply.fence_lease
        if consumer.ordered:
            self.key_failed(consumer, key, bound, careful=refused)

    def key_failed(
        self, consumer: ConsumerProcess, key: tuple[int, int], bound: int, *, careful: bool
    ) -> None:
        """Return the later messages of the key, also those that are on their way."""
        consumer.broken[key] = bound
        consumer.careful |= careful
        for message in [
            m for m, held in consumer.held.items() if self.key_of(m) == key and held.lease < bound
        ]:
            del consumer.held[message]
            consumer.to_return.append(message)

    def in_transaction(self, consumer: ConsumerProcess, message: Message) -> None:
        """Ack a message in a transaction, whose decision may come later."""
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
        if isinstance(self.store(token, [], POSTGRES, actions=(action,)), RequestRejected):
            return
        committed = self.random.random() < 0.6
        self.undecided[token] = (consumer, message, committed)
        del consumer.held[message]
        if committed:
            self.effect(consumer, message)
        elif consumer.ordered or self.random.random() < 0.5:
            # a consumer whose transaction was rolled back says so before it fetches
            # again, or is gone
            self.undecided.pop(token)
            self.do(DecideTransaction(token, Decision.ROLLBACK, "producer"))
            self.rolled_back(consumer, message)
            bound = self.group(consumer.group).next_lease
            self.key_failed(consumer, self.key_of(message), bound, careful=True)

    def rolled_back(self, consumer: ConsumerProcess, message: Message) -> None:
        """Forget the deaths of a message whose handler ended, unless it had failed
        before.
        """
        group = self.state.groups.by_name.get(consumer.group)
        if group is None or failed_messages.get(self.state, group, message) is None:
            self.ledgers[consumer.group].deaths[message] = 0

    def flush(self, consumer: ConsumerProcess) -> None:
        """Send the acks."""
        if not consumer.acks:
            return
        acks, consumer.acks = consumer.acks, []
        ranges = tuple(
            (self.topic_names[t], partition, offset, offset + 1) for t, partition, offset in acks
        )
        reply = self.do(AckMessages(consumer.group, consumer.name, consumer.generation, ranges))
        if self.known(consumer, reply):
            stale = {
                (self.topic_ids[topic], partition, start)
                for topic, partition, start, _end in reply.stale
            }
            self.ledgers[consumer.group].done.update(set(acks) - stale)
