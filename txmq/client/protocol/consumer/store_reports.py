"""Reports of a member to its broker of the local store of one topic: `consumer.stored`.

After each join everything untold goes before the first fetch, so that the broker does
not deliver what the store has. Then everything is told once more in pages: the broker
may have lost the record of it. From then on changes are told as they come, and an empty
report now and then asks for orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto
from socket import gethostname
from typing import TYPE_CHECKING, NamedTuple

from txmq.client.protocol.consumer.membership import Membership
from txmq.client.protocol.consumer.requests import MemberReply, OnRefusal, Request, member_call
from txmq.errors import RequestRejected
from txmq.wire.json import parse_as

if TYPE_CHECKING:
    from uuid import UUID

    from txmq.recover.local import Entry, Place

ENTRIES_PER_REPORT = 1_000
KEPT, ELSEWHERE, UNKNOWN = "kept", "elsewhere", "unknown"


class StoredReply(MemberReply):
    """The broker's verdicts on the entries of a report, and orders to the store."""

    verdicts: tuple[str, ...]
    fences: tuple[int, ...]
    orders: tuple[tuple[str, int, int, int, str], ...]
    more: bool


class Verdict(NamedTuple):
    """The broker's word on one entry. `fence_lease` as in the reply to a nack."""

    entry: Entry
    word: str
    fence_lease: int


class Telling(Enum):
    """Progress of the reports of a store since the last join."""

    UNTOLD = auto()  # what the broker does not know goes first; no fetch before
    AGAIN = auto()  # everything is told once more
    CHANGES = auto()


class StoreReports:
    """The reports of one topic's store. `told` is called with verdicts and orders."""

    def __init__(
        self,
        topic: str,
        told: Callable[[Sequence[Verdict], StoredReply, float], None],
        refused: OnRefusal,
    ) -> None:
        self._topic, self._told, self._refused = topic, told, refused
        self._in_flight = False
        self._entries: list[Entry] | None = None  # read, and not yet reported
        self._next_empty = 0.0
        self.telling = Telling.UNTOLD
        self.wants_entries = True
        self.again_after: Place | None = None
        self.store_id: UUID | None = None

    @property
    def idle(self) -> bool:
        """True if the broker knows all changes, as far as the disk was read."""
        return not (self._in_flight or self._entries or self.wants_entries)

    def restart(self) -> None:
        """Begin anew after a join, or after a lost connection."""
        self._in_flight, self._entries = False, None
        self.telling, self.wants_entries = Telling.UNTOLD, True
        self.again_after = None

    @property
    def may_read(self) -> bool:
        """True if entries may be read for the next report."""
        return not self._in_flight and self._entries is None

    def read(self, entries: list[Entry]) -> None:
        """Take what the disk had untold."""
        # Others may be behind a full page; changes may have come since it was read.
        self.wants_entries |= len(entries) >= ENTRIES_PER_REPORT
        # Even without any, the broker learns of the store by the first report.
        self._entries = entries if entries or self.telling is Telling.UNTOLD else None

    def read_again(self, entries: list[Entry]) -> None:
        """Take the next page of everything."""
        self._entries = entries or None
        self.again_after = entries[-1].place if entries else None
        if len(entries) < ENTRIES_PER_REPORT:
            self.telling = Telling.CHANGES

    def add(self, entries: list[Entry]) -> None:
        """Report these, too, which the disk does not have."""
        if entries:
            self._entries = [*(self._entries or []), *entries]

    def answered(self, *, has_messages: bool) -> None:
        """Note an answered report: once the untold is told, everything follows."""
        if self.telling is Telling.UNTOLD and not self.wants_entries:
            self.telling = Telling.AGAIN if has_messages else Telling.CHANGES

    def due_at(self, *, has_messages: bool) -> float | None:
        """Return when a report is due; None if there is nothing to tell or ask."""
        if self._in_flight or self.store_id is None:
            return None
        if self._entries is not None:
            return 0.0
        return self._next_empty if has_messages and self.telling is not Telling.UNTOLD else None

    def request(self, membership: Membership, now: float, *, has_messages: bool) -> Request | None:
        """Return the report to send now."""
        due = self.due_at(has_messages=has_messages)
        if due is None or due > now or self.store_id is None:
            return None
        entries, self._entries, self._in_flight = self._entries or [], None, True
        self._next_empty = now + membership.heartbeat_s
        args = {
            "store": self.store_id.hex,
            "host": gethostname()[:255],
            "entries": [entry_args(self._topic, entry) for entry in entries],
        }

        def answered(payload: bytes, now: float) -> None:
            reply = parse_as(StoredReply, payload)
            self._in_flight = False
            answers = zip(entries, reply.verdicts, reply.fences, strict=True)
            found = [Verdict(*one) for one in answers]
            if reply.more:
                self._next_empty = now
            self._told(found, reply, now)

        def refused(error: RequestRejected, now: float) -> None:
            self._in_flight, self.wants_entries = False, True
            self._refused(error, now)

        return member_call("consumer.stored", membership, args, answered, refused)


def entry_args(topic: str, entry: Entry) -> list[object]:
    """Return an entry as the request has it."""
    failure = entry.failure
    error = [failure.type, failure.text, failure.fingerprint] if any(failure[:3]) else None
    state = entry.state.name.lower()
    return [
        *(topic, *entry.place, state, entry.attempt, entry.due, error),
        *(entry.generation, entry.epoch),
    ]
