"""Instances: producers that outlive their processes, and which process of one is the
current one.

Each incarnation gets an epoch of its own; what an older one sends late is refused, so
that a process that was taken for dead cannot send after the one that took its place has
begun.

An instance of which no process was seen for 30 days is forgotten, its epochs are not:
none is ever given out twice.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.base import Event, InstanceRegistered, InstancesForgotten, InstancesSeen
from txmq.core.state.state import Outcome, Rejected, State
from txmq.errors import BadRequest, ProducerFenced
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import Place

LAST_EPOCH = 2**32 - 1
DAY = 24 * 3600 * 1_000_000  # how exactly it is known when one was last seen
KEPT = 30 * DAY


class RegisterInstance(NamedTuple):
    """A process takes the place of all earlier ones of its name; the reply is its
    epoch.
    """

    service: str
    instance: str


def current(state: State, service: str, instance: str) -> int:
    """The epoch of the incarnation that may send; 0 = none was ever registered."""
    row: Any = state.tables[t.INSTANCES].get(key_of(service, instance))
    return 0 if row is None else row[0]


def fenced(state: State, service: str, instance: str, incarnation: int) -> Rejected | None:
    """Why this incarnation may not send any more. A number that was never given out is
    an older log's: refused, too.
    """
    newest = current(state, service, instance)
    if incarnation == newest:
        return None
    told = f"incarnation {incarnation} of instance {instance!r} of {service!r}: the current one is {newest}"
    hint = "another process has taken its place: end this one, or start it again so that it registers anew"
    return Rejected(ProducerFenced, told, hint, {"incarnation": incarnation, "current": newest})


def decide_register(state: State, command: RegisterInstance, now: int) -> Outcome | Rejected:
    del now
    epoch = (current(state, command.service, command.instance) or state.last_forgotten_epoch) + 1
    if epoch > LAST_EPOCH:
        return Rejected(
            BadRequest,
            f"instance {command.instance!r} has used up its epochs",
            "give it another name",
        )
    return Outcome((InstanceRegistered(command.service, command.instance, epoch),), epoch)


def apply_registered(state: State, event: InstanceRegistered, place: Place) -> None:
    state.tables[t.INSTANCES].put(
        key_of(event.service, event.instance), (event.epoch, place.stored_at)
    )


def old(
    state: State, now: int, start: bytes, connected: frozenset[bytes], most: int
) -> tuple[tuple[Event, ...], bytes | None]:
    """What is to be recorded of `most` instances from `start` on, and where the next
    ones begin; None = nowhere.
    """
    rows: Any = list(islice(state.tables[t.INSTANCES].range(start), most + 1))
    seen = tuple(key for key, (_epoch, at) in rows[:most] if key in connected and at < now - DAY)
    forgotten = tuple(
        key for key, (_epoch, at) in rows[:most] if key not in connected and at < now - KEPT
    )
    events: tuple[Event, ...] = (InstancesSeen(seen),) if seen else ()
    events += (InstancesForgotten(forgotten),) if forgotten else ()
    return events, rows[most][0] if len(rows) > most else None


def apply_seen(state: State, event: InstancesSeen, place: Place) -> None:
    for key in event.keys:
        row: Any = state.tables[t.INSTANCES].get(key)
        state.tables[t.INSTANCES].put(key, (row[0], place.stored_at))


def apply_forgotten(state: State, event: InstancesForgotten, place: Place) -> None:
    del place
    for key in event.keys:
        row: Any = state.tables[t.INSTANCES].get(key)
        state.last_forgotten_epoch = max(state.last_forgotten_epoch, row[0])
        state.tables[t.INSTANCES].delete(key)


def key_of(service: str, instance: str) -> bytes:
    """The key of an instance in its table."""
    return f"{service}\0{instance}".encode()


DECIDERS = {RegisterInstance: decide_register}
APPLIERS: dict[type, Any] = {
    InstanceRegistered: apply_registered,
    InstancesSeen: apply_seen,
    InstancesForgotten: apply_forgotten,
}
