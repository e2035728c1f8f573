"""The root of the tree; errors of settings, protocols, connections and files."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

Outcome = Literal["not done", "unknown"]
MAY_BE_DONE: Final = "the request may have been carried out: check before you repeat it"


class TxmqError(Exception):
    """Root of the tree.

    `hint` says what to do; the text of the error ends with it. `advice` is the default
    hint of a class.
    """

    advice: ClassVar[str] = ""
    retriable: ClassVar[bool] = False
    outcome: Outcome = "not done"

    def __init__(self, message: str, *, hint: str = "") -> None:
        hint = hint or self.advice
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


class ConfigError(TxmqError):
    """A setting is missing or wrong; `path` names it within the settings file."""

    def __init__(self, path: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: {message}", hint=hint)
        self.path = path


class ProtocolError(TxmqError):
    """The conversation broke a rule of the protocol."""


class LocalProtocolError(ProtocolError):
    """This side tried something that the protocol forbids: a bug, or bad input."""


class BodyMismatch(LocalProtocolError):
    """The body of a message does not fit the model of its topic.

    As an error of a dead letter it says that no handler has seen the message.
    """

    advice = "`txmq topic schema show TOPIC` has what the topic expects"


class InvalidSelector(LocalProtocolError):
    """A selector cannot be parsed; `position` is the place of the mistake, from 0."""

    def __init__(self, message: str, position: int, *, hint: str = "") -> None:
        super().__init__(f"in the selector, at {position}: {message}", hint=hint)
        self.position = position


class InvalidPath(LocalProtocolError):
    """A path into JSON bodies cannot be parsed; `position` is the place of the mistake,
    from 0.
    """

    def __init__(self, message: str, text: str, position: int) -> None:
        super().__init__(
            f"in the path {text[:80]!r}, at {position}: {message}",
            hint="write $.name.name=VALUE, with [0] for an index and ['a b'] for any name; "
            "or \\$… for a text that begins with $",
        )
        self.position = position


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; the connection is closed."""

    advice = "compare the versions of txmq on both sides"


class BrokerUnavailable(TxmqError):
    """No connection to any broker could be made within the time allowed."""

    advice = "nothing was done: try again once a broker answers there"
    retriable = True


class LogChanged(TxmqError):
    """The broker has another log than before; nothing that the client cached holds."""


class ConnectionLost(TxmqError):
    """The connection ended during the request, which may have been carried out."""

    advice = MAY_BE_DONE
    retriable = True
    outcome = "unknown"


class RequestTimeout(TxmqError):
    """No reply came in time; the request may have been carried out."""

    advice = MAY_BE_DONE
    retriable = True
    outcome = "unknown"


class ClientClosed(TxmqError):
    """The client, consumer or transaction was closed before this call."""

    advice = "make a new one"


class StoreError(TxmqError):
    """The log, a file beside it, or a reader's file of offsets cannot be used."""


class CorruptRecord(StoreError):
    """Durable data is damaged at `position` of the file `path`."""

    def __init__(self, path: str, position: int, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: damaged at position {position}: {reason}", hint=hint)
        self.path, self.position, self.reason = path, position, reason


class UnsupportedFormat(StoreError):
    """A file was written by an incompatible version of txmq."""

    def __init__(self, path: str, found: object, known: object) -> None:
        super().__init__(
            f"{path}: format version {found}, this txmq knows {known}",
            hint="it was written by another version of txmq: run that version, or restore a backup",
        )
        self.path, self.found, self.known = path, found, known


class BackupDamaged(StoreError):
    """A backup is not whole, or its bytes are not those that were written."""


class BackupMismatch(StoreError):
    """A directory holds something else than a backup of this log, or a later state."""

    advice = "give a directory of its own for this backup"


class RestoreUnfinished(StoreError):
    """A data directory is a backup, or the restore of one has not finished."""

    advice = "run `txmq log restore` into an empty directory, or into this one again"


class DiskFull(StoreError):
    """There is no space for the log to grow."""

    retriable = True


class LogUnavailable(StoreError):
    """The partition of a shared log took no record in time, or cannot be asked."""

    retriable = True
    outcome = "unknown"


class StoreFull(StoreError):
    """A store on local disk holds as much as its limits allow."""

    advice = "wait until some of it is done, or raise the limits of the store"
    retriable = True


class ForeignStore(StoreError):
    """A store on local disk belongs to another owner than the one who opens it."""


class InvalidExport(StoreError):
    """A file is no export of a store, or an incomplete one."""


class NodeEnded(StoreError):
    """A node of a cluster is no longer part of it, such as when another one leads.

    `may_follow`: a new process may follow again.
    """

    may_follow = False


class StoreClosed(StoreError):
    """The store was closed, or failed and takes no more work until a restart."""


class DirectoryInUse(StoreError):
    """Another process uses the directory."""


class SpoolFull(StoreError):
    """The producer's spool has reached its limit, or its disk is full."""

    advice = "send again once the broker is back, raise `spool_bytes`, or free space on that disk"
    retriable = True
