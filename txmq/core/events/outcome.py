"""The result of a decision: events and a reply.

A rule refuses a command by raising what the client raises: a `RequestRejected`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.core.events.base import Event, RecordContext
    from txmq.core.state.state import State


class Outcome(NamedTuple):
    """An accepted command: the events to record, in order, and the reply to send once
    they are durable.

    `attachment` belongs to the first event. With `early`, the reply need not wait until
    the events are durable: losing them does no more harm than losing the reply (first
    leases, heartbeats). With `lazy`, the events are written with the next others:
    nothing is lost with them that anybody relies on.
    """

    events: tuple[Event, ...] = ()
    reply: object = None
    attachment: bytes = b""
    early: bool = False
    lazy: bool = False


# The tables of a rule module: command type to `decide` function, and event type to
# `apply` function.
Deciders: TypeAlias = "dict[type, Callable[[State, Any, int], Outcome]]"
Appliers: TypeAlias = "dict[type, Callable[[State, Any, RecordContext], None]]"
