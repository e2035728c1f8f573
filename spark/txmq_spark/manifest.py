"""A plan as a file: JSON lines, the header first, frozen by a digest over every byte
but its own.

The same inputs give the same bytes, and the digest names the plan: the job that carries
it out is known by it, so that to run a plan twice is to run it once. Whoever wants
other letters replayed makes another plan.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from txmq.errors import ConfigError, RemoteProtocolError
from txmq.wire.json import WireModel, parse_as
from txmq_spark.plan import Class, Planned, Rules

VERSION: Final = 1
HINT: Final = "a plan is used as it was written: run reconcile again for another one"

Offset = Annotated[int, Field(ge=0)]


class Filters(WireModel):
    """What the plan was asked to take."""

    include: tuple[Class, ...]
    replays: int
    deaths: int
    error_types: tuple[str, ...]
    fingerprints: tuple[str, ...]
    chunk: int

    @classmethod
    def of(cls, rules: Rules) -> Filters:
        return cls(
            include=tuple(sorted(rules.include)),
            replays=rules.replays,
            deaths=rules.deaths,
            error_types=tuple(sorted(rules.error_types)),
            fingerprints=tuple(sorted(rules.fingerprints)),
            chunk=rules.chunk,
        )


class Facts(WireModel):
    """What the plan was made from: everything up to `ends`, judged by the database as
    it was at `snapshot_at`.
    """

    group: str
    log_id: str
    ends: dict[str, tuple[Offset, ...]]  # of each topic's partitions
    evidence: tuple[str, ...] = ()  # the tables that were asked
    database: str | None = None  # its system identifier and name, None where none was asked
    snapshot: str | None = None  # what it could see, in PostgreSQL's words
    snapshot_at: int | None = None  # microseconds, by the database's clock


class Header(WireModel):
    """The first line."""

    txmq_plan: int = VERSION
    facts: Facts
    filters: Filters
    letters: dict[Class, int]
    replays: int
    chunks: int
    digest: str = ""


class Entry(WireModel):
    """A line: a letter, what it was found to be, and the task that replays it; none =
    it is left as it is.
    """

    topic: str
    partition: Offset
    offset: Offset
    message_id: str
    key: str | None
    cls: Annotated[Class, Field(alias="class", strict=False)]
    reason: str
    fingerprint: str
    dead_at: int  # microseconds: a letter that has died again since is another one
    chunk: Offset | None


class Manifest(WireModel):
    """A frozen plan."""

    header: Header
    entries: tuple[Entry, ...]

    @property
    def digest(self) -> str:
        return self.header.digest

    @property
    def replays(self) -> tuple[Entry, ...]:
        """What is replayed, in order."""
        return tuple(entry for entry in self.entries if entry.chunk is not None)


def freeze(facts: Facts, rules: Rules, planned: Sequence[Planned]) -> bytes:
    """The plan's file."""
    lines = [_line(_entry(item)) for item in planned]
    replayed = [item.chunk for item in planned if item.chunk is not None]
    counts = Counter(item.cls for item in planned)
    header = Header(
        facts=facts,
        filters=Filters.of(rules),
        letters={cls: counts[cls] for cls in Class},
        replays=len(replayed),
        chunks=len(set(replayed)),
    )
    frozen = header.model_copy(update={"digest": _digest(header, lines)})
    return b"".join([_line(frozen), *lines])


def thaw(data: bytes) -> Manifest:
    """The plan in a file's bytes. Raises ConfigError where they are none, or were
    changed.
    """
    first, *lines = data.splitlines(keepends=True) or [b""]
    try:
        header = parse_as(Header, first)
        entries = tuple(parse_as(Entry, line) for line in lines)
    except RemoteProtocolError as error:
        raise ConfigError("plan", error.message, hint=HINT) from error
    if header.txmq_plan != VERSION:
        raise ConfigError(
            "plan", f"version {header.txmq_plan}, this txmq knows {VERSION}", hint="make it anew"
        )
    if _digest(header.model_copy(update={"digest": ""}), lines) != header.digest:
        raise ConfigError("plan", "it was changed after it was made", hint=HINT)
    return Manifest(header=header, entries=entries)


def read(path: Path) -> Manifest:
    """The plan in that file. Raises ConfigError."""
    try:
        return thaw(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            str(path), f"cannot be read: {error.strerror}", hint="give the file reconcile wrote"
        ) from error


def _entry(item: Planned) -> Entry:
    letter = item.letter
    return Entry.model_validate(
        {
            "topic": letter.topic,
            "partition": letter.partition,
            "offset": letter.offset,
            "message_id": letter.message_id,
            "key": letter.key,
            "class": item.cls,
            "reason": item.reason,
            "fingerprint": letter.fingerprint,
            "dead_at": letter.dead_at,
            "chunk": item.chunk,
        }
    )


def _line(model: WireModel) -> bytes:
    """Plain ASCII: a key may hold what looks like the end of a line."""
    fields = model.model_dump(mode="json", by_alias=True)
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _digest(header: Header, lines: Sequence[bytes]) -> str:
    digest = sha256(_line(header))
    for line in lines:
        digest.update(line)
    return digest.hexdigest()
