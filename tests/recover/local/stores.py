"""Local stores of tests, and messages to put into them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

from txmq.model.retry import FailureReport
from txmq.recover.local import (
    Change,
    LocalStore,
    Place,
    State,
    StoredMessage,
    StoreLimits,
    StoreOwner,
    StoreReport,
)

TOPIC = 7
OWNER = StoreOwner("billing", "orders", TOPIC, UUID(int=5), ordered=True)
FAILURE = FailureReport("ValueError", "no such carrier", "f1", ("Exception",))
LIMITS = StoreLimits()
ToStore = tuple[StoredMessage, int, FailureReport]


class Clock:
    """A clock that tests move."""

    def __init__(self, at: int = 1_000_000) -> None:
        self.at = at

    def __call__(self) -> int:
        self.at += 1
        return self.at


def open_store(
    directory: Path,
    owner: StoreOwner = OWNER,
    limits: StoreLimits = LIMITS,
    now: Clock | None = None,
) -> tuple[LocalStore, StoreReport]:
    return LocalStore.open(str(directory / "stores"), owner, limits, now=now or Clock())


def place(offset: int, partition: int = 0) -> Place:
    return Place(TOPIC, partition, offset)


def message(
    offset: int, key: str | None = None, partition: int = 0, body: bytes = b"body", attempt: int = 1
) -> StoredMessage:
    at = place(offset, partition)
    headers = {"trace": str(offset)}
    name = f"{'0' * 32}-{offset}"
    return StoredMessage(at, key, "tag", headers, body, name, attempt, 10, 20, 3, 4)


def stored(offset: int, key: str | None = None, due: int = 0, partition: int = 0) -> ToStore:
    return message(offset, key, partition), due, FAILURE


def acked(*offsets: int) -> list[Change]:
    return [Change(place(offset), State.ACKED, 2, 0) for offset in offsets]


def offsets(messages: Sequence[StoredMessage]) -> list[int]:
    return [one.place.offset for one in messages]
