"""Stores of consumers and spools of producers on this machine, for `txmq recover`."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from txmq.cli.rows import body_fields
from txmq.errors import DirectoryInUse, InvalidExport, StoreError

if TYPE_CHECKING:
    from txmq.recover.local import Scanned, StoreIdentity, StoreSummary

# characters that the broker takes of an error's type, text and fingerprint
MAX_TYPE, MAX_TEXT, MAX_FINGERPRINT = 256, 4_096, 64


def require_directory(directory: Path) -> Path:
    """Return a directory that exists. Raises StoreError."""
    if not directory.is_dir():
        raise StoreError(
            f"{directory}: there is no such directory",
            hint="give the directory of consumers' stores or producers' spools",
        )
    return directory


def find_stores(directory: Path) -> list[Path]:
    """Return the stores in a directory, or below it."""
    from txmq.recover.local import stores_below
    from txmq.recover.local.view import is_store

    require_directory(directory)
    if is_store(directory):
        return [directory]
    return [Path(found.path) for found in stores_below(str(directory))]


def find_store(directory: Path) -> Path:
    """Return the only store in a directory, or below it. Raises StoreError."""
    found = find_stores(directory)
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(path) for path in found[:3])
    raise StoreError(
        f"{directory}: there are {len(found)} stores below: {names}"
        if found
        else f"{directory}: there is no store of a consumer",
        hint="give the directory of one store: txmq recover list --data DIR",
    )


def is_for_spools(directory: Path) -> bool:
    """Return whether producers use a directory, also where nothing waits there."""
    from txmq.recover.local.spools import TOPICS, spools_below

    return (directory / TOPICS).is_file() or bool(spools_below(str(directory)))


def describe_disk(directory: Path, group: str | None) -> dict[str, Any]:
    """Describe the stores and spools below a directory."""
    from txmq.recover.local import summary
    from txmq.recover.local.spools import spools_below
    from txmq.recover.local.view import is_store

    stores = [summary(str(path)) for path in find_stores(directory)]
    spools = [] if is_store(directory) else spools_below(str(directory))
    if not stores and not spools and not is_for_spools(directory):
        raise StoreError(
            f"{directory}: there is neither a store of a consumer nor a spool",
            hint="give the directory that was given as `local_store` or `spool`",
        )
    rows = [_store_row(found) for found in stores if _may_be_of(found, group)]
    shown = [
        spool._asdict() | {"log_id": None if spool.log_id is None else str(spool.log_id)}
        for spool in spools
    ]
    return {"stores": rows, "spools": shown}


def _may_be_of(found: StoreSummary, group: str | None) -> bool:
    """Return True for a store of the group, and for one whose group is not known."""
    return group is None or found.identity is None or found.identity.owner.group == group


def _store_row(found: StoreSummary) -> dict[str, Any]:
    identity = found.identity
    row: dict[str, Any] = {
        "group": None if identity is None else identity.owner.group,
        "topic": None if identity is None else identity.owner.topic,
        "store": None if identity is None else identity.id.hex,
        "owner_pid": found.owner_pid,
        "disk_bytes": found.disk_bytes,
        "quarantined": found.quarantined,
        "path": found.path,
        "problem": found.problem,
    }
    return row | ({} if identity is None else _counts(found.path))


def _counts(path: str) -> dict[str, Any]:
    from txmq.recover.local import State, scan

    states, unreported, attempts, oldest = Counter[str](), 0, 0, 0
    for entry, _message in scan(path):
        states[entry.state.name.lower()] += 1
        unreported += not entry.told
        if entry.state is State.ACKED:
            continue
        attempts += entry.attempt
        oldest = min(filter(None, (oldest, entry.first_at)), default=0)
    settled = states[State.ACKED.name.lower()]
    return {
        "messages": states.total() - settled,
        "settled": settled,
        "states": dict(states),
        "unreported": unreported,
        "attempts": attempts,
        "oldest": oldest or None,
    }


def list_messages(directory: Path, *, bodies: bool) -> Iterator[dict[str, Any]]:
    """Yield the messages of the store, or of the spools, in a directory."""
    from txmq.recover.local import existing_identity, scan

    if not find_stores(directory) and is_for_spools(directory):
        for spooled in list_spooled(directory):
            body = b64decode(spooled.pop("body"))
            refusal = spooled["refusal"]
            shown = spooled | ({} if refusal is None else _refused(refusal))
            yield shown | (body_fields(body) if bodies else {})
        return
    path = str(find_store(directory))
    topic = existing_identity(path).owner.topic
    for entry, message in scan(path):
        row: dict[str, Any] = {
            "topic": topic,
            "partition": entry.place.partition,
            "offset": entry.place.offset,
            "key": entry.key,
            "state": entry.state.name.lower(),
            "attempts": entry.attempt,
            "due": entry.due,
            "first_at": entry.first_at,
            "told": entry.told,
            "error_type": entry.failure.type,
            "error_text": entry.failure.text,
            "message_id": None if message is None else message.message_id,
        }
        yield row | (body_fields(message.body) if bodies and message is not None else {})


def _refused(refusal: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of a message that the broker refused for good."""
    return {"state": "refused", "error_type": refusal["error"], "error_text": refusal["text"]}


def list_spooled(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the messages of all spools below a directory, with bodies in base64."""
    from txmq.recover.local.spools import scan

    for message in scan(str(directory)):
        refusal = message.refusal
        yield message._asdict() | {
            "headers": dict(message.headers),
            "refusal": None if refusal is None else refusal._asdict(),
            "body": b64encode(message.body).decode(),
        }


@contextmanager
def open_copy(
    directory: Path | None, export: Path | None
) -> Iterator[tuple[StoreIdentity | None, Iterable[Scanned]]]:
    """Open the copy of a store that the operator names, if any."""
    from txmq.recover.local import existing_identity, read_export, scan, summary

    if directory is not None and export is not None:
        raise typer.BadParameter("use either --data or --export")
    if directory is not None:
        path = str(find_store(directory))
        identity, pid = existing_identity(path), summary(path).owner_pid
        if pid:
            raise DirectoryInUse(
                f"{path} is in use by {f'process {pid}' if pid > 0 else 'a process'}",
                hint="stop that consumer; or order its store: txmq retry now",
            )
        yield identity, scan(path)
    elif export is not None:
        try:
            with export.open(encoding="utf-8") as file:
                found = read_export(file)
                yield found.identity, found.messages
        except UnicodeDecodeError as error:
            raise InvalidExport(
                f"{export}: not text: {error.reason}",
                hint="give the whole output of txmq recover export",
            ) from error
        except OSError as error:
            raise StoreError(
                f"{export}: {error.strerror}", hint="give the output of txmq recover export"
            ) from error
    else:
        yield None, ()


def wire_entry(identity: StoreIdentity, scanned: Scanned) -> list[Any]:
    """Return what a store knows of a message, as `recover.tell` takes it."""
    entry = scanned.entry
    failure = entry.failure
    error = [
        failure.type[:MAX_TYPE],
        failure.text[:MAX_TEXT],
        failure.fingerprint[:MAX_FINGERPRINT],
    ]
    return [
        identity.owner.topic,
        *entry.place,
        entry.state.name.lower(),
        entry.attempt,
        entry.due,
        error if any(error) else None,
        entry.generation,
        entry.epoch,
    ]
