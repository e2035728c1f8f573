"""The directory that a user names for spools: one of each process, the topics known
last, and what an operator sees of them, beside a live owner or in a copy.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import UUID, uuid4

from txmq.batch import BatchView
from txmq.crashpoints import crashpoint
from txmq.errors import DirectoryInUse, StoreError
from txmq.model.message import message_id
from txmq.model.units import HOUR
from txmq.recover.local.batches import (
    SPOOL,
    UNROUTED,
    Identity,
    Refusal,
    SpooledBatch,
    identity_of,
    refused_batches,
    waiting,
)
from txmq.recover.local.database import (
    DRAFT,
    DirectoryLock,
    about,
    is_begun_only,
    os_errors,
    owner_pid,
    read_only,
    sync_directory,
)
from txmq.recover.local.spool import Spool, SpoolReport

TOPICS = "topics.json"
BEGUN_US = HOUR  # that another process may need to make its spool
_HEX = frozenset("0123456789abcdef")


class KnownTopic(NamedTuple):
    """A topic's metadata as the broker described it last."""

    partitions: int
    epoch: int
    topic_id: int


class OpenedSpool(NamedTuple):
    """A spool that was opened, or the error why it was not."""

    path: str
    spool: Spool | None
    report: SpoolReport
    error: StoreError | None = None


class SpoolDirectory:
    """The spools below a directory. Raises StoreError where it cannot be used."""

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/") or "/"

    def open_new(
        self,
        service: str | None,
        log_id: UUID | None,
        now: int,
        incarnation: UUID | None = None,
    ) -> Spool:
        """Make a spool for this process."""
        try:
            _make_private(Path(self.path))
            # After all others, even where the clock was put back: names are in the
            # order of draining.
            latest = max(spool_names(self.path), default="0")
            name = f"{max(now, int(latest[:16], 16) + 1):016x}{uuid4().hex[:16]}"
            path = Path(self.path, name)
            path.mkdir(mode=0o700)
            sync_directory(self.path)
        except OSError as error:
            raise StoreError(
                f"{self.path}: cannot be used for spools: {error.strerror}",
                hint="give a directory that this process may write, on a local disk",
            ) from error
        spool, _ = Spool.open(str(path), Identity(name, service, log_id, now, incarnation))
        crashpoint("spool.created")
        return spool

    def open_orphans(self, now: int) -> list[OpenedSpool]:
        """Open the spools without an owner, oldest first.

        Those that cannot be opened come with their errors, and stay as they are.
        """
        opened = []
        for name in spool_names(self.path):
            path = f"{self.path}/{name}"
            try:
                if is_begun_only(path, SPOOL):
                    if int(name[:16], 16) < now - BEGUN_US:
                        _remove_begun(path)
                    continue
                spool, report = Spool.open(path, None)
            except DirectoryInUse:
                continue
            except StoreError as error:
                if not is_begun_only(path, SPOOL):  # its owner has just removed it
                    opened.append(OpenedSpool(path, None, SpoolReport(), error))
            else:
                opened.append(OpenedSpool(path, spool, report))
        return opened

    def topics(self) -> dict[str, KnownTopic]:
        """Return the topics as they were known last, none where the file is unreadable:
        it only saves the routing of messages for later.
        """
        with suppress(OSError, ValueError, TypeError, AttributeError):
            fields = json.loads(Path(self.path, TOPICS).read_bytes())
            topics = {name: KnownTopic(*map(int, known)) for name, known in fields.items()}
            return {name: known for name, known in topics.items() if min(known) >= 0 < known[0]}
        return {}

    def remember_topics(self, topics: Mapping[str, KnownTopic]) -> None:
        """Keep these topics for processes that start while no broker answers."""
        known = {**self.topics(), **topics}
        draft = Path(self.path, f"{TOPICS}{DRAFT}{uuid4().hex}")
        with os_errors("write", str(draft)):
            draft.touch(mode=0o600)
            draft.write_bytes(json.dumps(known).encode() + b"\n")
            draft.rename(Path(self.path, TOPICS))


class SpoolSummary(NamedTuple):
    """One spool below a directory. `owned`: a live process has it.

    `messages`, `bytes` and `oldest_at` (µs, 0 = none) are of those that wait, `refused`
    counts those that the broker refused for good. `log_id` is that of the broker's log,
    None where it was never met. `problem`: why it cannot be drained.
    """

    id: str
    path: str
    owned: bool
    service: str | None
    log_id: UUID | None
    messages: int
    bytes: int
    oldest_at: int
    refused: int
    problem: str = ""


