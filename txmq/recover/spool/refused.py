"""Batches that the broker refused for good: a file for each, with the error.

A file is `u32 length | JSON | batch | u32 CRC32C` of all before it. Its name is
`<session>-<sequence>-<count>`. The same refusal writes the same file again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from google_crc32c import value

from txmq.errors import CorruptRecord, RemoteProtocolError
from txmq.recover.spool.files import names_of, read_file, write_file
from txmq.recover.spool.records import SpooledBatch
from txmq.store.filesystem import FileSystem

FOLDER = "refused"
_U32 = Struct("<I")


class Refusal(NamedTuple):
    """Why a batch was refused: the error's class, its text, when, and its outcome."""

    error: str
    text: str
    at: int
    outcome: str


class RefusedName(NamedTuple):
    """The messages of a refused batch, as its file's name has them."""

    session: bytes
    sequence: int
    count: int  # type: ignore[assignment] # hides a method of tuples that nobody calls

    def __str__(self) -> str:
        return f"{self.session.hex()}-{self.sequence}-{self.count}"


def name_of(batch: SpooledBatch) -> RefusedName:
    """Return the name of a batch."""
    return RefusedName(batch.session, batch.sequence, batch.count)


def write_refused(fs: FileSystem, path: str, batch: SpooledBatch, refusal: Refusal) -> None:
    """Write the file of a refused batch of the spool in `path`."""
    fields = {
        "topic": batch.topic,
        "partition": batch.partition,
        "epoch": batch.epoch,
        "explicit": batch.explicit,
        "stored_at": batch.stored_at,
        **refusal._asdict(),
    }
    head = json.dumps(fields).encode()
    data = _U32.pack(len(head)) + head + batch.encoded
    folder = f"{path}/{FOLDER}"
    fs.makedirs(folder)
    fs.sync_directory(path)
    write_file(fs, folder, str(name_of(batch)), data + _U32.pack(value(data)))


def refused_names(fs: FileSystem, path: str) -> set[RefusedName]:
    """Return the names of the refused batches of the spool in `path`."""
    found = set()
    for name in names_of(fs, f"{path}/{FOLDER}"):
        session, sequence, count = (*name.split("-"), "", "")[:3]
        if len(session) == 32 and sequence.isdigit() and count.isdigit():
            found.add(RefusedName(bytes.fromhex(session), int(sequence), int(count)))
    return found


def read_refused(fs: FileSystem, path: str) -> Iterator[tuple[SpooledBatch, Refusal]]:
    """Yield the refused batches of the spool in `path`. Raises CorruptRecord."""
    for name in sorted(refused_names(fs, path)):
        file = f"{path}/{FOLDER}/{name}"
        yield _parse(file, read_file(fs, file))


def remove_refused(fs: FileSystem, path: str, name: RefusedName) -> None:
    """Remove the file of a refused batch."""
    fs.remove(f"{path}/{FOLDER}/{name}")
    fs.sync_directory(f"{path}/{FOLDER}")


def _check(body: bytes, end: bytes) -> None:
    if len(body) < _U32.size or _U32.unpack(end) != (value(body),):
        raise ValueError("checksum mismatch")


def _parse(path: str, data: bytes) -> tuple[SpooledBatch, Refusal]:
    body, end = data[: -_U32.size], data[-_U32.size :]
    try:
        _check(body, end)
        (length,) = _U32.unpack_from(body)
        fields = json.loads(body[_U32.size : _U32.size + length])
        batch = SpooledBatch.of(
            fields["topic"],
            fields["partition"],
            fields["epoch"],
            body[_U32.size + length :],
            explicit=fields["explicit"],
        )
        refusal = Refusal(fields["error"], fields["text"], fields["at"], fields["outcome"])
        return batch._replace(stored_at=fields["stored_at"]), refusal
    except (KeyError, TypeError, ValueError, RemoteProtocolError) as error:
        raise CorruptRecord(
            path, 0, str(error), hint="move it away; its message is lost unless a copy has it"
        ) from error
