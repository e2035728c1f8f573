"""What a local store must hold: a model that knows no tables and no disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tests.recover.local.stores import ToStore
from txmq.model.retry import FailureReport
from txmq.recover.local import Change, LocalStore, Place, State, StoredMessage

HOLDING = {State.STORED, State.RETURNED, State.DEAD}
FOREVER = (1 << 62) - 1


class Put(NamedTuple):
    """One message of a put."""

    stored: ToStore


class Told(NamedTuple):
    """States that the broker was told."""

    entries: tuple[tuple[Place, State, int, int], ...]


class Forget(NamedTuple):
    """Places that were forgotten."""

    places: tuple[Place, ...]


Step = Put | Change | Told | Forget


@dataclass
class Held:
    """A message of the model."""

    message: StoredMessage
    state: State
    attempt: int
    due: int
    failure: FailureReport
    told: bool = False


@dataclass
class Model:
    """Stored messages by place, and of each key the places in their order."""

    held: dict[Place, Held] = field(default_factory=dict)
    chains: dict[str, list[Place]] = field(default_factory=dict)

    def copy(self) -> Model:
        held = {place: replace(one) for place, one in self.held.items()}
        return Model(held, {key: list(chain) for key, chain in self.chains.items()})

    def do(self, step: Step) -> None:
        if isinstance(step, Put):
            self._put(step.stored)
        elif isinstance(step, Change):
            self._change(step)
        elif isinstance(step, Told):
            for place, *state in step.entries:
                one = self.held.get(place)
                if one and [one.state, one.attempt, one.due] == state:
                    one.told = True
        else:
            for place in step.places:
                if (one := self.held.pop(place, None)) is not None:
                    self._unlink(place, one)

    def heads(self) -> dict[Place, Held]:
        """Return what may be handed out."""
        return {
            place: one
            for place, one in self.held.items()
            if one.state is State.STORED
            and (one.message.key is None or self.chains[one.message.key][0] == place)
        }

    def _put(self, stored: ToStore) -> None:
        message, due, failure = stored
        if message.place in self.held:
            return
        self.held[message.place] = Held(message, State.STORED, message.attempt, due, failure)
        if message.key is None:
            return
        chain = self.chains.setdefault(message.key, [])
        at = len(chain)
        while (
            at
            and chain[at - 1].partition == message.place.partition
            and (chain[at - 1].offset > message.place.offset)
        ):
            at -= 1
        chain.insert(at, message.place)

    def _change(self, change: Change) -> None:
        one = self.held.get(change.place)
        if one is None or one.state is not State.STORED:
            return
        one.state, one.attempt, one.due = change.state, change.attempt, change.due
        one.failure = one.failure if change.failure == FailureReport() else change.failure
        one.told = False
        if one.state not in HOLDING:
            self._unlink(change.place, one)

    def _unlink(self, place: Place, one: Held) -> None:
        key = one.message.key
        if key is not None and place in self.chains.get(key, []):
            self.chains[key].remove(place)
            if not self.chains[key]:
                del self.chains[key]


Contents = dict[Place, tuple[State, int, int, FailureReport, bool]]


def contents(model: Model) -> Contents:
    return {
        place: (one.state, one.attempt, one.due, one.failure, one.told)
        for place, one in model.held.items()
    }


def stored_contents(store: LocalStore) -> Contents:
    return {
        entry.place: (entry.state, entry.attempt, entry.due, entry.failure, entry.told)
        for entry in store.entries(None, 10_000)
    }


def check_figures(store: LocalStore, model: Model) -> None:
    """Compare what the store counts, and what it may hand out, with the model."""
    held = [one for one in model.held.values() if one.state in HOLDING]
    stats = store.stats()
    assert stats.messages == len(held), "miscounted"
    assert stats.settled == len(model.held) - len(held), "miscounted"
    assert stats.attempts == sum(one.attempt for one in held), "miscounted"
    assert (stats.oldest > 0) == bool(held), "the oldest of nothing"
    heads = {(one.due, place) for place, one in model.heads().items()}
    due = store.due(FOREVER, 10_000)
    assert [one.place for one in due] == [place for _, place in sorted(heads)], "other heads"
    for one in due:
        store.release(one.place)
    assert store.next_due() == min((at for at, _ in heads), default=None), "another time"
    untold = {place for place, one in model.held.items() if not one.told}
    found = [entry.place for entry in store.untold(1_000)]
    assert len(found) == len(set(found)), "told twice"
    assert set(found) == untold, "other untold ones"
    keys = {one.message.key for one in model.held.values()}
    for key in keys - {None}:
        assert key is not None
        chain = [place for place in model.chains.get(key, []) if place in untold]
        assert [place for place in found if place in chain] == chain, "told out of order"


def check_hand_out(store: LocalStore, model: Model) -> None:
    """Handle everything that is stored, and compare the order of each key."""
    while True:
        due = store.due(FOREVER, 3)
        heads = model.heads()
        assert bool(due) == bool(heads), "nothing is handed out"
        if not due:
            break
        changes = []
        for message in due:
            assert message.place in heads, "out of order"
            held = heads[message.place]
            assert message == held.message._replace(attempt=held.attempt), "another message"
            changes.append(Change(message.place, State.ACKED, message.attempt, 0))
        store.record(changes)
        do_all(model, changes)


def do_all(model: Model, steps: Sequence[Step]) -> None:
    for step in steps:
        model.do(step)
