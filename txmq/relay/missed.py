"""Gaps: what a new slot has missed, what a failover has lost, and what a restored
broker has lost.

A slot that is made after a failover, a restore or a loss has no earlier commits. Only
the broker knows how far the slot before it was read, by its watermarks. Once found, the
gap is a watermark of its own, because the slot's first transactions move the others on.

A failover to an asynchronous standby may lose commits that the relay had read. Then the
watermark of the earlier timeline is behind that timeline's end. Messages of the lost
commits stay at the broker, without the rows of their transactions. The new timeline has
other transactions at these positions, which a new slot may have missed.

A broker whose log was restored may have lost transactions that are confirmed, which no
slot gives again. A slot is confirmed beyond transactions without messages, too, so that
they may also be none.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.bundle_upload import BundleUpload
from txmq.client.protocol.transaction.parts import split_into_parts
from txmq.client.protocol.transaction.tokens import new_token
from txmq.model.actions import WatermarkAction
from txmq.model.decider import ByBroker
from txmq.model.units import SECOND
from txmq.relay.bundles import CHECKER
from txmq.relay.relay_session import StartPosition, read_watermark
from txmq.relay.slot import SlotOrigin
from txmq.relay.slot_stream import SlotSource
from txmq.tx.postgres.identity import format_lsn
from txmq.wire.bundle import BundleDescription


class Gap(NamedTuple):
    """Commits after the time `at`, in microseconds, and before LSN `end` are missed."""

    at: int
    end: int

    def __str__(self) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.at / SECOND))
        return f"messages that were committed after {at} and before LSN {format_lsn(self.end)}"


class LostCommits(NamedTuple):
    """Transactions that a failover has lost, and whose messages the broker has.

    They committed on `timeline` behind LSN `end`, where that timeline ends for its
    successor, and up to LSN `sent`; the last one at the time `at`.
    """

    timeline: int
    end: int
    sent: int
    at: int

    def __str__(self) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.at / SECOND))
        span = f"behind LSN {format_lsn(self.end)} up to {format_lsn(self.sent)}"
        return (
            f"of transactions that committed on timeline {self.timeline} {span}, the last at {at}"
        )


def find_lost_commits(
    core: BlockingCore, source: SlotSource, origin: SlotOrigin | None
) -> tuple[LostCommits, ...]:
    """Return what failovers have lost of that which the broker has, but for what an
    operator has accepted. Raises the errors of a call.
    """
    accepted = 0 if origin is None else origin.timeline
    slots = (source.slot, *(() if origin is None else origin.replaces))
    found = list[LostCommits]()
    for timeline, end in source.history:
        for slot in slots if timeline >= accepted else ():
            name = source._replace(slot=slot).watermark_name(timeline)
            lsn, at = read_watermark(core, name)
            if lsn > end:
                found.append(LostCommits(timeline, end, lsn, at))
    return tuple(found)


def find_gap(core: BlockingCore, source: SlotSource, origin: SlotOrigin) -> Gap | None:
    """Return what the slot has missed; None = nothing, or it is the first one.

    Raises the errors of a call.
    """
    name = f"{source.system_id}-{source.slot}-missed-{origin.made_at}"
    _, noted_at = read_watermark(core, name)
    if noted_at:
        return Gap(noted_at, origin.made_at)
    own = _last_stored(core, source)
    found = [own] if 0 < own[0] < origin.made_at else []
    found += [_last_stored(core, source._replace(slot=slot)) for slot in origin.replaces]
    at = max((at for lsn, at in found if lsn), default=0)
    if not at:
        return None
    _note(core, WatermarkAction(name, 0, origin.made_at, at))
    return Gap(at, origin.made_at)


def find_lost(
    core: BlockingCore, source: SlotSource, confirmed: int, start: StartPosition
) -> Gap | None:
    """Return what a restored broker may lack of what was confirmed until LSN
    `confirmed`; None = nothing, or an operator has accepted the restore.

    Raises the errors of a call.
    """
    restored = last_restore(core)
    if restored is None or restored["accepted"]:
        return None
    name = f"{source.system_id}-{source.slot}-lost-{restored['position']}"
    end, at = read_watermark(core, name)
    if not end and start.watermark < confirmed:
        end, at = confirmed, start.committed_at
        _note(core, WatermarkAction(name, 0, end, at))
    return Gap(at, end) if end else None


def last_restore(core: BlockingCore) -> dict[str, Any] | None:
    """Return the last restore of the broker's log; None = there was none. Raises the
    errors of a call.
    """
    if core.incarnation is None:
        return None
    restores: list[dict[str, Any]] = core.call("log.restores", {"topics": False}, repeat=True)[
        "restores"
    ]
    return restores[-1]


def _last_stored(core: BlockingCore, source: SlotSource) -> tuple[int, int]:
    """Return LSN and time of a slot's last stored transaction, on any timeline.

    The LSN is not behind the end of its timeline: others may have it there.
    """
    lsn, at = read_watermark(core, source.watermark_name(source.timeline))
    if lsn:
        return lsn, at
    for timeline, end in reversed(source.history):
        lsn, at = read_watermark(core, source.watermark_name(timeline))
        if lsn:
            return min(lsn, end), at
    return 0, 0


def _note(core: BlockingCore, action: WatermarkAction) -> None:
    description = BundleDescription(ByBroker(), CHECKER, (action,))
    [part] = split_into_parts(new_token(), description, ())
    deadline = time.monotonic() + core.settings.timeout
    upload = BundleUpload(core, [part._replace(commit=True)], deadline)
    upload.send()
    upload.await_receipt()
