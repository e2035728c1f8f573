"""Circuit breaker of a consumer group: many keys that fail alike are an outage.

    closed ──(1)──► open ──(2)──► closed
                    │  ▲
                    └(3)

1. Enough keys have failed with one fingerprint.
2. The probe is acked, or an operator resumes the group.
3. The probe fails. The next one, another message, is due after a longer pause.

While the breaker is closed, failures are counted as long as they outnumber the acks of
the same time. An open breaker keeps messages where they are: the group delivers one at
a time, as a probe, and no failure counts. An open breaker survives a restart; the
counts of a closed one do not. Operators see the state "guarded" and the word "flood".

A message that fails again while most of those behind it go through is poison
(`head_of_line`). It is retried for its key alone, and does not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from txmq.core.consumers import head_of_line
from txmq.core.state.consumer_groups import FailingUnit, OpenBreaker
from txmq.model.units import MINUTE, SECOND

if TYPE_CHECKING:
    from txmq.core.state.consumer_groups import ConsumerGroup, MessageRef
    from txmq.core.state.failed_rows import FailedMessage

WINDOW = 10 * MINUTE
MIN_PAUSE, MAX_PAUSE = 5 * SECOND, 5 * MINUTE  # between probes
MAX_DOUBLINGS = 10  # bounds the shift; the pause reaches MAX_PAUSE long before
MAX_KEYS = 10_000  # counted of each fingerprint


def failing_unit(ref: MessageRef, row: FailedMessage) -> FailingUnit:
    """Return the unit that a failure counts for: the key, or a message without a
    key.
    """
    return ref if row.key_hash is None else (ref[0], row.key_hash)


def trips(group: ConsumerGroup, ref: MessageRef, row: FailedMessage, now: int) -> bool:
    """Return True if this failure opens the breaker."""
    return not head_of_line.is_poison(group, ref, row) and would_trip(
        group, row.fingerprint, {failing_unit(ref, row)}, now
    )


def would_trip(group: ConsumerGroup, fingerprint: str, failing: set[FailingUnit], now: int) -> bool:
    """Return True if failures of these units with one fingerprint open the breaker."""
    threshold = group.settings.flood_keys
    if not threshold or not fingerprint or group.breaker is not None:
        return False
    window = group.failure_window
    units = window.keys.get(fingerprint, set()) if now - window.since < WINDOW else set()
    return len(units) + len(failing - units) >= threshold


def record_failure(group: ConsumerGroup, ref: MessageRef, row: FailedMessage, now: int) -> None:
    """Apply: count a failed message, unless it is the poison of its key alone."""
    window = group.failure_window
    if group.breaker is not None or not row.fingerprint:
        return
    if head_of_line.is_poison(group, ref, row):
        return
    if now - window.since >= WINDOW:
        window.clear()
    if not window.failed:
        window.since = now
    window.failed += 1
    units = window.keys.setdefault(row.fingerprint, set())
    if len(units) < MAX_KEYS:
        units.add(failing_unit(ref, row))


def record_acks(group: ConsumerGroup, lease: int, messages: int) -> None:
    """Apply: note processed messages of a lease; an acked probe closes the breaker."""
    if group.breaker is not None and lease == group.breaker.lease:
        close_breaker(group)
    window = group.failure_window
    if window.failed:
        window.acked += messages
        if window.acked >= window.failed:
            window.clear()


def record_filtered(group: ConsumerGroup, lease: int, now: int) -> None:
    """Apply: if a message of this lease was the probe, the next one is due: no handler
    had it.
    """
    if group.breaker is not None and lease and lease == group.breaker.lease:
        group.breaker = group.breaker._replace(lease=0, probe_at=now)


def open_breaker(group: ConsumerGroup, fingerprint: str, error_type: str, now: int) -> None:
    """Apply: open the breaker; the first probe is due after `MIN_PAUSE`."""
    group.failure_window.clear()
    group.breaker_openings += 1
    group.breaker = OpenBreaker(fingerprint, error_type, now, now + MIN_PAUSE)


def close_breaker(group: ConsumerGroup) -> None:
    """Apply: close the breaker."""
    group.breaker = None


def allows(group: ConsumerGroup, messages: int, now: int) -> bool:
    """Return True if so many messages may be delivered.

    An open breaker allows one when its probe is due and no other probe is leased.
    """
    breaker = group.breaker
    return breaker is None or (
        messages == 1 and now >= breaker.probe_at and breaker.lease not in group.leases
    )


def record_probe(group: ConsumerGroup, lease: int, now: int) -> None:
    """Apply: a lease granted while the breaker is open is its probe.

    The time of the next probe is set, too, in case this one gets no answer.
    """
    if group.breaker is not None:
        group.breaker = group.breaker._replace(lease=lease, probe_at=now + _pause(group.breaker))


def record_probe_failure(group: ConsumerGroup, lease: int, now: int) -> None:
    """Apply: if a message of this lease was the probe, the next one waits longer."""
    breaker = group.breaker
    if breaker is not None and lease and lease == breaker.lease:
        breaker = breaker._replace(probes=breaker.probes + 1, lease=0)
        group.breaker = breaker._replace(probe_at=now + _pause(breaker))


def _pause(breaker: OpenBreaker) -> int:
    return min(MIN_PAUSE << min(breaker.probes, MAX_DOUBLINGS), MAX_PAUSE)
