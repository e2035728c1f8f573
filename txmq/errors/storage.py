"""Errors of files: of a broker's, above all."""

from __future__ import annotations

from txmq.errors.base import TxmqError


class StoreError(TxmqError):
    """The log or one of its companions cannot be used, or the positions of a reader."""


class CorruptRecord(StoreError):
    """Durable data is damaged at `position` of the file `path`."""

    def __init__(self, path: str, position: int, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: damaged at position {position}: {reason}", hint=hint)
        self.path, self.position, self.reason = path, position, reason


class UnsupportedFormat(StoreError):
    """A file was written by another version of txmq."""

    def __init__(self, path: str, found: object, known: object) -> None:
        super().__init__(
            f"{path}: format version {found}, this txmq knows {known}",
            hint="it was written by another version of txmq: run that version, or restore a backup",
        )
        self.path, self.found, self.known = path, found, known


class DiskFull(StoreError):
    """There is no space for the log to grow."""

    retriable = True


class StoreClosed(StoreError):
    """The store was closed, or it failed earlier and refuses further work until it is
    recovered by a restart.
    """


class DirectoryInUse(StoreError):
    """Another process holds the data directory."""
