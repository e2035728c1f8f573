"""Storage of the positions of readers: an interface, and files."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Annotated, NamedTuple, Protocol, Self
from uuid import UUID

from pydantic import Field

from txmq.errors import ConfigError, LogChanged, StoreError, TxmqError
from txmq.model.message import check_name
from txmq.model.topic_partition import PartitionName
from txmq.wire.json import WireModel, parse_as

Offsets = Mapping[PartitionName, int]
"""The next message to process of each partition; a `ReadPosition` where it is known of
which topic and of which messages.
"""

VERSION = 1


class ReadBatch(NamedTuple):
    """The batch with the last message before a position: the id of its topic, its time
    of storage, and its place in the log.

    After a topic was made again, or a log restored, another batch is in its place.
    """

    topic_id: int
    stored_at: int
    log_position: int


class ReadPosition(int):
    """An offset, and the batch that was read before it."""

    batch: ReadBatch

    def __new__(cls, offset: int, batch: ReadBatch) -> Self:
        """Return the offset with this batch."""
        position = super().__new__(cls, offset)
        position.batch = batch
        return position


class OffsetStore(Protocol):
    """The positions of readers, by name; each is of one log.

    One thread at a time uses a store.
    """

    def load(self, name: str, log_id: UUID) -> Offsets:
        """Return the positions last saved; none for a new name.

        Raises LogChanged where they are of another log.
        """

    def save(self, name: str, log_id: UUID, offsets: Offsets) -> None:
        """Save all positions. When it returns, they survive a power failure."""

    def close(self) -> None:
        """Close the store."""


class _Saved(WireModel):
    """The contents of a file."""

    version: int
    log_id: str
    offsets: dict[str, Annotated[dict[int, Annotated[int, Field(ge=0)]], Field()]]
    batches: dict[str, dict[int, tuple[int, int, int]]]


class FileOffsets:
    """A file for each reader in one directory, replaced as a whole at each save.

    Raises ConfigError for a name that another process uses and for a file of another
    format, and StoreError for an error of the file system. What was saved last is kept
    then.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._locks: dict[str, int] = {}

    def load(self, name: str, log_id: UUID) -> Offsets:
        path = self._path(name)
        with _translated(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock(name)
            data = path.read_bytes() if path.exists() else None
        if data is None:
            return {}
        saved = _parsed(path, data)
        if saved.log_id != str(log_id):
            hint = f"move {path} away to start again"
            raise LogChanged(
                f"the positions of {name!r} are of log {saved.log_id}, not of {log_id}", hint=hint
            )
        return {
            (topic, number): _position(offset, saved.batches.get(topic, {}).get(number))
            for topic, of in saved.offsets.items()
            for number, offset in of.items()
        }

    def save(self, name: str, log_id: UUID, offsets: Offsets) -> None:
        by_topic: dict[str, dict[int, int]] = {}
        batches: dict[str, dict[int, ReadBatch]] = {}
        for (topic, partition), offset in sorted(offsets.items()):
            by_topic.setdefault(topic, {})[partition] = int(offset)
            if isinstance(offset, ReadPosition):
                batches.setdefault(topic, {})[partition] = offset.batch
        saved = {"version": VERSION, "log_id": str(log_id), "offsets": by_topic, "batches": batches}
        text = json.dumps(saved)
        with _translated(self._directory):
            self._replace(self._path(name), text)

    def close(self) -> None:
        while self._locks:
            os.close(self._locks.popitem()[1])

    def _path(self, name: str) -> Path:
        return self._directory / f"{check_name(name, 'reader')}.json"

    def _replace(self, path: Path, text: str) -> None:
        fresh = path.with_suffix(".tmp")
        with fresh.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _lock(self, name: str) -> None:
        if name in self._locks:
            return
        lock = os.open(self._directory / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            hint = "use a different name for each reader"
            raise ConfigError(
                "name", f"another reader {name!r} uses this directory already", hint=hint
            ) from None
        self._locks[name] = lock


@contextmanager
def _translated(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = (
            "positions need a writable directory, on a disk with free space;"
            " the last saved positions are intact"
        )
        raise StoreError(f"{error.filename or directory}: {error.strerror}", hint=hint) from error


def _parsed(path: Path, data: bytes) -> _Saved:
    with suppress(TxmqError):
        saved = parse_as(_Saved, data)
        if saved.version == VERSION:
            return saved
    raise ConfigError(
        "offsets",
        f"{path} holds no positions of version {VERSION}",
        hint="move it away to start again",
    )


def _position(offset: int, batch: tuple[int, int, int] | None) -> int:
    return offset if batch is None else ReadPosition(offset, ReadBatch(*batch))


class OffsetsByLog:
    """Positions of one reader at several brokers, each under the name of its log. For
    any number of threads, of which one at a time uses the store.
    """

    def __init__(self, store: OffsetStore) -> None:
        self._store, self._lock = store, Lock()

    def load(self, name: str, log_id: UUID) -> Offsets:
        with self._lock:
            return self._store.load(f"{name}.{log_id}", log_id)

    def save(self, name: str, log_id: UUID, offsets: Offsets) -> None:
        with self._lock:
            self._store.save(f"{name}.{log_id}", log_id, offsets)

    def close(self) -> None:
        """Leave the store open: it is the reader's, which closes it once."""
