"""Events: what the log holds. Each is the outcome of a decision, never an input to be judged again.

An event's body in the log is the MessagePack array of its fields, in order, then its attachment, if it has one
(docs/FORMATS.md 4.1). Fields are appended with a default, never removed; a number is never used again.
Numbers 1..63 are topics, messages and transactions, 64..127 consumers (`consumer_events`).
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol, TypeVar

import msgpack


class Place(NamedTuple):
    """Where and when an event stands in the log."""

    position: int
    end: int  # position just after the record
    attachment: int  # position of the first byte of the attachment
    stored_at: int
    boot_epoch: int


class Event(Protocol):
    """A NamedTuple with a class attribute KIND."""

    KIND: ClassVar[int]


EVENTS: dict[int, type] = {}
E = TypeVar("E", bound=type)


def event(kind: int) -> object:
    """Class decorator: give an event its number; two events of one number are an error at import."""

    def register(cls: E) -> E:
        if kind in EVENTS:
            raise ValueError(f"event number {kind} is taken by {EVENTS[kind].__name__}")
        EVENTS[kind] = cls
        cls.KIND = kind
        return cls

    return register
