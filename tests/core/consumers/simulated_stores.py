"""Simulated local stores: consumers keep failing messages, retry them, and report.

A store's owner keeps its part of the contract. Later messages of a stored key follow
it into the store. After a start, everything is told before anything is retried. What
the broker does not leave in the store is forgotten.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.core.consumers.simulated_clients import Clients
from txmq.core.consumers import store_reports
from txmq.core.consumers.commands import (
    AdoptStore,
    AdvanceGroupWork,
    ChangeRetries,
    ReportStored,
    RetryChange,
    StoredEntry,
)
from txmq.core.events.consumers import RetriesChanged, StoreReported
from txmq.core.state import local_stores
from txmq.core.state.failed_rows import FailedKind, decode_move
from txmq.core.state.local_stores import StoreOrder
from txmq.errors import RequestRejected, UnknownGroup, UnknownMember
from txmq.model.retry import FailureReport

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.core.consumers.simulated_processes import ConsumerProcess, HeldMessage, Message

SHORT_RETRIES = 4  # attempts after which a store gives up


@dataclass
class StoredCopy:
    """A message in a store. `told`: the broker knows this state. `fresh`: it may be
    retried while the broker is away. It came, or was told, since the process began, and
    no message before it of its key went to somebody else.
    """

    attempt: int
    generation: int
    state: str = "stored"
    due: int = 0
    told: bool = False
    failed: bool = False
    fresh: bool = True


@dataclass(eq=False)
class SimulatedStore:
    """The disk of a consumer. `kind` is the name of the group that it belongs to."""

    store_id: bytes
    kind: str
    copies: dict[Message, StoredCopy] = field(default_factory=dict)  # as they came

    def tell_again(self, *, fresh: bool) -> None:
        """Join anew: nothing is known to be told. `fresh`: by the same process."""
        for copy in self.copies.values():
            copy.told = False
            copy.fresh &= fresh


class StoringClients(Clients, ABC):
    """Consumers of which two in three have a local store."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.stores: dict[ConsumerProcess, SimulatedStore] = {}
        self.shelved: list[SimulatedStore] = []  # of processes that are gone
        self.offline: set[ConsumerProcess] = set()

    def do(self, command: object) -> Any:
        since = len(self.log)
        reply = super().do(command)
        for event in self.events(since):
            if isinstance(event, StoreReported | RetriesChanged):
                ledger = self.ledgers[self.state.groups.by_id[event.group_id].name]
                moves = [decode_move(move) for move in event.moves]
                for topic_id, partition, offset, row in moves:
                    if isinstance(event, StoreReported):
                        ledger.deliveries[topic_id, partition, offset] = row.attempt
                    if row.kind == FailedKind.ABANDONED:
                        ledger.abandoned.add((topic_id, partition, offset))
            if isinstance(event, StoreReported):
                ledger.done.update(event.settled)
                ledger.deliveries.subtract(event.returned)
        return reply

    def enter(self, consumer: ConsumerProcess, held: tuple[Any, ...] | None = None) -> None:
        super().enter(consumer, held)
        if consumer in self.stores:
            self.stores[consumer].tell_again(fresh=True)

    def give_store(self, consumer: ConsumerProcess) -> None:
        """Give a new process a disk, perhaps that of another one that is gone."""
        left = [store for store in self.shelved if store.kind == consumer.kind]
        if consumer.kind == "cast" or int(consumer.instance[1:]) % 3 == 0:
            return
        if left and self.random.random() < 0.7:
            store = self.random.choice(left)
            self.shelved.remove(store)
        else:
            self.names += 1
            store = SimulatedStore(self.names.to_bytes(16), consumer.kind)
        self.stores[consumer] = store
        store.tell_again(fresh=False)

    def kill(self, consumer: ConsumerProcess) -> None:
        super().kill(consumer)
        self.shelve(consumer)

    def shelve(self, consumer: ConsumerProcess) -> None:
        """End a process: its disk is left, or is lost with it."""
        self.offline.discard(consumer)
        store = self.stores.pop(consumer, None)
        if store is not None and self.random.random() < 0.6:
            self.shelved.append(store)

    def replace(self, consumer: ConsumerProcess) -> None:
        self.shelve(consumer)
        before = len(self.consumers)
        super().replace(consumer)
        if len(self.consumers) == before:
            self.give_store(self.consumers[-1])

    def arrive(self, consumer: ConsumerProcess) -> None:
        """Process a reply; later messages of a stored key follow it."""
        super().arrive(consumer)
        store = self.stores.get(consumer)
        if store is None:
            return
        for message in self.in_order(consumer.held):
            if message in store.copies or self.is_behind(consumer, store, message):
                self.put(consumer, store, message, consumer.held.pop(message), failed=False)

    def is_behind(self, consumer: ConsumerProcess, store: SimulatedStore, message: Message) -> bool:
        return consumer.ordered and any(
            self.key_of(other) == self.key_of(message)
            for other, copy in store.copies.items()
            if copy.state != "acked"
        )

    def put(
        self,
        consumer: ConsumerProcess,
        store: SimulatedStore,
        message: Message,
        held: HeldMessage,
        *,
        failed: bool,
    ) -> None:
        store.copies[message] = StoredCopy(
            held.attempt - (not failed), consumer.generation, failed=failed
        )

    def fail(self, consumer: ConsumerProcess, message: Message) -> None:
        store = self.stores.get(consumer)
        if store is None or self.random.random() < 0.3:
            super().fail(consumer, message)
            return
        self.put(consumer, store, message, consumer.held.pop(message), failed=True)
        for other in self.in_order(consumer.held):
            if self.is_behind(consumer, store, other):
                self.put(consumer, store, other, consumer.held.pop(other), failed=False)

    def visit_store(self) -> None:
        """Let a consumer tell what its store has, or retry a message there."""
        consumer = self.some()
        store = None if consumer is None else self.stores.get(consumer)
        if consumer is None or store is None or not store.copies:
            return
        untold = any(not copy.told for copy in store.copies.values())
        if consumer in self.offline:
            if self.random.random() < 0.2:
                self.come_online(consumer)
            else:
                self.retry_stored(consumer, store)
        elif untold and self.random.random() < 0.7:
            self.tell(consumer, store)
        else:
            self.retry_stored(consumer, store)

    def cut(self) -> None:
        """Cut a consumer with a store off from the broker."""
        consumer = self.some()
        if consumer in self.stores:
            self.offline.add(consumer)

    def come_online(self, consumer: ConsumerProcess) -> None:
        """Connect to the broker again; what was on its way is lost."""
        self.offline.discard(consumer)
        group = self.state.groups.by_name.get(consumer.group)
        member = None if group is None else group.members.get(consumer.name)
        if member is not None and member.instance == consumer.instance:
            self.come_back(consumer)
        else:
            self.replace(consumer)

    @abstractmethod
    def come_back(self, consumer: ConsumerProcess) -> None:
        """Join again, with the messages it holds."""

    def act_as(self, consumer: ConsumerProcess) -> None:
        """Let a consumer do something. One that is cut off fails what it holds."""
        store = self.stores.get(consumer)
        if store is None or consumer not in self.offline:
            super().act_as(consumer)
        elif consumer.held:
            message = self.in_order(consumer.held)[0]
            self.put(consumer, store, message, consumer.held.pop(message), failed=True)

    def in_order(self, messages: Iterable[Message]) -> list[Message]:
        """Return messages in the order of their publication."""
        rank = {message: number for number, message in enumerate(self.keys)}
        return sorted(messages, key=rank.__getitem__)

    def untold(self, consumer: ConsumerProcess) -> list[Message]:
        """Return the messages of its store that the broker may have leased to it."""
        store = self.stores.get(consumer)
        copies = {} if store is None else store.copies
        return [m for m, copy in copies.items() if not copy.told]

    def retry_stored(self, consumer: ConsumerProcess, store: SimulatedStore) -> None:
        """Run the handler for a message that the broker leaves here."""
        waiting = [m for m, copy in store.copies.items() if copy.state != "acked"]
        heads: dict[tuple[int, int], Message] = {}
        for message in self.in_order(waiting):
            heads.setdefault(self.key_of(message) if consumer.ordered else message[:2], message)
        offline = consumer in self.offline
        ready = [
            m for m in heads.values() if store.copies[m].told or (offline and store.copies[m].fresh)
        ]
        if not ready:
            return
        message = self.random.choice(ready)
        copy, chance = store.copies[message], self.random.random()
        copy.told = False
        if self.outage or chance < 0.4:
            copy.attempt, copy.due, copy.failed = copy.attempt + 1, self.now, True
            if copy.attempt >= SHORT_RETRIES:
                copy.state = "dead"
        elif chance < 0.5:
            copy.state = "returned"
        else:
            self.effect(consumer, message)
            copy.state = "acked"

    def tell(self, consumer: ConsumerProcess, store: SimulatedStore) -> None:
        """Report everything that is not told, in the order of keys."""
        untold = self.in_order(m for m, copy in store.copies.items() if not copy.told)
        some = untold[: self.random.randint(1, 5)]
        replies = self.report(consumer.group, consumer.name, consumer.generation, store, some)
        for message, reply in zip(some, replies, strict=False):
            if isinstance(reply, RequestRejected):
                self.known(consumer, reply)
                return
            self.obey(consumer, store, message, *reply)
        if consumer in self.consumers:
            self.obey_orders(consumer, store)

    def report(
        self, group: str, member: str, generation: int, store: SimulatedStore, some: list[Message]
    ) -> list[Any]:
        """Return verdict and fence of each message, or a refusal."""
        replies: list[Any] = []
        last_of: dict[tuple[int, int], Message] = {}
        for message in some:
            copy = store.copies[message]
            report = FailureReport("E", "text", "away" if self.outage else "local")
            entry = StoredEntry(
                self.topic_names[message[0]], *message, copy.state, copy.attempt, copy.due,
                report if copy.failed else None, copy.generation,
            )  # fmt: skip
            source = store_reports.key_source(self.state, group, entry)
            key = self.keys[message] if source is not None else None
            behind = last_of.get(self.key_of(message))
            entry = entry._replace(source=source, key_hash=key, behind=behind)
            if copy.state != "acked":
                last_of[self.key_of(message)] = message
            reply = self.do(
                ReportStored(group, member, generation, store.store_id, "host", (entry,))
            )
            if isinstance(reply, RequestRejected):
                assert type(reply) in (UnknownMember, UnknownGroup)
                return [*replies, reply]
            replies.append((reply.verdicts[0], reply.fences[0]))
        return replies

    def obey(
        self,
        consumer: ConsumerProcess,
        store: SimulatedStore,
        message: Message,
        verdict: str,
        fence: int,
    ) -> None:
        """Keep what the broker leaves here, and forget the rest."""
        assert verdict != "unknown"
        if verdict == "kept":
            store.copies[message].told = store.copies[message].fresh = True
        else:
            del store.copies[message]
        if verdict == "elsewhere" and consumer.ordered:
            for other, copy in store.copies.items():
                copy.fresh &= self.key_of(other) != self.key_of(message)
        if fence and consumer.ordered:
            key = self.key_of(message)
            self.key_failed(consumer, key, fence, careful=verdict == "elsewhere")

    def obey_orders(self, consumer: ConsumerProcess, store: SimulatedStore) -> None:
        reply = self.do(
            ReportStored(consumer.group, consumer.name, consumer.generation, store.store_id, "host")
        )
        if isinstance(reply, RequestRejected):
            self.known(consumer, reply)
            return
        for message, order in reply.orders:
            copy = store.copies.get(message)
            if order is StoreOrder.RETRY and copy is not None:
                copy.due, copy.told = copy.due - 1, False
            else:
                store.copies[message] = StoredCopy(
                    0 if copy is None else copy.attempt, 1, state="returned"
                )

    def order_stores(self) -> None:
        """Let an operator retry or drop messages of a store, or adopt it."""
        known = [
            (group, store_id)
            for group in self.state.groups.by_id.values()
            for store_id in group.stores
        ]
        if not known:
            return
        group, store_id = self.random.choice(known)
        messages = tuple(
            (self.topic_names[m[0]], *m[1:]) for m in self.local_messages(group.name, store_id)
        )
        chance, store = self.random.random(), group.stores[store_id]
        if not group.has_owner(store) or store.adopted:
            self.adopt(group.name, store_id)
        elif messages and chance < 0.5:
            self.do(ChangeRetries(group.name, RetryChange.NOW, messages[:2]))
        elif messages and chance < 0.65:
            skip = ChangeRetries(group.name, RetryChange.SKIP, messages[:1], "no use")
            assert not self.do(skip).refused

    def local_messages(self, group: str, store_id: bytes) -> list[Message]:
        """Return the messages that the broker knows in a store."""
        return list(local_stores.messages(self.state, self.group(group), store_id))

    def adopt(self, group: str, store_id: bytes) -> None:
        """Adopt a store without an owner, perhaps with a copy of what it knows."""
        copies = [store for store in self.shelved if store.store_id == store_id]
        for store in copies if self.random.random() < 0.7 else ():
            self.report(group, "", 0, store, self.in_order(store.copies))
        self.do(AdoptStore(group, store_id))
        if self.random.random() < 0.8:
            while self.do(AdvanceGroupWork()).more:
                pass
