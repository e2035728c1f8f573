"""Classification of dead letters by log and database, as a plan.

The snapshot of the database comes first, then the published ends. So a row of the
snapshot had its message sent before, unless the transaction is still undecided. The
plan is a function of the two, byte for byte. Nothing is changed.

What grows with the letters stays in executors: they read letters, log and tables, ask
the broker, join and classify. The driver has counts. A few letters it has itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import reduce
from typing import Any, Final, NamedTuple

import pyarrow as pa
from psycopg2.sql import Identifier
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f

from txmq.errors import ConfigError
from txmq.model.units import DAY, MILLISECOND
from txmq_spark.arrow_letters import LETTERS
from txmq_spark.arrow_messages import MESSAGES
from txmq_spark.broker_link import BrokerLink
from txmq_spark.concurrent_actions import at_once
from txmq_spark.database_snapshot import DatabaseSnapshot, open_snapshot
from txmq_spark.database_tables import (
    evidence_names,
    evidence_pages,
    oldest_token,
    query_tables,
    read_tables,
)
from txmq_spark.few_letters import FewLetters, few_missing
from txmq_spark.java_classes import keep_classes
from txmq_spark.letter_evidence import (
    KEPT,
    EvidenceTables,
    gathered,
    join_evidence,
    keys_apart,
    token_column,
    tokens_without_messages,
)
from txmq_spark.letter_reading import LetterReader
from txmq_spark.mapping import Mapping, mistake_column, version_column
from txmq_spark.message_reading import MessageReader
from txmq_spark.plan import LetterClass, PlanRules, classified
from txmq_spark.plan_directory import (
    PlanFilters,
    PlanInputs,
    PlanMade,
    PlanManifest,
    PlanPart,
    PlanRows,
    StoredPlan,
    arranged,
    in_parts,
    part_digests,
    write_plan,
)
from txmq_spark.plan_summary import (
    MissingSummary,
    PlanSummary,
    summarize,
    summarize_missing,
)
from txmq_spark.query_errors import job_errors
from txmq_spark.reconcile_inputs import Inputs, fix_inputs, require_same_topics
from txmq_spark.source_options import ReadOptions, parse_read_options
from txmq_spark.spark_session import planned_once
from txmq_spark.task_frames import task_frame
from txmq_spark.token_states import broker_states

# the broker keeps outcomes of transactions for so long
OUTCOME_KEPT_US: Final = 7 * DAY
# what one task reads in a second or two
FEW_LETTERS, FEW_MESSAGES, FEW_PAGES = 5_000, 100_000, 2_048
ERROR_CHARACTERS: Final = 200  # of the last line of a letter's error
MISSING: Final = "what string, `table` string, name string, state string, at bigint"
LOG_COLUMNS: Final = ("topic", "partition", "offset", "message_id", "key")


class ReconcileOptions(NamedTuple):
    """Options of a reconciliation. Without `dsn` it uses the letters alone."""

    url: str
    groups: tuple[str, ...]
    dsn: str | None = None
    topics: tuple[str, ...] = ()  # () = the topics that the groups read
    mapping: Mapping = Mapping()
    rules: PlanRules = PlanRules()
    standby: bool = False  # a snapshot of a standby is allowed


class _Evidence(NamedTuple):
    """Evidence that a reconciliation reads: inputs and frames of one moment."""

    spark: SparkSession
    options: ReconcileOptions
    inputs: Inputs
    tables: EvidenceTables
    log: DataFrame | None  # None without a database
    few: bool


class _JudgedLetters(NamedTuple):
    """The letters of a plan with their classes, and the digests of their parts."""

    letters: DataFrame
    parts: tuple[PlanPart, ...]
    few: FewLetters | None = None  # the same letters, where they are few


class _FoundMissing(NamedTuple):
    """What is missing: in executors, or in the driver where it is little."""

    rows: DataFrame | pa.Table
    summary: MissingSummary


class Reconciliation(NamedTuple):
    """A plan and what it is about. Its rows are in executors until the block of
    `reconciled` ends, or in the driver where they are few.
    """

    manifest: PlanManifest
    made: PlanMade
    summary: PlanSummary
    letters: DataFrame
    rows: PlanRows

    def write(self, path: str) -> StoredPlan:
        """Write the plan into a directory of any file system that Spark knows."""
        spark = self.letters.sparkSession
        return write_plan(spark, path, self.manifest, self.made, self.rows)


@contextmanager
def reconciled(spark: SparkSession, options: ReconcileOptions) -> Iterator[Reconciliation]:
    """Classify the letters and make a plan, which lasts for the block; change nothing.

    Raises TxmqError.
    """
    if options.mapping.applied and len(options.groups) > 1:
        raise ConfigError(
            "applied", "a query is about one group", hint="reconcile each group by itself"
        )
    keep_classes(spark)
    with ExitStack() as stack:
        stack.enter_context(job_errors())
        snapshot = None
        if options.dsn:
            names = _names_to_lock(options.dsn, options)
            opened = open_snapshot(options.dsn, names, standby=options.standby)
            snapshot = stack.enter_context(opened)
            options.mapping.check(snapshot)
        link = stack.enter_context(BrokerLink(options.url))
        inputs = fix_inputs(link, snapshot, options.groups, options.topics)
        few, tables, log = _is_few(inputs, options), EvidenceTables(), None
        with planned_once(spark) if few else nullcontext():
            if snapshot is not None:
                tables = read_tables(spark, snapshot, inputs.groups, options.mapping, few=few)
            stack.callback(tables.release)
            if snapshot is not None:
                log = _log(spark, options, inputs, few=few).persist(KEPT)
                stack.callback(log.unpersist)
            found = _reconcile(_Evidence(spark, options, inputs, tables, log, few))
            stack.callback(found.letters.unpersist)
            if not isinstance(found.rows.missing, pa.Table):
                stack.callback(found.rows.missing.unpersist)
        yield found


def reconcile(spark: SparkSession, options: ReconcileOptions, path: str) -> Reconciliation:
    """Classify the letters, and write a plan into a directory. Raises TxmqError."""
    with reconciled(spark, options) as found:
        stored = found.write(path)
        return found._replace(letters=stored.letters)


def _reconcile(read: _Evidence) -> Reconciliation:
    # While the driver plans one, executors work on the other.
    plan, missing = at_once(read.spark, lambda: _judged(read), lambda: _told_missing(read))
    options, inputs, snapshot = read.options, read.inputs, read.inputs.snapshot
    summary = _summary(plan, missing.summary, snapshot)
    groups = [group.name for group in inputs.groups]
    manifest = PlanManifest(
        facts=PlanInputs(
            groups=tuple(groups),
            log_id=inputs.groups[0].log_id,
            firsts=inputs.firsts,
            ends=inputs.ends,
            evidence=tuple(
                name for name, frame in read.tables._asdict().items() if frame is not None
            ),
            database=f"{snapshot.identity.system_id}/{snapshot.database}" if snapshot else None,
            incarnation=inputs.link.log_name.incarnation,
        ),
        filters=PlanFilters.of(options.rules),
        letters={
            group: {cls: summary.classes.get((group, cls), 0) for cls in LetterClass}
            for group in groups
        },
        replays={
            group: sum(summary.replayed.get((group, cls), 0) for cls in LetterClass)
            for group in groups
        },
        parts=plan.parts,
    )
    require_same_topics(inputs)
    made = PlanMade()
    if snapshot is not None:
        made = PlanMade(snapshot=snapshot.visible, snapshot_at=snapshot.at)
    rows = PlanRows(plan.letters if plan.few is None else plan.few.rows, missing.rows)
    return Reconciliation(manifest.sealed(), made, summary, plan.letters, rows)


def _judged(read: _Evidence) -> _JudgedLetters:
    """Return the letters with their classes, and the digests of their parts."""
    options, inputs = read.options, read.inputs
    # listed once, because several joins must see the same letters
    listed = _kept_once(_letters(read.spark, options, inputs, few=read.few))
    places = sum(map(sum, inputs.ends.values()))
    letters = in_parts(listed, places * len(inputs.groups))
    evidence = join_evidence(letters.frame, read.log, read.tables, few=read.few)
    states = _with_token_states(evidence, options, inputs)
    judged = classified(states, options.rules, few=read.few)
    plan = arranged(judged, letters.parts)
    if not read.few:
        return _JudgedLetters(plan, part_digests(plan))
    few = FewLetters.of(plan)
    return _JudgedLetters(plan, few.part_digests(), few)


def _summary(
    plan: _JudgedLetters, missing: MissingSummary, snapshot: DatabaseSnapshot | None
) -> PlanSummary:
    """Return the summary as of the snapshot, else of the last death."""
    if plan.few is not None:
        return plan.few.summary(missing, snapshot.at if snapshot else plan.few.youngest)
    if snapshot is not None:
        return summarize(plan.letters, missing, snapshot.at)
    youngest = plan.letters.agg(f.max("dead_at").alias("at")).first()
    return summarize(plan.letters, missing, int((youngest and youngest["at"]) or 0))


def _told_missing(read: _Evidence) -> _FoundMissing:
    """Return what is missing, and its counts."""
    missing = _missing(read)
    if read.few:
        rows = gathered(missing, few=True).toArrow()
        return _FoundMissing(rows, few_missing(rows))
    missing = missing.persist(KEPT)
    return _FoundMissing(missing, summarize_missing(missing))


def _kept_once(letters: DataFrame) -> DataFrame:
    """List letters now, and never again: on executors' disks, or where a user has given
    Spark a directory, which the loss of an executor leaves.
    """
    if letters.sparkSession.sparkContext.getCheckpointDir() is not None:
        return letters.checkpoint()
    return letters.localCheckpoint(storageLevel=KEPT)


def _names_to_lock(dsn: str, options: ReconcileOptions) -> list[str | Identifier]:
    """Return the names of all tables that the job reads."""
    names: list[str | Identifier] = [*evidence_names(options.mapping)]
    if options.mapping.applied:
        with open_snapshot(dsn, standby=options.standby) as before:
            names += query_tables(before, options.mapping.applied)
    return names


def _is_few(inputs: Inputs, options: ReconcileOptions) -> bool:
    """Return True where one task for each step is faster than exchanges between
    tasks.
    """
    bounds = zip(inputs.firsts.values(), inputs.ends.values(), strict=True)
    messages = sum(sum(ends) - sum(firsts) for firsts, ends in bounds)
    return (
        inputs.letters <= FEW_LETTERS
        and messages <= FEW_MESSAGES
        and (
            inputs.snapshot is None or evidence_pages(inputs.snapshot, options.mapping) <= FEW_PAGES
        )
    )


def _log(spark: SparkSession, options: ReconcileOptions, inputs: Inputs, *, few: bool) -> DataFrame:
    """Return the messages of the log up to the ends, without bodies."""
    ends = {topic: dict(enumerate(ends)) for topic, ends in inputs.ends.items()}
    asked = {"topic": ",".join(ends), "endingOffsets": json.dumps(ends)}
    reader = MessageReader(_read_options(spark, options, asked), LOG_COLUMNS)
    read = _frame_of(spark, reader, _ddl(MESSAGES, LOG_COLUMNS), few=few)
    return read.withColumn("about", options.mapping.about())


def _letters(
    spark: SparkSession, options: ReconcileOptions, inputs: Inputs, *, few: bool
) -> DataFrame:
    """Return the open letters of messages below the ends, with times as numbers."""
    version = options.mapping.version
    heavy = {"body": "json:", "headers": "header:"}
    names = [name for name in LETTERS.names if (version or "").startswith(heavy.get(name, ""))]
    if not inputs.has_schemas:  # bodies are not read without a need
        names.remove("unfit")
    groups = ",".join(group.name for group in inputs.groups)
    reader = LetterReader(_read_options(spark, options, {"letters": groups}), names)
    letters = _frame_of(spark, reader, _ddl(LETTERS, names), few=few)
    known = letters.where(f.col("offset") < _ends(inputs))
    column = version_column(version)
    none = f.lit(None).cast("bigint")
    known = known.withColumn("version", none if column is None else column).withColumns(
        {
            "mistake": f.coalesce(mistake_column(version), _unfit(letters)),
            "stored_at": f.unix_micros("stored_at"),
            "dead_at": f.unix_micros("dead_at"),
            "reserved": f.col("reserved_by").isNotNull(),
            "token": token_column("message_id"),
            "error": _last_line("error_text"),
            "about": options.mapping.about(),
        }
    )
    return known.drop("unfit", "body", "headers", "error_text", "reserved_by", "damaged")


def _read_options(
    spark: SparkSession, options: ReconcileOptions, asked: dict[str, str]
) -> ReadOptions:
    least = str(spark.sparkContext.defaultParallelism)
    return parse_read_options({"url": options.url, "minPartitions": least, **asked})


def _frame_of(
    spark: SparkSession, reader: LetterReader | MessageReader, schema: str, *, few: bool
) -> DataFrame:
    """Return what a reader of the data source reads, planned by this process: Spark
    starts one of its own for each step of that.
    """
    return task_frame(spark, reader.partitions(), reader.read, schema, few=few)


def _ends(inputs: Inputs) -> Column:
    """Return the published end of a row's partition; null = its topic is not read."""
    known = f.from_json(f.lit(json.dumps(inputs.ends)), "map<string, array<bigint>>")
    return f.get(f.try_element_at(known, f.col("topic")), f.col("partition"))


