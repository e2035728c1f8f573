"""The state machine of the broker: `decide` judges a command, `apply` records an event.

Each rule module has two tables: `DECIDERS` (command type: function) and `APPLIERS`
(event type: function). `RULES` has the modules, and this one joins their tables.
Recovery and followers call only `apply`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core import audit, log_list, persistence, series, users
from txmq.core.audit import Audited, decide_audited
from txmq.core.consumers import (
    acks,
    background_work,
    clones,
    damaged_letters,
    delivery,
    effects,
    failures,
    group_redrives,
    group_settings,
    leases,
    letter_edits,
    letter_exports,
    letter_notes,
    letter_redrives,
    letter_trials,
    membership,
    resets,
    restart,
    retries,
    store_adoption,
    store_reports,
)
from txmq.core.events.audit import OperatorActed, parts_in
from txmq.core.events.base import Booted, Event, RecordContext
from txmq.core.replay import abandoning, building, cleanup, orders, policies, putting_back
from txmq.core.retention import (
    audit_entries,
    broker_time,
    letter_retention,
    outcome_expiry,
    past_failures,
    relocation,
    topic_retention,
)
from txmq.core.state import visibility
from txmq.core.topics import delay_rules, producer_owners, restored_log, schemas, sends, topics
from txmq.core.transactions import (
    batched,
    decisions,
    half_storage,
    instances,
    jobs,
    large_publication,
    lost_records,
    timers,
    unverified,
    xa,
)
from txmq.errors import RequestRejected

if TYPE_CHECKING:
    from txmq.core.events.outcome import Appliers, Deciders, Outcome
    from txmq.core.state.state import State

RULES = (
    topics, schemas, sends, producer_owners, delay_rules, restored_log,
    membership, group_settings, resets, clones, background_work, effects, delivery, acks, leases,
    failures, retries, store_reports, store_adoption, letter_notes, letter_edits, letter_exports,
    letter_redrives, damaged_letters, group_redrives, letter_trials,
    orders, building, putting_back, abandoning, cleanup, policies,
    half_storage, decisions, batched, jobs, large_publication, xa, unverified, instances, timers,
    audit_entries, broker_time, outcome_expiry, past_failures, topic_retention, relocation,
    letter_retention,
    users, log_list, series,
)  # fmt: skip


def apply_booted(state: State, event: Booted, context: RecordContext) -> None:
    """Apply: the broker started. No client is connected, and the recovered log is
    durable.
    """
    visibility.drop_lifted(state)
    lost_records.apply_booted(state, context.stored_at)
    state.boot_epoch = event.boot_epoch
    restart.apply_booted(state, context)


def decide_with_audit(state: State, command: Audited, now: int) -> Outcome:
    return decide_audited(state, command, now, DECIDERS)


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


def decide(state: State, command: object, now: int) -> Outcome | RequestRejected:
    """Return the outcome of a command at the time `now` (µs), or its refusal. The state
    stays the same.
    """
    try:
        return DECIDERS[type(command)](state, command, now)
    except RequestRejected as refused:
        return refused


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
