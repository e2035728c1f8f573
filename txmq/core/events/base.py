"""The base of events: their numbers, their encoding, and the context of their records.

An event is the outcome of a decision, never an input to be judged again. What must
happen together is one event. Its body in the log is the MessagePack array of its
fields, then its attachment, if it has one (docs/FORMATS.md 4.1). New fields come last
and have a default; no field is removed, no number used again. Numbers 1 to 63 belong to
topics, messages and transactions, 64 to 127 to consumers, 128 to 191 to dead letters;
of these, 150 to 155 to what operators do; 204 to 215 belong to users and
permissions. 108, 109 and 133 were used.

Names of events and of their fields are part of the output of `txmq log dump`. Tuples
inside an event come back from the log as plain tuples, without attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import msgpack

from txmq.errors import UnsupportedFormat


class RecordContext(NamedTuple):
    """The position and time of the record that holds an event."""

    position: int
    end: int  # position after the record
    attachment_position: int  # of its first byte
    stored_at: int
    boot_epoch: int


LogSpan = tuple[int, int]  # position in the log, length
Event = tuple[Any, ...]  # one of the NamedTuples registered below

EVENTS: dict[int, type[Event]] = {}
KINDS: dict[type[Event], int] = {}
E = TypeVar("E", bound=type[Event])


def event(kind: int) -> Callable[[E], E]:
    """Register an event class under its number."""

    def register(cls: E) -> E:
        if kind in EVENTS:
            raise ValueError(
                f"event number {kind} belongs to {EVENTS[kind].__name__}: choose another"
            )
        EVENTS[kind] = cls
        KINDS[cls] = kind
        return cls

    return register


def encode(event: Event) -> bytes:
    """Return the head of an event's record: its fields as a MessagePack array."""
    return bytes(msgpack.packb(event))


class UnknownEvent(LookupError):
    """An event that another version has written."""

    def __init__(self, kind: int) -> None:
        super().__init__(kind)
        self.kind = kind


def unsupported_event(position: int, kind: int) -> UnsupportedFormat:
    """Return the error of a record whose event another version has written."""
    return UnsupportedFormat(
        f"the record at {position}", f"event {kind}", f"kinds up to {max(EVENTS)}"
    )


def decode(kind: int, head: bytes | memoryview) -> Event:
    """Return the event of a record. Raises UnknownEvent."""
    return make(kind, msgpack.unpackb(head, use_list=False))


def make(kind: int, fields: Iterable[Any]) -> Event:
    """Return an event by its number. Raises UnknownEvent for an unknown number, and for
    fields that the event does not have.
    """
    try:
        return EVENTS[kind](*fields)
    except (KeyError, TypeError):
        raise UnknownEvent(kind) from None


@event(1)
class Booted(NamedTuple):
    """The broker started in a new boot epoch: without connections and leases."""

    boot_epoch: int
    broker: str


@event(60)
class TimeNoted(NamedTuple):
    """The broker's time may be ahead of the true one by `doubted` microseconds.

    `back`: it was set back by so many microseconds (negative = forward). What waits for
    a time waits no longer than before, and leases end no earlier.
    """

    doubted: int
    back: int = 0


@event(61)
class LogRestored(NamedTuple):
    """The log was restored from a backup at the time `at`, up to this record. From here
    on it is the incarnation `incarnation`.

    `stored_to` is the time of the record before. `boot_epoch` is above all of the lost
    part.
    """

    incarnation: bytes
    at: int
    stored_to: int
    boot_epoch: int


@event(62)
class RestoreAccepted(NamedTuple):
    """An operator has dealt with what the last restore lost."""

    operator: str
    reason: str


@event(63)
class BackupNoted(NamedTuple):
    """A backup has the log as it was at the time `taken_at`."""

    taken_at: int


@event(37)
class SnapshotNoted(NamedTuple):
    """A snapshot of `position` was written, and no event followed it.

    The next snapshot needs a position of its own: segments are removed only below the
    older of two snapshots.
    """

    position: int
