"""Owners of producer ids: where there are users, the one whose session sent first.

Consumers see a producer's id, because it is a part of each message's id. Another user
that sent as this producer could use up its next sequence numbers: the producer's own
message would then pass for a repeated one, and be lost with a receipt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.events.outcome import Appliers, Deciders
from txmq.core.events.users import ProducerOwned
from txmq.errors import NotPermitted

if TYPE_CHECKING:
    from txmq.core.events.base import RecordContext
    from txmq.core.state.state import State


def check_owner(state: State, producer_id: bytes, user: str) -> None:
    """Refuse a user whose producer this is not. `user` is "" where there are none, and
    for the broker's own parts.
    """
    producer = state.producers.get(producer_id)
    if producer is None or state.users.may_act_for(user, producer.owner):
        return
    raise NotPermitted(
        f"producer {producer_id.hex()} belongs to another user",
        hint="send with a client of your own; the spool of another user is sent by an admin",
    )


def claim(state: State, producer_id: bytes, user: str) -> tuple[ProducerOwned, ...]:
    """Return the event that gives a producer to a user, where it is nobody's."""
    producer = state.producers.get(producer_id)
    owner = "" if producer is None else producer.owner
    if not user or owner in state.users.by_name:
        return ()
    return (ProducerOwned(producer_id, user),)


def apply_owned(state: State, event: ProducerOwned, _context: RecordContext) -> None:
    state.producers[event.producer].owner = event.user
    state.dirty_producers.add(event.producer)


DECIDERS: Deciders = {}  # the rules of sends give the event
APPLIERS: Appliers = {ProducerOwned: apply_owned}