def _unfit(letters: DataFrame) -> Column:
    """Return why a body does not fit the schema of its topic; null = it does."""
    if "unfit" not in letters.columns:
        return f.lit(None).cast("string")
    mistake = f.left("unfit", f.lit(ERROR_CHARACTERS))
    return f.concat(f.lit("its body does not fit the schema of its topic: "), mistake)


def _last_line(column: str) -> Column:
    line = f.substring_index(f.rtrim(f.regexp_replace(column, r"\s+$", "")), "\n", -1)
    return f.left(line, f.lit(ERROR_CHARACTERS))


def _ddl(schema: Any, names: Sequence[str]) -> str:  # noqa: ANN401  # Arrow has no types
    kinds = {
        "timestamp[us, tz=UTC]": "timestamp",
        "int32": "int",
        "int64": "bigint",
        "map<string, string>": "map<string,string>",
    }
    return ", ".join(
        f"`{name}` {kinds.get(str(schema.field(name).type), str(schema.field(name).type))}"
        for name in names
    )


def _with_token_states(evidence: DataFrame, options: ReconcileOptions, inputs: Inputs) -> DataFrame:
    """Turn states of the token table into words.

    The broker is asked about tokens that the table does not have: one that this
    database decided should have its row there.
    """
    state = f.when(f.col("token_state") == "R", "fenced").when(
        f.col("token_state").isNotNull(), "committed"
    )
    oldest = oldest_token(inputs.snapshot) if inputs.snapshot else None
    if inputs.snapshot is None or oldest is None:
        return evidence.withColumn("token_state", state)
    unknown = (f.col("token") >= oldest) & f.col("token_state").isNull()
    asked = broker_states(evidence.where(unknown), options.url, inputs.snapshot.identity)
    absent = asked.where("ours").select("token", f.lit(True).alias("absent"))
    joined = evidence.join(absent, "token", "left")
    return joined.withColumn("token_state", state.when(f.col("absent"), "absent")).drop("absent")


