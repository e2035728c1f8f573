"""Simulator of a broker's core with consumers that fail, hang, die and come back.

One seed is one run, and every run has to end well.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tests.core.consumers.invariants import check, moved_rows
from tests.core.consumers.simulated_clients import GROUPS, LISTENERS, PARTITIONS, STRAY
from tests.core.consumers.simulated_processes import ConsumerProcess, Message
from tests.core.consumers.simulated_stores import StoringClients
from tests.core.consumers.world import rows
from tests.core.due import next_due
from txmq.core import machine
from txmq.core.consumers import circuit_breaker, poison
from txmq.core.consumers.candidates import FetchLimits
from txmq.core.consumers.commands import (
    AbandonLetters,
    AdoptStore,
    AdvanceGroupWork,
    ChangeRetries,
    ExpireLeases,
    LeaveGroup,
    PauseGroup,
    Rebalance,
    ReplayLetters,
    ResetPosition,
    RetryChange,
)
from txmq.core.consumers.fetch_choice import choose_candidates
from txmq.core.consumers.letter_views import list_letters
from txmq.core.events.consumers import Delivered, Returned
from txmq.core.state import failed_messages, local_stores
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.local_stores import StoreOrder
from txmq.core.topics.topics import GrowTopic
from txmq.core.transactions.decisions import DecideTransaction
from txmq.errors import RequestRejected
from txmq.model.message import Decision
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from collections.abc import Collection

    import pytest

    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.state.failed_rows import FailedMessage

RETRIED = (FailedKind.RETRY, FailedKind.LOCAL)
KEYS = 6
MOST_PARTITIONS = 5


class Sim(StoringClients):
    """One run. `weights`: how often each step is made."""

    def __init__(self, seed: int, weights: dict[str, float] | None = None) -> None:
        super().__init__(seed)
        self.weights = STEPS if weights is None else weights
        self.counts: Counter[str] = Counter()
        self.kinds = [self.random.choice(("park", "block", "skip")), self.random.choice([*GROUPS])]
        self.checked = 0  # records of the log that were looked at
        self.start()
        self.start()

    def step(self) -> None:
        """Run one random action."""
        names, weights = zip(*self.weights.items(), strict=True)
        name = self.random.choices(names, weights)[0]
        self.counts[name] += 1
        getattr(self, name)()

    def check(self) -> None:
        """Check the groups whose events were recorded since the last call."""
        by_id, fresh = self.state.groups.by_id, self.events(self.checked)
        touched: set[Any] = {getattr(event, "group_id", None) for event in fresh}
        self.checked = len(self.log)
        for group_id in by_id if None in touched else touched & by_id.keys():
            group = by_id[group_id]
            ledger = self.ledgers[group.name]
            check(self.state, group, self.keys, ledger.done | ledger.abandoned, ledger.buried)

    def produce(self) -> None:
        topic = self.random.choice(list(PARTITIONS))
        partitions = len(self.state.topics[topic].end_offsets)
        partition = self.random.randrange(partitions)
        mine = [key for key in range(KEYS) if key % partitions == partition] + [STRAY, None]
        keys = [self.random.choice(mine) for _ in range(self.random.randint(1, 4))]
        base = self.state.topics[topic].end_offsets[partition]
        self.publish(topic, *keys, partition=partition)
        self.safe = len(self.log)
        for row, key in enumerate(keys):
            message = (self.topic_ids[topic], partition, base + row)
            if key is not None:
                self.chains[self.topic_ids[topic], key].append(message)
            if self.random.random() < 0.03:
                self.killers.add(message)

    def start(self) -> None:
        """Start one more process."""
        if len(self.consumers) >= 5:
            return
        self.names += 1
        kind = self.random.choice(self.kinds)
        name = f"c{self.names}"
        if kind == "cast":
            free = set(LISTENERS) - {consumer.name for consumer in self.consumers}
            if not free:
                return
            name = min(free)
        consumer = ConsumerProcess(kind, name, f"i{self.names}")
        self.consumers.append(consumer)
        self.give_store(consumer)
        self.enter(consumer)

    def grow(self) -> None:
        """Add partitions, so that keys continue in others."""
        topic = self.state.topics["t"]
        if len(topic.end_offsets) < MOST_PARTITIONS:
            self.do(GrowTopic("t", len(topic.end_offsets) + 1))
            for group in [*self.state.groups.by_id.values()]:
                self.do(Rebalance(group.name))

    def break_down(self) -> None:
        """Make a service that handlers need unavailable."""
        self.outage = True

    def mend(self) -> None:
        """Make it available again."""
        self.outage = False

    def pause(self) -> None:
        """Pause a group, or resume it."""
        for group in [*self.state.groups.by_id.values()]:
            self.do(PauseGroup(group.name, not group.paused and self.random.random() < 0.5))

    def reset(self) -> None:
        """Reset a group to its beginning or end, and restart its consumers."""
        group = self.random.choice([*self.state.groups.by_id.values()])
        busy = any(
            consumer.group == group.name
            for consumer, _message, _committed in self.undecided.values()
        )
        if busy or not group.positions:
            return
        to, topic_id = (
            self.random.choice(("first", "last")),
            self.random.choice([*group.positions])[0],
        )
        rows_out = {ref for ref in group.leased_rows if ref[0] == topic_id}
        self.do(ResetPosition(group.name, self.topic_names[topic_id], to))
        self.ledgers[group.name].returned(rows_out, died=False)
        for consumer in [consumer for consumer in self.consumers if consumer.group == group.name]:
            self.replace(consumer)
        everything = {m for m in self.keys if m[0] == topic_id and m[:2] in group.positions}
        if to == "last":
            self.ledgers[group.name].skip(everything - moved_rows(self.state, group).keys())
        else:
            self.ledgers[group.name].forget(everything)

    def again(self) -> None:
        """Start a process with the name of another one."""
        consumer = self.some()
        if consumer is not None:
            self.replace(consumer)

    def die(self) -> None:
        consumer = self.some()
        if consumer is not None:
            self.kill(consumer)

    def reconnect(self) -> None:
        """Break a connection: replies on their way are lost, the process continues."""
        consumer = self.some()
        if consumer is not None:
            self.come_back(consumer)

    def come_back(self, consumer: ConsumerProcess) -> None:
        """Join again, with the messages it holds."""
        consumer.replies.clear()
        consumer.to_return.clear()
        held = [*consumer.held, *consumer.acks, *self.untold(consumer)]
        ranges = tuple(
            (self.topic_names[t], partition, offset, offset + 1) for t, partition, offset in held
        )
        since = len(self.log)
        self.enter(consumer, ranges)
        for event in self.events(since):
            if isinstance(event, Returned):
                assert not {row[:3] for row in event.rows} & set(held)
                self.forget_deliveries(consumer.group, event.ranges, event.rows)

    def leave(self) -> None:
        consumer = self.some()
        if consumer is not None and self.random.random() < 0.3:
            self.flush(consumer)
            self.return_unprocessed(consumer)
            if consumer not in self.consumers:
                return
            self.consumers.remove(consumer)
            self.shelve(consumer)
            self.do(LeaveGroup(consumer.group, consumer.name, consumer.instance))

    def lose(self) -> None:
        """Let the engine miss a member: a dead process, or one that only hangs."""
        hangs = self.some() if self.random.random() < 0.3 else None
        consumer = self.dead.pop(0) if self.dead else hangs
        if consumer is not None:
            self.do(LeaveGroup(consumer.group, consumer.name, consumer.instance, lost=True))

    def tick(self) -> None:
        self.now += self.random.choice((1, SECOND // 10, SECOND // 2, SECOND, 3 * SECOND))
        while self.do(ExpireLeases(self.now)).more:
            pass

    def crash(self) -> None:
        """Crash the broker: records that were not awaited may be lost."""
        keep = self.random.randint(self.safe, len(self.log))
        for _place, event in self.log[keep:]:
            if isinstance(event, Delivered):
                counts = event.deaths or any(attempt > 1 for *_range, attempt in event.ranges)
                assert not counts, "a count was lost with the power"
                name = self.state.groups.by_id[event.group_id].name
                self.forget_deliveries(name, event.ranges)
        del self.log[keep:]
        self.checked = min(self.checked, keep)
        self.state = self.replayed()
        for group in self.state.groups.by_id.values():
            self.ledgers[group.name].returned({*self.out(group)}, died=False)
        self.boot()
        self.safe = len(self.log)
        for consumer in self.consumers:
            consumer.replies.clear()
            if consumer.static and consumer.name in self.members(consumer):
                self.come_back(consumer)

    def members(self, consumer: ConsumerProcess) -> Collection[str]:
        """Return the members of its group that the broker knows."""
        group = self.state.groups.by_name.get(consumer.group)
        return () if group is None else group.members

    def decide(self) -> None:
        if not self.undecided:
            return
        token = self.random.choice(list(self.undecided))
        consumer, message, committed = self.undecided.pop(token)
        self.do(
            DecideTransaction(
                token, Decision.COMMIT if committed else Decision.ROLLBACK, "resolver"
            )
        )
        if committed:
            self.ledgers[consumer.group].done.add(message)
        else:
            self.rolled_back(consumer, message)

    def operate(self) -> None:
        """Let an operator replay or abandon dead letters."""
        group = self.random.choice(self.names_of_groups())
        letters = self.letters(group)
        if not letters:
            return
        some = tuple(self.random.sample(letters, self.random.randint(1, len(letters))))
        named = tuple((self.topic_names[t], partition, offset) for t, partition, offset in some)
        if self.random.random() < 0.7:
            for message in some:
                self.ledgers[group].replayed(message)
            assert self.do(ReplayLetters(group, named)).refused == ()
        else:
            assert self.do(AbandonLetters(group, named, "no use")).refused == ()
            self.ledgers[group].abandoned.update(some)

    def touch_retries(self) -> None:
        """Let an operator retry, bury or skip messages that wait for an attempt."""
        group = self.group(self.random.choice(self.names_of_groups()))
        ledger, rows_before = self.ledgers[group.name], moved_rows(self.state, group)
        retried = [m for m, row in rows_before.items() if row.kind in RETRIED]
        some = self.random.sample(retried, min(len(retried), 3))
        change = self.random.choice([*RetryChange])
        named = tuple((self.topic_names[t], partition, offset) for t, partition, offset in some)
        reply = self.do(ChangeRetries(group.name, change, named, "why"))
        places = dict(zip(named, some, strict=True))
        done = {places[place] for place in reply.done}
        left = {places[one[:3]] for one in reply.refused}
        assert done.isdisjoint(group.leased_rows), "it was taken from a member"
        if change is RetryChange.BURY:
            ledger.buried |= done
        for message, row in moved_rows(self.state, group).items():
            if message in left:
                assert row == rows_before[message], "what was refused was changed"
            elif message in done:
                self.check_touched(group, change, message, rows_before[message])

    def check_touched(
        self, group: ConsumerGroup, change: RetryChange, message: Message, before: FailedMessage
    ) -> None:
        """Check what became of a message that an operator has changed."""
        row = moved_rows(self.state, group)[message]
        assert (row.attempt, row.error_type) == (before.attempt, before.error_type)
        if change is RetryChange.NOW:
            order = local_stores.order_of(self.state, group, row.store, message)
            at_store = row.kind == FailedKind.LOCAL and order is not None
            assert at_store or (row.kind == FailedKind.RETRY and row.due <= self.now)
            return
        kind = FailedKind.LETTER if change is RetryChange.BURY else FailedKind.ABANDONED
        assert (row.kind, row.reason) == (kind, "why")
        if before.store in group.stores and group.has_owner(group.stores[before.store]):
            order = local_stores.order_of(self.state, group, before.store, message)
            assert order is StoreOrder.DROP, "its store goes on with it"

    def names_of_groups(self) -> list[str]:
        """Return the joined groups: of broadcast members their own groups."""
        return [group.name for group in self.state.groups.by_id.values() if group.positions]

    def letters(self, group: str) -> list[Message]:
        if group not in self.state.groups.by_name:
            return []
        found, _following = list_letters(self.state, group, 0, 1_000)
        open_ones = [letter.fields for letter in found if letter.fields["state"] == "dead"]
        return [(self.topic_ids[f["topic"]], f["partition"], f["offset"]) for f in open_ones]

    def drain(self) -> None:
        """End all faults, and process everything to the end."""
        self.killers.clear()
        self.outage = False
        while self.undecided:
            self.decide()
        while self.dead:
            self.lose()
        for consumer in list(self.offline):
            self.come_online(consumer)
        for name in self.names_of_groups():
            self.do(PauseGroup(name, paused=False))
        for _ in range(400):
            self.now = next_due(self.state, self.now) or self.now
            self.tick()
            for group in self.names_of_groups():
                for message in self.letters(group):
                    self.ledgers[group].replayed(message)
                    self.do(ReplayLetters(group, ((self.topic_names[message[0]], *message[1:]),)))
            for consumer in list(self.consumers):
                self.empty_store(consumer)
                self.finish(consumer)
            self.adopt_orphans()
            if all(self.ended(group) for group in {c.group for c in self.consumers}):
                return
        raise AssertionError("not drained")

    def finish(self, consumer: ConsumerProcess) -> None:
        """Let a consumer process all it holds, and fetch once more."""
        self.enter(consumer)
        self.return_unprocessed(consumer)
        wish = FetchLimits(50, 10_000, max_run_rows=100)
        with suppress(RequestRejected):
            found = choose_candidates(
                *(self.state, consumer.group, consumer.name, consumer.generation),
                *(self.end, wish, self.now),
            )
            self.receive(consumer, found)
        while consumer.replies:
            self.arrive(consumer)
        self.return_unprocessed(consumer)
        for message in sorted(consumer.held):
            self.effect(consumer, message)
            consumer.acks.append(message)
        consumer.held.clear()
        self.flush(consumer)

    def empty_store(self, consumer: ConsumerProcess) -> None:
        """Let a consumer process all that is in its store."""
        store = self.stores.get(consumer)
        for _ in range(20 if store is not None and store.copies else 0):
            assert store is not None
            self.tell(consumer, store)
            if not store.copies or consumer not in self.consumers:
                return
            self.retry_stored(consumer, store)

    def adopt_orphans(self) -> None:
        """Let an operator adopt every store without an owner."""
        for group in list(self.state.groups.by_id.values()):
            for store_id, store in list(group.stores.items()):
                if store.messages and not group.has_owner(store):
                    self.do(AdoptStore(group.name, store_id))
        while self.do(AdvanceGroupWork()).more:
            pass

    def ended(self, name: str) -> bool:
        group, ledger = self.group(name), self.ledgers[name]
        return (
            not group.leases
            and not group.fences
            and not any(store.messages for store in group.stores.values())
            and ledger.done | ledger.abandoned == set(self.keys)
        )


STEPS: dict[str, float] = {
    "act": 100, "visit_store": 12, "order_stores": 1, "cut": 0.5,
    "produce": 9, "tick": 4, "start": 1.5, "decide": 3, "operate": 2, "lose": 1,
    "reconnect": 0.7, "die": 0.5, "leave": 3, "again": 0.3, "crash": 0.6, "grow": 0.2, "pause": 0.2,
    "reset": 0.1, "break_down": 0.15, "mend": 0.5,
}  # fmt: skip


# of runs in which consumers with stores are lost, cut off and replaced
FLAPPING = STEPS | {
    "visit_store": 80, "order_stores": 5, "cut": 8, "lose": 8, "die": 2, "again": 5, "produce": 15,
    "tick": 8, "reset": 1.5,
}  # fmt: skip


# of runs in which operators touch what is retried
TOUCHED = FLAPPING | {"touch_retries": 25, "visit_store": 40, "cut": 2}


def replayed_equals(sim: Sim) -> None:
    """Check that recovery makes the same state from the log, and from the tables."""
    again = sim.replayed()
    assert again.groups == sim.state.groups
    assert rows(again) == rows(sim.state)
    machine.save(sim.state)
    assert machine.load(sim.state.tables).groups == sim.state.groups


def run_steps(sim: Sim, seed: int, steps: int) -> None:
    """Check each step of a run, and what recovery makes of it."""
    for number in range(steps):
        try:
            sim.step()
            sim.check()
        except AssertionError as wrong:
            raise AssertionError(f"seed {seed}, step {number}: {wrong}") from wrong
    replayed_equals(sim)


def shorten_pauses(patch: pytest.MonkeyPatch) -> None:
    """Shorten pauses and poison isolation to the time of a run."""
    patch.setattr(poison, "BATCH_LIMITS", (0, 2))
    patch.setattr(failed_messages, "ISOLATED_AFTER", 2)
    patch.setattr(circuit_breaker, "MIN_PAUSE", SECOND // 2)
    patch.setattr(circuit_breaker, "MAX_PAUSE", 2 * SECOND)
