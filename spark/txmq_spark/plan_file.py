"""The file of a plan: JSON lines, the header first, sealed by a digest.

The digest covers all bytes but its own. The same inputs give the same bytes, and the
digest names the plan. The replay job is named after it, so that a plan that runs twice
replays once. To replay other letters, make another plan.
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
from txmq_spark.plan import LetterClass, PlannedLetter, PlanRules

VERSION: Final = 1
HINT: Final = "do not edit a plan: run reconcile again for another one"

Offset = Annotated[int, Field(ge=0)]


class PlanFilters(WireModel):
    """The rules that the plan was made with."""

    include: tuple[LetterClass, ...]
    replays: int
    deaths: int
    error_types: tuple[str, ...]
    fingerprints: tuple[str, ...]
    chunk: int

    @classmethod
    def of(cls, rules: PlanRules) -> PlanFilters:
        return cls(
            include=tuple(sorted(rules.include)),
            replays=rules.replays,
            deaths=rules.deaths,
            error_types=tuple(sorted(rules.error_types)),
            fingerprints=tuple(sorted(rules.fingerprints)),
            chunk=rules.chunk,
        )


class PlanInputs(WireModel):
    """The state that the plan was made from.

    Messages up to `ends` were classified by the database as of `snapshot_at`.
    """

    group: str
    log_id: str
    ends: dict[str, tuple[Offset, ...]]  # by topic, then by partition
    evidence: tuple[str, ...] = ()  # the tables that were read
    database: str | None = None  # its system identifier and name; None without a database
    snapshot: str | None = None  # as pg_current_snapshot() prints it
    snapshot_at: int | None = None  # microseconds by the database's clock


class PlanHeader(WireModel):
    """The first line of a plan."""

    txmq_plan: int = VERSION
    facts: PlanInputs
    filters: PlanFilters
    letters: dict[LetterClass, int]
    replays: int
    chunks: int
    digest: str = ""


class PlanEntry(WireModel):
    """A line of a plan: a letter, its class, and the task that replays it.

    `chunk` is None for a letter that the plan leaves as it is.
    """

    topic: str
    partition: Offset
    offset: Offset
    message_id: str
    key: str | None
    cls: Annotated[LetterClass, Field(alias="class", strict=False)]
    reason: str
    fingerprint: str
    dead_at: int  # microseconds; identifies this failure of the message
    chunk: Offset | None


class PlanFile(WireModel):
    """A plan as read from its file."""

    header: PlanHeader
    entries: tuple[PlanEntry, ...]

    @property
    def replays(self) -> tuple[PlanEntry, ...]:
        """The entries that the plan replays, in order."""
        return tuple(entry for entry in self.entries if entry.chunk is not None)


def encode_plan(facts: PlanInputs, rules: PlanRules, planned: Sequence[PlannedLetter]) -> bytes:
    """Return the bytes of the plan's file."""
    lines = [_line(_entry(item)) for item in planned]
    replayed = [item.chunk for item in planned if item.chunk is not None]
    counts = Counter(item.cls for item in planned)
    header = PlanHeader(
        facts=facts,
        filters=PlanFilters.of(rules),
        letters={cls: counts[cls] for cls in LetterClass},
        replays=len(replayed),
        chunks=len(set(replayed)),
    )
    frozen = header.model_copy(update={"digest": _digest(header, lines)})
    return b"".join([_line(frozen), *lines])


def decode_plan(data: bytes) -> PlanFile:
    """Parse the bytes of a plan's file.

    Raises ConfigError where they are no plan, or were changed.
    """
    first, *lines = data.splitlines(keepends=True) or [b""]
    try:
        header = parse_as(PlanHeader, first)
        entries = tuple(parse_as(PlanEntry, line) for line in lines)
    except RemoteProtocolError as error:
        raise ConfigError("plan", error.message, hint=HINT) from error
    if header.txmq_plan != VERSION:
        raise ConfigError(
            "plan",
            f"version {header.txmq_plan} is not supported, only version {VERSION}",
            hint="run reconcile again",
        )
    if _digest(header.model_copy(update={"digest": ""}), lines) != header.digest:
        raise ConfigError("plan", "it was changed after it was made", hint=HINT)
    return PlanFile(header=header, entries=entries)


def read_plan(path: Path) -> PlanFile:
    """Read a plan from a file. Raises ConfigError."""
    try:
        return decode_plan(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            str(path),
            f"cannot be read: {error.strerror}",
            hint="name the file that reconcile wrote",
        ) from error


def _entry(item: PlannedLetter) -> PlanEntry:
    letter = item.letter
    return PlanEntry.model_validate(
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
    """Encode as ASCII, because a key may contain an end of line."""
    fields = model.model_dump(mode="json", by_alias=True)
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _digest(header: PlanHeader, lines: Sequence[bytes]) -> str:
    digest = sha256(_line(header))
    for line in lines:
        digest.update(line)
    return digest.hexdigest()
