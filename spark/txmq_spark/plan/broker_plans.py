"""Plans of the broker with the letters of a plan that Spark has made.

The broker puts letters back: it keeps rate, order, stop rules and outcomes
(docs/operations/plans.md). Tasks add the letters in pages, and later read the
outcomes. Each step may be repeated, so a run that was killed is run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import from_arrow_schema

from txmq.errors import ConfigError
from txmq.model import limits
from txmq_spark.plan.directory import StoredPlan
from txmq_spark.session.task_frames import task_frame
from txmq_spark.source.broker_link import BrokerLink

PAGE: Final = 1_000  # letters of a call
ADDING_TASKS: Final = 4  # at once: the broker adds with one core
FIRST_LOOK_S: Final = 0.02  # after which a plan is looked at again
LOOK_S: Final = 0.5  # at most
RUNNING: Final = ("canary", "ramping")
OUTCOMES: Final = pa.schema(
    {
        "group": pa.string(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "outcome": pa.string(),
        "why": pa.string(),
        "died_as": pa.int64(),  # the number of a letter that has died again
    }
)


class BrokerPlan(NamedTuple):
    """A plan of the broker and its letters: `skipped` ones are not open any more, or
    have died again; `refused` ones are no failed messages any more.
    """

    name: str
    group: str
    added: int = 0
    skipped: int = 0
    refused: int = 0


def plan_names(plan: StoredPlan, name: str | None) -> dict[str, str]:
    """Return the broker's plans by group: one for each group that has letters to
    replay.

    Raises ConfigError where a name is too long.
    """
    stem = name or f"spark-{plan.manifest.digest[:12]}"
    groups = [group for group, letters in plan.manifest.replays.items() if letters]
    several = len(plan.manifest.facts.groups) > 1
    names = {group: f"{stem}.{group}" if several else stem for group in groups}
    for one in names.values():
        if len(one) > limits.NAME:
            raise ConfigError(
                "name",
                f"{one} has {len(one)} characters, not {limits.NAME}",
                hint="--name SHORT, or a plan of one group",
            )
    return names


def hand_over(
    url: str,
    plan: StoredPlan,
    name: str | None,
    settings: Mapping[str, object],
    operator: str | None = None,
) -> list[BrokerPlan]:
    """Make the broker's plans, and freeze them. What an earlier run has added stays.

    `url` is that of the plan's log. Raises ConfigError where the broker has another
    one, RequestRejected.
    """
    names = plan_names(plan, name)
    by = {"operator": operator, "reason": f"reconcile {plan.manifest.digest}"}
    with BrokerLink(url) as link:
        require_log(link, plan)
        for group, one in names.items():
            link.call("plan.create", name=one, group=group, settings=dict(settings), **by)
        # a plan that an earlier run has frozen has its letters; some may be gone by now
        building = {group: one for group, one in names.items() if state_of(link, one) == "building"}
        counts = _add(url, plan.letters.where("replay"), building) if building else {}
        for one in names.values():
            link.call("plan.freeze", name=one, **by)
            wait_for(link, one, lambda shown: shown["state"] != "building")
    return [BrokerPlan(one, group, *counts.get(group, ())) for group, one in names.items()]


def require_log(link: BrokerLink, plan: StoredPlan) -> None:
    """Raise ConfigError where the broker has another log than the plan.

    In a log that was restored since, the places and numbers of letters may be those of
    other ones.
    """
    facts, log = plan.manifest.facts, link.log_name
    if log.log_id != facts.log_id:
        raise ConfigError(
            "plan",
            f"the plan is of log {facts.log_id}, the broker has log {log.log_id}",
            hint="connect to the broker of the plan",
        )
    if log.incarnation != facts.incarnation:
        raise ConfigError(
            "plan",
            f"the broker's log was restored from a backup since: it is incarnation"
            f" {log.incarnation or 'original'}, the plan is of {facts.incarnation or 'original'}",
            hint="run reconcile again",
        )


def _add(url: str, letters: DataFrame, names: dict[str, str]) -> dict[str, tuple[int, ...]]:
    def add(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with BrokerLink(url) as link:
            for batch in batches:
                for page in pages(batch.to_pylist()):
                    yield _added(link, names[page[0]["group"]], page)

    letters = letters.where(f.col("group").isin(*names))
    schema = "`group` string, added bigint, skipped bigint, refused bigint"
    chosen = letters.select("group", "topic", "partition", "offset", "number")
    counts = chosen.coalesce(ADDING_TASKS).mapInArrow(add, schema).groupBy("group")
    sums = counts.agg(f.sum("added"), f.sum("skipped"), f.sum("refused")).collect()
    return {group: tuple(rest) for group, *rest in sums}


def pages(rows: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield rows as pages of one group each."""
    page: list[dict[str, Any]] = []
    for row in rows:
        if page and (len(page) == PAGE or row["group"] != page[0]["group"]):
            yield page
            page = []
        page.append(row)
    if page:
        yield page


def _added(link: BrokerLink, name: str, page: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    reply = link.call(
        "plan.add",
        name=name,
        letters=[(row["topic"], row["partition"], row["offset"]) for row in page],
        numbers=[row["number"] for row in page],
    )
    return pa.RecordBatch.from_pydict(
        {
            "group": pa.array([page[0]["group"]], pa.string()),
            "added": pa.array([reply["added"]], pa.int64()),
            "skipped": pa.array([reply["skipped"]], pa.int64()),
            "refused": pa.array([len(reply["refused"])], pa.int64()),
        }
    )


def start(link: BrokerLink, name: str, by: Mapping[str, object]) -> None:
    """Start a plan, or go on with it where it was paused; a running one goes on."""
    if state_of(link, name) == "planned":
        link.call("plan.start", name=name, **by)
    elif state_of(link, name) == "paused":
        link.call("plan.resume", name=name, **by)


def state_of(link: BrokerLink, name: str) -> str:
    """Return the state of a plan."""
    return str(link.call("plan.show", name=name)["state"])


def follow(
    link: BrokerLink, names: Sequence[str], tell: Callable[[dict[str, Any]], None] | None
) -> list[dict[str, Any]]:
    """Return the plans once none of them is running; tell about each now and then."""

    def ended(shown: dict[str, Any]) -> bool:
        if tell is not None:
            tell(shown)
        return shown["state"] not in RUNNING

    return [wait_for(link, name, ended) for name in names]


def wait_for(link: BrokerLink, name: str, over: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return a plan once it is `over`; look often first, because few letters are."""
    pause = FIRST_LOOK_S
    while not over(shown := link.call("plan.show", name=name)):
        time.sleep(pause)
        pause = min(2 * pause, LOOK_S)
    return shown


def outcomes(spark: SparkSession, url: str, names: Mapping[str, str]) -> DataFrame:
    """Return the outcome of each letter of the broker's plans, read by a task for each
    plan.
    """

    def read(named: tuple[str, str]) -> Iterator[pa.RecordBatch]:
        with BrokerLink(url) as link:
            yield from _outcomes(link, *named)

    return task_frame(spark, list(names.items()), read, from_arrow_schema(OUTCOMES))


def _outcomes(link: BrokerLink, group: str, name: str) -> Iterator[pa.RecordBatch]:
    cursor: str | None = None
    while True:
        reply = link.call("plan.letters", name=name, cursor=cursor, limit=PAGE)
        rows = [{"group": group, **letter} for letter in reply["letters"]]
        yield pa.RecordBatch.from_pylist(rows, schema=OUTCOMES)
        cursor = reply["next"]
        if cursor is None:
            return
