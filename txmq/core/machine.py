"""The state machine of the broker: `decide` judges a command, `apply` records an event.

Each rule module has two tables: `DECIDERS` (command type: function) and `APPLIERS`
(event type: function). The folders' `rules` lists name the modules; this module joins
them. Recovery and followers call only `apply`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core import audit, persistence, users
from txmq.core.audit import Audited, decide_audited
from txmq.core.consumers import rules as consumer_rules
from txmq.core.events.audit import OperatorActed, parts_in
from txmq.core.events.base import Booted, Event, RecordContext
from txmq.core.replay import rules as replay_rules
from txmq.core.retention import rules as retention_rules
from txmq.core.state import visibility
from txmq.core.topics import rules as topic_rules
from txmq.core.transactions import batched, lost_records
from txmq.core.transactions import rules as transaction_rules

if TYPE_CHECKING:
    from txmq.core.events.outcome import Appliers, Deciders, Outcome, Rejected
    from txmq.core.state.state import State

RULES = (
    *topic_rules.RULES,
    *consumer_rules.RULES,
    *replay_rules.RULES,
    *transaction_rules.RULES,
    *retention_rules.RULES,
    users,
)


def apply_booted(state: State, event: Booted, context: RecordContext) -> None:
    """Apply: the broker started. No client is connected, and the recovered log is
    durable.
    """
    visibility.drop_lifted(state)
    lost_records.apply_booted(state, context.stored_at)
    state.boot_epoch = event.boot_epoch
    consumer_rules.apply_booted(state, event, context)


def decide_with_audit(state: State, command: Audited, now: int) -> Outcome | Rejected:
    return decide_audited(state, command, now, decide)


def apply_acted(state: State, event: OperatorActed, context: RecordContext) -> None:
    """Apply: each part in its order. A change of the time holds for what comes behind
    the record.
    """
    for one, its_context in parts_in(event, context):
        APPLIERS[type(one)](state, one, its_context)


DECIDERS: Deciders = {Audited: decide_with_audit}
APPLIERS: Appliers = {Booted: apply_booted, OperatorActed: apply_acted, **audit.APPLIERS}
for _module in RULES:
    DECIDERS.update(_module.DECIDERS)
    APPLIERS.update(_module.APPLIERS)


def decide(state: State, command: object, now: int) -> Outcome | Rejected:
    """Return the outcome of a command at the time `now` (µs). The state stays the
    same.
    """
    return DECIDERS[type(command)](state, command, now)


def apply(state: State, event: Event, context: RecordContext) -> None:
    """Record an event of the log. Total and deterministic: independent of settings,
    clock and chance.
    """
    state.stored_at = context.stored_at
    APPLIERS[type(event)](state, event, context)


def apply_after_loss(state: State, event: Event, context: RecordContext) -> bool:
    """Apply an event of a log that has lost records. False = it needs a lost record.

    Such an event is left out from the point where it fails, and counts as lost itself.
    Its transactions and messages stay as they are, for an operator; events that need it
    are left out in turn. Of several events in one record only the affected ones are
    left out.
    """
    whole = True
    for one, its_context in batched.events_in(event, context):
        try:
            apply(state, one, its_context)
        except (AssertionError, LookupError):
            # The event relies on rows that only a lost record could have written.
            lost_records.apply_lost(state, context.end)
            whole = False
    return whole


save, load = persistence.save, persistence.load
