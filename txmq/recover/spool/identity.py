"""Identity of a spool: the file `identity.json`, written before the first record."""

from __future__ import annotations

import json
from typing import NamedTuple
from uuid import UUID

from txmq.errors import StoreError, UnsupportedFormat
from txmq.recover.spool.files import read_file, write_file
from txmq.store.filesystem import FileSystem

NAME = "identity.json"
KIND, VERSION = "spool", 1


class Identity(NamedTuple):
    """The service that a spool belongs to, and the log of its broker where it is known.

    `incarnation` is that of the log: None where it is the first one. `begun`: there are
    records, or were, so a log that is missing is a loss.
    """

    id: str
    service: str | None = None
    log_id: UUID | None = None
    created_at: int = 0
    incarnation: UUID | None = None
    begun: bool = False


def write_identity(fs: FileSystem, path: str, identity: Identity) -> None:
    """Write the identity of the spool in the directory `path`."""
    fields = {
        "kind": KIND,
        "version": VERSION,
        "id": identity.id,
        "service": identity.service,
        "log_id": None if identity.log_id is None else str(identity.log_id),
        "created_at": identity.created_at,
        "incarnation": None if identity.incarnation is None else str(identity.incarnation),
        "begun": identity.begun,
    }
    write_file(fs, path, NAME, json.dumps(fields, indent=1).encode() + b"\n")


def read_identity(fs: FileSystem, path: str) -> Identity | None:
    """Return the identity of the spool in `path`, None where there is none yet.

    Raises UnsupportedFormat for a newer version, StoreError for anything else.
    """
    if NAME not in fs.listdir(path):
        return None
    try:
        fields = json.loads(read_file(fs, f"{path}/{NAME}"))
        kind, version = fields["kind"], fields["version"]
        if kind == KIND and version == VERSION:
            return Identity(
                str(fields["id"]),
                fields["service"],
                _uuid(fields["log_id"]),
                int(fields["created_at"]),
                _uuid(fields["incarnation"]),
                bool(fields["begun"]),
            )
    except (KeyError, TypeError, ValueError) as error:
        raise _not_a_spool(path, f"{NAME} cannot be read: {error}") from error
    if kind != KIND:
        raise _not_a_spool(path, f"it is a {kind!r:.40}")
    raise UnsupportedFormat(f"{path}/{NAME}", version, VERSION)


def _uuid(text: str | None) -> UUID | None:
    return None if text is None else UUID(text)


def _not_a_spool(path: str, why: str) -> StoreError:
    return StoreError(
        f"{path}: not a producer's spool: {why}",
        hint="give each store a directory of its own, or move this one away",
    )
