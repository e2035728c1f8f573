"""Replaying a plan: one job whose tasks store what is to be replayed, and one decision
that makes all of it happen.

A task stores a group for each chunk, without messages: its actions are the replays of
the chunk's letters, in the order of their keys. The job is named by the plan's digest,
so that a plan that was run is not run again; a run that died half-way is given up
first. A letter that is no longer there, or that somebody else has in hand, is left out
and said so.

A replayed letter is delivered again in its place, with the same id; once it is acked,
the messages of its key that were parked behind it follow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple
from uuid import UUID

import pyarrow as pa
from pyspark.sql import SparkSession

from txmq.client.protocol.transaction.tokens import new_token
from txmq.errors import ConfigError, TransactionAborted, UnknownLetter
from txmq.model.message import COMMIT
from txmq.wire.group import NO_DIGEST, Description, Part, group_digest
from txmq_spark.jobs import current
from txmq_spark.link import Link
from txmq_spark.manifest import Entry, Manifest
from txmq_spark.writing import EXPIRE_S, SERVICE, connected

Place = tuple[str, int, int]
Letters = Mapping[Place, Mapping[str, Any]]  # as the broker tells them
ATTEMPTS: Final = 3  # to get hold of all letters at once, while others may be at work on them
EXPIRE_US: Final = int(EXPIRE_S * 1_000_000)
EARLIER: Final = "by an earlier run of this plan"
LEFT: Final = "an earlier run of this plan left it: reconcile again for another plan"


class Outcome(NamedTuple):
    """What became of a letter: "done" = it is delivered again; "refused", and why; in a
    dry run "planned".
    """

    entry: Entry
    outcome: str
    why: str = ""

    @property
    def place(self) -> Place:
        return self.entry.topic, self.entry.partition, self.entry.offset


class Replay(NamedTuple):
    """A run of a plan. `job` is None where nothing was replayed; `repeated` = an
    earlier run had done it.
    """

    job: UUID | None
    outcomes: tuple[Outcome, ...]
    repeated: bool = False

    def lines(self) -> Iterator[str]:
        """The outcomes as JSON lines."""
        for one in self.outcomes:
            topic, partition, offset = one.place
            fields = {
                "topic": topic,
                "partition": partition,
                "offset": offset,
                "message_id": one.entry.message_id,
            }
            yield json.dumps(
                fields | {"key": one.entry.key, "outcome": one.outcome, "why": one.why}
            )


def replay(
    spark: SparkSession,
    url: str,
    plan: Manifest,
    *,
    canary: int | None = None,
    dry_run: bool = False,
) -> Replay:
    """Replays what the plan takes; `canary`: only so many letters from its beginning,
    and the rest of the last key.

    Raises ConfigError where the plan is of another broker's log, TransactionAborted
    where others got in the way: then nothing was replayed.
    """
    entries = plan.replays if canary is None else first_keys(plan.replays, canary)
    group = plan.header.facts.group
    with Link(url) as link:
        _require_log(link, plan)
        if dry_run:
            return Replay(None, tuple(foresee(entries, _open_letters(link, group), "planned")))
        name = f"replay {plan.digest}" + ("" if canary is None else f" first {len(entries)}")
        for _ in range(ATTEMPTS):
            done = _run(spark, link, url, group, name, entries)
            if done is not None:
                return done
    raise TransactionAborted(
        "others replay or close letters of this plan just now",
        hint="run it again when they are done",
    )


def _run(
    spark: SparkSession, link: Link, url: str, group: str, name: str, entries: Sequence[Entry]
) -> Replay | None:
    """One attempt; None = the letters changed meanwhile, or another run took over, and
    nothing was replayed.
    """
    with connected(url) as client:
        job = current(client, name, take_over=True)
        letters = _open_letters(link, group)
        if job.committed:
            return Replay(job.token, tuple(recall(entries, letters)), repeated=True)
        foreseen = tuple(foresee(entries, letters, "done"))
        if all(one.outcome == "refused" for one in foreseen):
            return Replay(None, foreseen)
        winners = _store(spark, url, group, job.token, foreseen)
        if winners is None:
            client.job(job.token).abort()
            return None
        decided = client.job(job.token).decide(winners)
    return Replay(job.token, foreseen, decided.repeated) if decided.outcome is COMMIT else None


def first_keys(entries: Sequence[Entry], count: int) -> tuple[Entry, ...]:
    """The first entries, at least `count` of them, that end with the end of a key.
    Raises ConfigError.
    """
    if count < 1:
        raise ConfigError("canary", f"{count} is no number of letters", hint="1 or more")
    chosen = list(entries[:count])
    for entry in entries[count:]:
        if entry.key is None or (entry.topic, entry.key) != (chosen[-1].topic, chosen[-1].key):
            break
        chosen.append(entry)
    return tuple(chosen)


def foresee(entries: Iterable[Entry], letters: Letters, good: str) -> Iterator[Outcome]:
    """What will become of each entry, as the letters are now. Nothing overtakes a
    letter of its key that stays.
    """
    staying: dict[tuple[str, str], str] = {}
    for entry in entries:
        letter = letters.get((entry.topic, entry.partition, entry.offset))
        why = _refused(entry, letter)
        if entry.key is not None:
            key, place = (entry.topic, entry.key), f"{entry.partition}/{entry.offset}"
            if why and letter is not None:
                staying.setdefault(key, place)
            elif not why and key in staying:
                why = f"behind {staying[key]} of its key, which stays"
        yield Outcome(entry, "refused" if why else good, why)


def _refused(entry: Entry, letter: Mapping[str, Any] | None) -> str:
    """Why a letter cannot be replayed by this plan; "" = it can."""
    if letter is None:
        return "it is no dead letter any more"
    if not _same(entry, letter):
        return "it was replayed since the plan was made, and died again"
    return (
        f"transaction {letter['reserved_by']} has it in hand"
        if letter["reserved_by"] is not None
        else ""
    )


def _same(entry: Entry, letter: Mapping[str, Any]) -> bool:
    """Whether the letter is the one that was planned: that message, and that death of
    it.
    """
    return (letter["message_id"], letter["dead_at"]) == (entry.message_id, entry.dead_at)


def recall(entries: Iterable[Entry], letters: Letters) -> Iterator[Outcome]:
    """What became of each entry in an earlier run, as far as can be seen now."""
    for entry in entries:
        letter = letters.get((entry.topic, entry.partition, entry.offset))
        left = letter is not None and _same(entry, letter)
        yield Outcome(entry, "refused", LEFT) if left else Outcome(entry, "done", EARLIER)


def _require_log(link: Link, plan: Manifest) -> None:
    expected = plan.header.facts.log_id
    if link.log_id != expected:
        raise ConfigError(
            "plan",
            f"it is of log {expected}, the broker has {link.log_id}",
            hint="ask the right broker",
        )


def _open_letters(link: Link, group: str) -> dict[Place, dict[str, Any]]:
    letters = link.letters(group, bodies=False)
    return {(letter["topic"], letter["partition"], letter["offset"]): letter for letter in letters}


def _store(
    spark: SparkSession, url: str, group: str, job: UUID, foreseen: Iterable[Outcome]
) -> list[UUID] | None:
    """Stores a group for each chunk and returns their tokens, in order; None where a
    letter is not to be had any more.

    A chunk's token is the same in every attempt of its task, and so is what it stores:
    to store it twice does nothing.
    """
    ready = [one for one in foreseen if one.outcome == "done"]
    rows = [
        (new_token().hex, json.dumps([one.place for one in same]))
        for _chunk, same in groupby(ready, key=lambda one: one.entry.chunk)
    ]

    def store(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with Link(url) as link:
            for batch in batches:
                refusals = [
                    _refusal(link, group, job, row["token"], row["places"])
                    for row in batch.to_pylist()
                ]
                yield pa.RecordBatch.from_pydict({"refusal": pa.array(refusals, pa.string())})

    spread = spark.createDataFrame(rows, "token string, places string").repartition(
        len(rows), "token"
    )
    refusals = [row["refusal"] for row in spread.mapInArrow(store, "refusal string").collect()]
    return [UUID(token) for token, _places in rows] if not any(refusals) else None


def _refusal(link: Link, group: str, job: UUID, token: str, places: str) -> str | None:
    """Stores one chunk; returns why the broker would not have it, None where it is
    stored.
    """
    actions = tuple(
        ("replay", group, topic, partition, offset)
        for topic, partition, offset in json.loads(places)
    )
    description = Description(("job", job.bytes), SERVICE, actions, EXPIRE_US)
    part = Part(
        UUID(token).bytes,
        0,
        0,
        sealed=True,
        commit=False,
        digest=NO_DIGEST,
        description=description,
        batches=(),
    )
    try:
        link.store(part._replace(digest=group_digest([part])))
    except UnknownLetter as error:
        return error.message
    return None