KNOWN_STATES: Final = {
    "OPEN": "pending",
    "UNDECIDED": "pending",
    "COMMITTED": "pending",
    "ROLLED_BACK": "rolled back",
}


def _missing(read: _Evidence) -> DataFrame:
    """Return rows and transactions without messages, and messages without rows."""
    options, inputs, tables, log = read.options, read.inputs, read.tables, read.log
    nothing = [f"CAST(NULL AS {kind}) {name}" for name, kind in map(str.split, MISSING.split(", "))]
    found = read.spark.range(0).selectExpr(*nothing)
    if tables.tokens is not None and log is not None and inputs.snapshot is not None:
        found = found.union(_missing_transactions(options, inputs.snapshot, tables.tokens, log))
    if tables.business is not None and log is not None:
        apart = keys_apart(tables.business, log)
        names = f.array(*(f.lit(table.name) for table in options.mapping.tables))
        removed = any(first > 0 for firsts in inputs.firsts.values() for first in firsts)
        found = found.union(
            apart.select(
                f.when(f.col("told") == 1, "row").otherwise("key"),
                names[f.col("about")],
                "key",
                f.when(f.col("told") == 1, "missing").otherwise(
                    "removed?" if removed else "missing"
                ),
                f.lit(None).cast("bigint"),
            )
        )
    return found


def _missing_transactions(
    options: ReconcileOptions, snapshot: DatabaseSnapshot, tokens: DataFrame, log: DataFrame
) -> DataFrame:
    """Return committed transactions without messages, but for those whose messages are
    in other topics, or that had none.
    """
    silent = tokens_without_messages(tokens, log).persist(KEPT)
    asked = broker_states(silent, options.url, snapshot.identity)
    millis = f.conv(f.substring("token", 1, 12), 16, 10).cast("bigint")
    kept = millis * MILLISECOND > snapshot.at - OUTCOME_KEPT_US
    known = reduce(
        lambda column, one: column.when(f.col("known") == one[0], one[1]),
        KNOWN_STATES.items(),
        f.when(f.col("known").isNull(), f.when(kept, "missing").otherwise("forgotten")),
    )
    return (
        silent.join(asked, "token", "left")
        .withColumn("state", known)
        .where("state IS NOT NULL")
        .select(f.lit("transaction"), f.lit(None).cast("string"), "token", "state", "at")
    )
