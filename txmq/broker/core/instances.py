"""Instances: producers that outlive their processes, and which process of one is the current one.

Each incarnation gets an epoch of its own; what an older one sends late is refused, so that a process that was taken
for dead cannot send after the one that took its place has begun.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.broker.core import tables as t
from txmq.broker.core.events import InstanceRegistered
from txmq.broker.core.state import Outcome, Rejected, State
from txmq.errors import BadRequest, ProducerFenced

if TYPE_CHECKING:
    from txmq.broker.core.events import Place

LAST_EPOCH = 2**32 - 1


class RegisterInstance(NamedTuple):
    """A process takes the place of all earlier ones of its name; the reply is its epoch."""

    service: str
    instance: str


def current(state: State, service: str, instance: str) -> int:
    """The epoch of the incarnation that may send; 0 = none was ever registered."""
    row: Any = state.tables[t.INSTANCES].get(_key(service, instance))
    return 0 if row is None else row[0]


def fenced(state: State, service: str, instance: str, incarnation: int) -> Rejected | None:
    """Why this incarnation may not send any more. A number that was never given out is an older log's: refused, too."""
    newest = current(state, service, instance)
    if incarnation == newest:
        return None
    told = f"incarnation {incarnation} of instance {instance!r} of {service!r}: the current one is {newest}"
    hint = "another process has taken its place: end this one, or start it again so that it registers anew"
    return Rejected(ProducerFenced, told, hint, {"incarnation": incarnation, "current": newest})


def decide_register(state: State, command: RegisterInstance, now: int) -> Outcome | Rejected:
    del now
    epoch = current(state, command.service, command.instance) + 1
    if epoch > LAST_EPOCH:
        return Rejected(BadRequest, f"instance {command.instance!r} has used up its epochs", "give it another name")
    return Outcome((InstanceRegistered(command.service, command.instance, epoch),), epoch)


def apply_registered(state: State, event: InstanceRegistered, place: Place) -> None:
    state.tables[t.INSTANCES].put(_key(event.service, event.instance), (event.epoch, place.stored_at))


def _key(service: str, instance: str) -> bytes:
    return f"{service}\0{instance}".encode()


DECIDERS = {RegisterInstance: decide_register}
APPLIERS = {InstanceRegistered: apply_registered}
