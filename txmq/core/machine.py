"""The broker's state machine: `decide` judges a command, `apply` records an event.
Recovery calls only `apply`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.core import persistence
from txmq.core.consumers import rules as consumer_rules
from txmq.core.events.base import Booted, Event, Place
from txmq.core.retention import letter_retention, outcome_expiry, relocation, topic_retention
from txmq.core.state import visibility
from txmq.core.topics import delay_rules, sends, topics
from txmq.core.transactions import (
    batched,
    decisions,
    half_storage,
    instances,
    jobs,
    large_publication,
    lost_records,
    timers,
    xa,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.core.state.state import Outcome, Rejected, State

RULES = (
    topics,
    sends,
    delay_rules,
    half_storage,
    decisions,
    batched,
    jobs,
    large_publication,
    xa,
    instances,
    timers,
    outcome_expiry,
    topic_retention,
    relocation,
    letter_retention,
    consumer_rules,
)


def apply_booted(state: State, event: Booted, place: Place) -> None:
    """Nobody is connected any more, and all that was recovered is durable."""
    visibility.forget_lifted(state)
    lost_records.booted(state, place.stored_at)
    state.boot_epoch = event.boot_epoch
    consumer_rules.apply_booted(state, event, place)


DECIDERS: dict[type, Callable[[State, Any, int], Outcome | Rejected]] = {}
APPLIERS: dict[type, Callable[[State, Any, Place], None]] = {Booted: apply_booted}
for _module in RULES:
    DECIDERS.update(_module.DECIDERS)
    APPLIERS.update(_module.APPLIERS)


def decide(state: State, command: object, now: int) -> Outcome | Rejected:
    """What a command comes to at the time `now` (microseconds); the state is not
    changed.
    """
    return DECIDERS[type(command)](state, command, now)


def apply(state: State, event: Event, place: Place) -> None:
    """Record an event that stands in the log at `place`. Total and deterministic:
    settings, clock and chance play no part.
    """
    state.stored_at = place.stored_at
    APPLIERS[type(event)](state, event, place)


def apply_beyond(state: State, event: Event, place: Place) -> bool:
    """As `apply`, in a log that has lost records: False = what the event builds on is
    among them.

    Then it is left out, from there on where that is found out, and counts as lost, too.
    What it would have decided or published stays as it is, for an operator; an event
    that builds on it is left out in its turn. Of what stands in one record because it
    came together, only that one is left out.
    """
    whole = True
    for one, at in batched.members(event, place):
        try:
            apply(state, one, at)
        except (
            AssertionError,
            LookupError,
        ):  # the rows that every event may take for granted, while nothing is lost
            lost_records.apply_lost(state, place.end)
            whole = False
    return whole


save, load = persistence.save, persistence.load
