"""Spools as an operator sees them: read only, beside a live owner, or in a copy."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, suppress
from typing import NamedTuple
from uuid import UUID

from txmq.batch import BatchView
from txmq.errors import StoreError, UnsupportedFormat
from txmq.model.message import message_id
from txmq.recover.spool.directory import spool_names
from txmq.recover.spool.identity import Identity
from txmq.recover.spool.records import (
    BATCH,
    NOTE,
    UNROUTED,
    Note,
    NoteKind,
    SpooledBatch,
    decode_record,
)
from txmq.recover.spool.refused import (
    Refusal,
    name_of,
    read_refused,
    refused_names,
    remove_refused,
)
from txmq.recover.spool.spool import identity_of, is_blank
from txmq.store.filesystem import FileSystem, RealFileSystem
from txmq.store.log.decoder import SegmentDecoder
from txmq.store.log.log import lock_directory
from txmq.store.log.record import Record
from txmq.store.log.segment import list_segments


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


def spools_below(directory: str) -> list[SpoolSummary]:
    """Return the spools below a directory, oldest first."""
    fs = RealFileSystem()
    summaries = [_summary(fs, directory, name) for name in spool_names(fs, directory)]
    return [found for found in summaries if found is not None]


def scan(directory: str) -> Iterator[SpooledMessage]:
    """Yield the messages of all spools below a directory: of each the waiting ones in
    their order, and then the refused ones.
    """
    fs = RealFileSystem()
    for name in spool_names(fs, directory):
        path = f"{directory}/{name}"
        for batch in _waiting(fs, path):
            yield from _messages(name, batch, None)
        for batch, refusal in read_refused(fs, path):
            yield from _messages(name, batch, refusal)


def drop_refused(directory: str, message_ids: Collection[str] | None = None) -> int:
    """Drop refused messages below a directory, and return their number.

    Those with an id of `message_ids`, with all others of their batches; all without it.
    Raises DirectoryInUse where a live process owns such a spool.
    """
    fs, dropped = RealFileSystem(), 0
    for name in spool_names(fs, directory):
        path = f"{directory}/{name}"
        chosen = [
            refused
            for refused in refused_names(fs, path)
            if message_ids is None
            or any(
                message_id(refused.session, refused.sequence + row) in message_ids
                for row in range(refused.count)
            )
        ]
        if chosen:
            lock = lock_directory(fs, path)
            try:
                for refused in chosen:
                    remove_refused(fs, path, refused)
                    dropped += refused.count
            finally:
                lock.release()
    return dropped


def _summary(fs: FileSystem, directory: str, name: str) -> SpoolSummary | None:
    path = f"{directory}/{name}"
    if is_blank(fs, path):  # being made, or its process died in that
        return None
    identity, problem = Identity(name), ""
    for _ in range(2):  # what changes meanwhile is no problem
        try:
            identity, problem = identity_of(fs, path, None), ""
        except (StoreError, UnsupportedFormat) as error:
            problem = str(error)
    if problem and is_blank(fs, path):  # removed by now
        return None
    messages = size = oldest = 0
    for batch in _waiting(fs, path):
        messages += batch.count
        size += len(batch.encoded)
        oldest = oldest or batch.stored_at
    return SpoolSummary(
        name,
        path,
        _is_owned(path),
        identity.service,
        identity.log_id,
        messages,
        size,
        oldest,
        sum(refused.count for refused in refused_names(fs, path)),
        problem,
    )


def _waiting(fs: FileSystem, path: str) -> Iterator[SpooledBatch]:
    """Yield the batches that are not drained, as far as they can be read."""
    notes = [
        note
        for record in _records(fs, path, 0)
        if record.kind == NOTE and isinstance(note := decode_record(record), Note)
    ]
    drained = max((note.position for note in notes if note.kind == NoteKind.DRAINED), default=0)
    splits = {note.position for note in notes if note.kind == NoteKind.SPLIT}
    refused = refused_names(fs, path)
    for record in _records(fs, path, drained):
        if record.kind == BATCH and record.position >= drained:
            batch = decode_record(record)
            assert isinstance(batch, SpooledBatch), "the kind of a batch"
            rows = batch.rows() if batch.position in splits else (batch,)
            yield from (row for row in rows if name_of(row) not in refused)


def _records(fs: FileSystem, path: str, start: int) -> Iterator[Record]:
    """Yield the readable records of the segments that reach beyond `start`.

    The owner may remove a segment meanwhile: then it is drained.
    """
    with suppress(StoreError):
        for segment in list_segments(fs, path):
            if segment.end <= start or segment.header is None:
                continue
            with suppress(StoreError), closing(fs.open(segment.path)) as file:
                decoder = SegmentDecoder(file, segment.first)
                for item in decoder.scan(segment.first, segment.end):
                    if isinstance(item, Record):
                        yield item


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


def _is_owned(path: str) -> bool:
    """Return whether a process has locked the directory."""
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(directory)
