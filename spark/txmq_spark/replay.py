"""Replay of a plan: tasks store the replays as bundles, and one decision publishes
them.

A task stores one bundle per chunk, without messages. Its actions are the replays of the
chunk's letters, in the order of their keys. The job is named by the plan's digest, so a
plan is replayed once. A run that died before its decision is rolled back first. Letters
that are gone, or that another transaction has reserved, are left out and reported.

A replayed letter is delivered again in its place, with the same id. Once it is acked,
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
from txmq.model.actions import ReplayAction
from txmq.model.decider import ByJob
from txmq.model.message import COMMIT
from txmq.model.units import SECOND
from txmq.wire.bundle import NO_DIGEST, BundleDescription, BundlePart, bundle_digest
from txmq_spark.broker_link import BrokerLink
from txmq_spark.named_jobs import current_job
from txmq_spark.plan_file import PlanEntry, PlanFile
from txmq_spark.writing import EXPIRE_S, SERVICE, task_client

LetterPlace = tuple[str, int, int]
Letters = Mapping[LetterPlace, Mapping[str, Any]]  # as the broker lists them
RESERVE_ATTEMPTS: Final = 3  # to reserve all letters, while others may replay or close some
EXPIRE_US: Final = int(EXPIRE_S * SECOND)
DONE_BEFORE: Final = "by an earlier run of this plan"
LEFT_BEFORE: Final = "an earlier run of this plan left it: run reconcile again"


class LetterOutcome(NamedTuple):
    """The outcome for one letter.

    "done" means that it is delivered again, and a dry run gives "planned". "gone": it
    was replayed before, as by a canary, or closed. "refused" has a reason.
    """

    entry: PlanEntry
    outcome: str
    why: str = ""

    @property
    def place(self) -> LetterPlace:
        return self.entry.topic, self.entry.partition, self.entry.offset


class ReplayResult(NamedTuple):
    """The result of a run.

    `job` is None where nothing was replayed. `repeated` means that an earlier run has
    replayed the plan.
    """

    job: UUID | None
    outcomes: tuple[LetterOutcome, ...]
    repeated: bool = False

    def lines(self) -> Iterator[str]:
        """Yield the outcomes as JSON lines."""
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
    plan: PlanFile,
    *,
    canary: int | None = None,
    dry_run: bool = False,
) -> ReplayResult:
    """Replay the letters of the plan.

    `canary` takes that many letters from the beginning, and the rest of the last key.
    Raises ConfigError where the plan is of another broker's log. Raises
    TransactionAborted where other transactions interfered; then nothing was replayed.
    """
    entries = plan.replays if canary is None else take_canary(plan.replays, canary)
    group = plan.header.facts.group
    with BrokerLink(url) as link:
        _require_log(link, plan)
        if dry_run:
            return ReplayResult(
                None, tuple(expected_outcomes(entries, _open_letters(link, group), "planned"))
            )
        name = f"replay {plan.header.digest}" + ("" if canary is None else f" first {len(entries)}")
        for _ in range(RESERVE_ATTEMPTS):
            done = _run(spark, link, url, group, name, entries)
            if done is not None:
                return done
    raise TransactionAborted(
        "other transactions replay or close letters of this plan",
        hint="run it again later",
    )


def _run(
    spark: SparkSession,
    link: BrokerLink,
    url: str,
    group: str,
    name: str,
    entries: Sequence[PlanEntry],
) -> ReplayResult | None:
    """Make one attempt.

    Returns None where letters changed meanwhile or another run took over; then nothing
    was replayed.
    """
    with task_client(url) as client:
        job = current_job(client, name, take_over=True)
        letters = _open_letters(link, group)
        if job.committed:
            return ReplayResult(job.token, tuple(past_outcomes(entries, letters)), repeated=True)
        foreseen = tuple(expected_outcomes(entries, letters, "done"))
        if all(one.outcome != "done" for one in foreseen):
            return ReplayResult(None, foreseen)
        winners = _store_chunks(spark, url, group, job.token, foreseen)
        if winners is None:
            client.job(job.token).abort()
            return None
        decided = client.job(job.token).decide(winners)
    return (
        ReplayResult(job.token, foreseen, decided.repeated) if decided.outcome is COMMIT else None
    )


def take_canary(entries: Sequence[PlanEntry], count: int) -> tuple[PlanEntry, ...]:
    """Return the first `count` entries or a few more, up to the end of a key.

    Raises ConfigError.
    """
    if count < 1:
        raise ConfigError("canary", f"invalid number of letters {count}", hint="use 1 or more")
    chosen = list(entries[:count])
    for entry in entries[count:]:
        if entry.key is None or (entry.topic, entry.key) != (chosen[-1].topic, chosen[-1].key):
            break
        chosen.append(entry)
    return tuple(chosen)


def expected_outcomes(
    entries: Iterable[PlanEntry], letters: Letters, good: str
) -> Iterator[LetterOutcome]:
    """Yield the outcome of each entry, by the present letters.

    No letter overtakes an earlier one of its key that stays.
    """
    staying: dict[tuple[str, str], str] = {}
    for entry in entries:
        letter = letters.get((entry.topic, entry.partition, entry.offset))
        why = _refusal_reason(entry, letter)
        if entry.key is not None:
            key, place = (entry.topic, entry.key), f"{entry.partition}/{entry.offset}"
            if why and letter is not None:
                staying.setdefault(key, place)
            elif not why and key in staying:
                why = f"behind {staying[key]} of its key, which stays"
        outcome = "gone" if letter is None else "refused" if why else good
        yield LetterOutcome(entry, outcome, why)


def _refusal_reason(entry: PlanEntry, letter: Mapping[str, Any] | None) -> str:
    """Return why this plan cannot replay a letter; "" where it can."""
    if letter is None:
        return "it is no dead letter any more: it was replayed before, or closed"
    if not _is_planned_death(entry, letter):
        return "it was replayed after the plan was made, and failed again"
    return (
        f"transaction {letter['reserved_by']} has reserved it"
        if letter["reserved_by"] is not None
        else ""
    )


def _is_planned_death(entry: PlanEntry, letter: Mapping[str, Any]) -> bool:
    """Return whether this is the message of the plan, and the same failure of it."""
    return (letter["message_id"], letter["dead_at"]) == (entry.message_id, entry.dead_at)


def past_outcomes(entries: Iterable[PlanEntry], letters: Letters) -> Iterator[LetterOutcome]:
    """Yield the outcome of each entry in an earlier run, by the present letters."""
    for entry in entries:
        letter = letters.get((entry.topic, entry.partition, entry.offset))
        left = letter is not None and _is_planned_death(entry, letter)
        yield (
            LetterOutcome(entry, "refused", LEFT_BEFORE)
            if left
            else LetterOutcome(entry, "done", DONE_BEFORE)
        )


def _require_log(link: BrokerLink, plan: PlanFile) -> None:
    expected = plan.header.facts.log_id
    if link.log_id != expected:
        raise ConfigError(
            "plan",
            f"the plan is of log {expected}, the broker has log {link.log_id}",
            hint="connect to the broker of the plan",
        )


def _open_letters(link: BrokerLink, group: str) -> dict[LetterPlace, dict[str, Any]]:
    letters = link.letters(group, bodies=False)
    return {(letter["topic"], letter["partition"], letter["offset"]): letter for letter in letters}


def _store_chunks(
    spark: SparkSession, url: str, group: str, job: UUID, foreseen: Iterable[LetterOutcome]
) -> list[UUID] | None:
    """Store a bundle for each chunk and return their tokens, in order.

    Returns None where a letter is not available any more. All attempts of a task store
    the same bundle under the same token, so repeated storing changes nothing.
    """
    ready = [one for one in foreseen if one.outcome == "done"]
    rows = [
        (new_token().hex, json.dumps([one.place for one in same]))
        for _chunk, same in groupby(ready, key=lambda one: one.entry.chunk)
    ]

    def store(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with BrokerLink(url) as link:
            for batch in batches:
                refusals = [
                    _store_chunk(link, group, job, row["token"], row["places"])
                    for row in batch.to_pylist()
                ]
                yield pa.RecordBatch.from_pydict({"refusal": pa.array(refusals, pa.string())})

    spread = spark.createDataFrame(rows, "token string, places string").repartition(
        len(rows), "token"
    )
    refusals = [row["refusal"] for row in spread.mapInArrow(store, "refusal string").collect()]
    return [UUID(token) for token, _places in rows] if not any(refusals) else None


def _store_chunk(link: BrokerLink, group: str, job: UUID, token: str, places: str) -> str | None:
    """Store one chunk; return the reason of a refusal, None where it is stored."""
    actions = tuple(
        ReplayAction(group, topic, partition, offset)
        for topic, partition, offset in json.loads(places)
    )
    description = BundleDescription(ByJob(job.bytes), SERVICE, actions, EXPIRE_US)
    part = BundlePart(
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
        link.store(part._replace(digest=bundle_digest([part])))
    except UnknownLetter as error:
        return error.message
    return None
