"""The guard against floods: many keys that fail alike are an outage, not as many bad
messages.

    watching ──enough keys, one fingerprint──► guarded ──the probe is acked, or an operator resumes──► watching
                                                 │  ▲
                                                 └──┘  the probe failed: the next one, another message, comes later

Failures are watched for as long as they outnumber what is acked meanwhile. A group that
is guarded keeps its messages where they are: it delivers one at a time, as a probe, and
no failure counts. That a group is guarded is kept over a restart, what is watched is
not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from txmq.core.consumers.failed_messages import Moved
    from txmq.core.state.consumer_groups import Group, Spotted

SECOND = 1_000_000
WATCHED_FOR = 600 * SECOND
FIRST_PROBE, LONGEST_PROBE = 5 * SECOND, 300 * SECOND
DOUBLINGS = 10  # after which the pause does not grow any more
KEYS_WATCHED = 10_000

Failing = tuple[int, int] | tuple[int, int, int]  # topic and key hash, or a message without a key


class Flood(NamedTuple):
    """What made a group guarded. `lease` is that of the probe, 0 = there has been
    none.
    """

    fingerprint: str
    error_type: str
    since: int
    probe_at: int
    probes: int = 0  # that failed
    lease: int = 0


@dataclass(slots=True)
class Watch:
    """Failures since `since`, by fingerprint; they are forgotten once there are as many
    acks.
    """

    since: int = 0
    acked: int = 0
    failed: int = 0
    keys: dict[str, set[Failing]] = field(default_factory=dict)

    def forget(self) -> None:
        self.acked = self.failed = 0
        self.keys.clear()


def failing(spotted: Spotted, row: Moved) -> Failing:
    """What a failure counts for: the key, or the message if it has none."""
    return spotted if row.key_hash is None else (spotted[0], row.key_hash)


def floods(group: Group, spotted: Spotted, row: Moved, now: int) -> bool:
    """Whether with this failure the group is to be guarded."""
    enough = group.settings.flood_keys
    if not enough or not row.fingerprint or group.flood is not None:
        return False
    watch = group.watch
    known = watch.keys.get(row.fingerprint, set()) if now - watch.since < WATCHED_FOR else set()
    return len(known) + (failing(spotted, row) not in known) >= enough


def note_failure(group: Group, spotted: Spotted, row: Moved, now: int) -> None:
    """Apply: a message failed."""
    watch = group.watch
    if group.flood is not None or not row.fingerprint:
        return
    if now - watch.since >= WATCHED_FOR:
        watch.forget()
    if not watch.failed:
        watch.since = now
    watch.failed += 1
    known = watch.keys.setdefault(row.fingerprint, set())
    if len(known) < KEYS_WATCHED:
        known.add(failing(spotted, row))


def note_acks(group: Group, lease: int, messages: int) -> None:
    """Apply: messages of this lease are done with; the probe among them ends the
    flood.
    """
    if group.flood is not None and lease == group.flood.lease:
        lift(group)
    watch = group.watch
    if watch.failed:
        watch.acked += messages
        if watch.acked >= watch.failed:
            watch.forget()


def begin(group: Group, fingerprint: str, error_type: str, now: int) -> None:
    """Apply: the group is guarded from now on."""
    group.watch.forget()
    group.floods += 1
    group.flood = Flood(fingerprint, error_type, now, now + FIRST_PROBE)


def lift(group: Group) -> None:
    """Apply: the group is guarded no more."""
    group.flood = None


def may_deliver(group: Group, messages: int, now: int) -> bool:
    """Whether so many messages may go out: if the group is guarded, one does at its
    time, while no other is out.
    """
    flood = group.flood
    return flood is None or (
        messages == 1 and now >= flood.probe_at and flood.lease not in group.leases
    )


def probing(group: Group, lease: int, now: int) -> None:
    """Apply: a lease was granted; of a guarded group it is the probe. One that gets
    lost is followed by another.
    """
    if group.flood is not None:
        group.flood = group.flood._replace(lease=lease, probe_at=now + _pause(group.flood))


def probe_failed(group: Group, lease: int, now: int) -> None:
    """Apply: a message of this lease failed; if it is the probe, the next one waits
    longer.
    """
    flood = group.flood
    if flood is not None and lease and lease == flood.lease:
        flood = flood._replace(probes=flood.probes + 1, lease=0)
        group.flood = flood._replace(probe_at=now + _pause(flood))


def _pause(flood: Flood) -> int:
    return min(FIRST_PROBE << min(flood.probes, DOUBLINGS), LONGEST_PROBE)
