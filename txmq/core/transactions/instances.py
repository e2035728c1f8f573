"""Producer instances: named producers that outlive their processes.

Each process of an instance, its incarnation, gets a producer epoch. Whatever an older
incarnation sends is refused. So a process that was taken for dead cannot send once its
successor has begun.

An instance without a connected process for 30 days is forgotten. Its epochs are not:
none is assigned twice.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.events.base import Event
from txmq.core.events.outcome import Appliers, Deciders, Outcome
from txmq.core.events.transactions import InstanceRegistered, InstancesForgotten, InstancesSeen
from txmq.errors import BadRequest, ProducerFenced
from txmq.model.units import DAY
from txmq.store import tables as t

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State

MAX_EPOCH = 2**32 - 1
SEEN_RESOLUTION = DAY  # of the time when an instance was last seen
INSTANCE_RETENTION = 30 * DAY


class RegisterInstance(NamedTuple):
    """Register a process as the successor of all earlier ones of its instance.

    The reply is its epoch.
    """

    service: str
    instance: str


def current_epoch(state: State, service: str, instance: str) -> int:
    """Return the epoch of the incarnation that may send; 0 = none was registered."""
    row: Any = state.tables[t.INSTANCES].get(instance_key(service, instance))
    return 0 if row is None else row[0]


def check_incarnation(state: State, service: str, instance: str, incarnation: int) -> None:
    """Refuse another incarnation than the current one.

    A number that was never assigned comes from another log. It is refused, too.
    """
    newest = current_epoch(state, service, instance)
    if incarnation == newest:
        return
    message = (
        f"incarnation {incarnation} of instance {instance!r} of {service!r}:"
        f" the current one is {newest}"
    )
    hint = (
        "another process has taken its place:"
        " end this one, or start it again so that it registers anew"
    )
    raise ProducerFenced(message, hint=hint, detail={"incarnation": incarnation, "current": newest})


def register_instance(state: State, command: RegisterInstance, _now: int) -> Outcome:
    epoch = (
        current_epoch(state, command.service, command.instance) or state.last_forgotten_epoch
    ) + 1
    if epoch > MAX_EPOCH:
        raise BadRequest(
            f"instance {command.instance!r} has used up its epochs",
            hint="give the instance another name",
        )
    return Outcome((InstanceRegistered(command.service, command.instance, epoch),), epoch)


def apply_registered(state: State, event: InstanceRegistered, context: RecordContext) -> None:
    state.tables[t.INSTANCES].put(
        instance_key(event.service, event.instance), (event.epoch, context.stored_at)
    )


def find_expired(
    state: State, now: int, start: bytes, connected: frozenset[bytes], most: int
) -> tuple[tuple[Event, ...], bytes | None]:
    """Return the events for `most` instances from `start` on, and where the next begin.

    The second is None after the last instance.
    """
    rows: Any = list(islice(state.tables[t.INSTANCES].range(start), most + 1))
    seen = tuple(
        key for key, (_epoch, at) in rows[:most] if key in connected and at < now - SEEN_RESOLUTION
    )
    forgotten = tuple(
        key
        for key, (_epoch, at) in rows[:most]
        if key not in connected and at < now - INSTANCE_RETENTION
    )
    events: tuple[Event, ...] = (InstancesSeen(seen),) if seen else ()
    events += (InstancesForgotten(forgotten),) if forgotten else ()
    return events, rows[most][0] if len(rows) > most else None


def apply_seen(state: State, event: InstancesSeen, context: RecordContext) -> None:
    for key in event.keys:
        row: Any = state.tables[t.INSTANCES].get(key)
        state.tables[t.INSTANCES].put(key, (row[0], context.stored_at))


def apply_forgotten(state: State, event: InstancesForgotten, _context: RecordContext) -> None:
    for key in event.keys:
        row: Any = state.tables[t.INSTANCES].get(key)
        state.last_forgotten_epoch = max(state.last_forgotten_epoch, row[0])
        state.tables[t.INSTANCES].delete(key)


def instance_key(service: str, instance: str) -> bytes:
    """Return the key of an instance in its table."""
    return f"{service}\0{instance}".encode()


DECIDERS: Deciders = {RegisterInstance: register_instance}
APPLIERS: Appliers = {
    InstanceRegistered: apply_registered,
    InstancesSeen: apply_seen,
    InstancesForgotten: apply_forgotten,
}