class SpooledMessage(NamedTuple):
    """A message in a spool, with the refusal where the broker refused it.

    `partition` is None while the message is not routed. `stored_at` is the time at
    which it came to the spool.
    """

    spool: str
    message_id: str
    topic: str
    partition: int | None
    key: str | None
    tag: str | None
    headers: Mapping[str, str]
    body: bytes
    born_at: int
    stored_at: int
    refusal: Refusal | None = None


def spool_names(path: str) -> list[str]:
    """Return the names of the spools below a directory, oldest first.

    Symbolic links are ignored: they could lead anywhere.
    """
    with suppress(OSError):
        return sorted(
            found.name
            for found in Path(path).iterdir()
            if len(found.name) == 32 and _HEX.issuperset(found.name) and _is_directory(found)
        )
    return []


def spools_below(directory: str) -> list[SpoolSummary]:
    """Return the spools below a directory, oldest first."""
    found = [_summary(directory, name) for name in spool_names(directory)]
    return [summary for summary in found if summary is not None]


def scan(directory: str) -> Iterator[SpooledMessage]:
    """Yield the messages of all spools below a directory: of each the waiting ones in
    their order, and then the refused ones.
    """
    for name in spool_names(directory):
        with suppress(StoreError), read_only(f"{directory}/{name}", SPOOL) as connection:
            for batch in waiting(connection):
                yield from _messages(name, batch, None)
            for batch, refusal in refused_batches(connection):
                yield from _messages(name, batch, refusal)


def drop_refused(directory: str, message_ids: Collection[str] | None = None) -> int:
    """Drop refused messages below a directory, and return their number.

    Those with an id of `message_ids`, with all others of their batches; all without it.
    Raises DirectoryInUse where a live process owns such a spool.
    """
    dropped = 0
    for name in spool_names(directory):
        path = f"{directory}/{name}"
        if not is_begun_only(path, SPOOL) and _has_refused(path):
            spool, _ = Spool.open(path, None)
            try:
                dropped += spool.drop_refused(message_ids)
            finally:
                spool.abandon()
    return dropped


def retry_refused(path: str, now: int = 0) -> int:
    """Have the refused messages of all spools without an owner sent again, and return
    their number.
    """
    taken = 0
    for opened in SpoolDirectory(path).open_orphans(now):
        if opened.spool is not None:
            try:
                taken += opened.spool.retry_refused(now or time.time_ns() // 1_000)
            finally:
                opened.spool.abandon()
    return taken


def _summary(directory: str, name: str) -> SpoolSummary | None:
    path = f"{directory}/{name}"
    identity, problem = Identity(name), ""
    messages = size = oldest = refused = 0
    for _ in range(3):  # what changes meanwhile is no problem
        if is_begun_only(path, SPOOL):  # being made or removed, or left so
            return None
        messages = size = oldest = 0
        try:
            with read_only(path, SPOOL) as connection:
                identity, problem = identity_of(name, about(connection)), ""
                refused = sum(one.count for one, _ in refused_batches(connection))
                for batch in waiting(connection):
                    messages += batch.count
                    size += len(batch.encoded)
                    oldest = oldest or batch.stored_at
            break
        except (StoreError, ValueError) as error:
            problem = str(error)
    return SpoolSummary(
        name,
        path,
        owner_pid(path) != 0,
        identity.service,
        identity.log_id,
        messages,
        size,
        oldest,
        refused,
        problem,
    )


def _messages(spool: str, batch: SpooledBatch, refusal: Refusal | None) -> Iterator[SpooledMessage]:
    view = BatchView(batch.encoded)
    partition = None if batch.partition == UNROUTED else batch.partition
    rows = zip(view.keys, view.tags, view.headers, view.bodies, view.born_at, strict=True)
    for row, (key, tag, headers, body, born_at) in enumerate(rows):
        yield SpooledMessage(
            spool,
            message_id(batch.session, batch.sequence + row),
            batch.topic,
            partition,
            key,
            tag,
            headers,
            body,
            born_at,
            batch.stored_at,
            refusal,
        )


def _has_refused(path: str) -> bool:
    with read_only(path, SPOOL) as connection:
        return any(True for _ in refused_batches(connection))


def _remove_begun(path: str) -> None:
    """Remove what a process left that died before it had made its spool."""
    with suppress(StoreError, OSError):  # another process removes it
        lock = DirectoryLock(path)
        try:
            if is_begun_only(path, SPOOL):
                for file in Path(path).iterdir():
                    file.unlink()
                Path(path).rmdir()
        finally:
            lock.release()


def _make_private(path: Path) -> None:
    """Make a directory and those above it, all of them for their owner alone."""
    if not path.exists():
        _make_private(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
        sync_directory(str(path.parent))


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False
