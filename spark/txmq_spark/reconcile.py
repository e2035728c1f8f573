"""Classification of dead letters by log and database, as a plan.

The snapshot of the database comes first, then the published ends. So a row of the
snapshot had its message sent before, unless the transaction is still undecided. The
plan is a function of the two, byte for byte. Nothing is changed.

What grows with the letters stays in executors: they read letters, log and tables, ask
the broker, join and classify. The driver has counts. A few letters it has itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import NamedTuple

from psycopg2.sql import Identifier
from pyspark.sql import DataFrame, SparkSession

from txmq.errors import ConfigError
from txmq_spark.database.mapping import Mapping
from txmq_spark.database.snapshot import open_snapshot
from txmq_spark.evidence.broker_frames import letter_frame, log_frame
from txmq_spark.evidence.database_tables import (
    evidence_names,
    evidence_pages,
    query_tables,
    read_tables,
)
from txmq_spark.evidence.inputs import Inputs, fix_inputs, mapping_of_read, require_same_topics
from txmq_spark.evidence.letter_evidence import EvidenceTables, join_evidence
from txmq_spark.evidence.missing_messages import missing_rows
from txmq_spark.evidence.token_states import with_state_words
from txmq_spark.plan.directory import (
    PlanFilters,
    PlanInputs,
    PlanMade,
    PlanManifest,
    PlanRows,
    StoredPlan,
    write_plan,
)
from txmq_spark.plan.few_letters import FewLetters, FewMissing
from txmq_spark.plan.many_letters import ManyLetters, ManyMissing
from txmq_spark.plan.parts import PlanPart, arranged, in_parts
from txmq_spark.plan.rules import LetterClass, PlanRules, classified
from txmq_spark.plan.summary import MissingSummary, PlanSummary
from txmq_spark.session.concurrent_actions import at_once
from txmq_spark.session.java_classes import keep_classes
from txmq_spark.session.kept_frames import KeptFrames, computed
from txmq_spark.session.query_errors import job_errors
from txmq_spark.session.spark_session import planned_once
from txmq_spark.source.broker_link import BrokerLink

# what one task reads in a second or two
FEW_LETTERS, FEW_MESSAGES, FEW_PAGES = 5_000, 100_000, 2_048


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
    kept: KeptFrames
    few: bool


class _JudgedLetters(NamedTuple):
    """The letters of a plan with their classes, and the digests of their parts."""

    frame: DataFrame
    letters: ManyLetters | FewLetters
    parts: tuple[PlanPart, ...]


class _FoundMissing(NamedTuple):
    """What is missing, and its counts."""

    rows: ManyMissing | FewMissing
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
        mapping = mapping_of_read(link, options.mapping, inputs.ends)
        options = options._replace(mapping=mapping)
        kept, few = stack.enter_context(KeptFrames()), _is_few(inputs, options)
        with planned_once(spark) if few else nullcontext():
            tables, log = EvidenceTables(), None
            if snapshot is not None:
                # To keep few rows costs more than to read them again, in the same
                # snapshot.
                of_tables = None if few else kept
                tables = read_tables(
                    spark, snapshot, inputs.groups, options.mapping, of_tables, few=few
                )
                log = kept.keep(log_frame(spark, inputs, options.mapping, few=few))
            found = _reconcile(_Evidence(spark, options, inputs, tables, log, kept, few))
        yield found


def reconcile(spark: SparkSession, options: ReconcileOptions, path: str) -> Reconciliation:
    """Classify the letters, and write a plan into a directory. Raises TxmqError."""
    with reconciled(spark, options) as found:
        stored = found.write(path)
        return found._replace(letters=stored.letters)


def _reconcile(read: _Evidence) -> Reconciliation:
    # While the driver plans one, executors work on the other.
    plan, missing = at_once(read.spark, lambda: _judge(read), lambda: _find_missing(read))
    options, inputs, snapshot = read.options, read.inputs, read.inputs.snapshot
    now = snapshot.at if snapshot else plan.letters.youngest()
    summary = plan.letters.summary(missing.summary, now)
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
    rows = PlanRows(plan.letters, missing.rows)
    return Reconciliation(manifest.sealed(), made, summary, plan.frame, rows)


def _judge(read: _Evidence) -> _JudgedLetters:
    """Return the letters with their classes, and the digests of their parts."""
    options, inputs = read.options, read.inputs
    # listed once, because several joins must see the same letters
    listed = computed(letter_frame(read.spark, inputs, options.mapping, few=read.few))
    places = sum(map(sum, inputs.ends.values()))
    placed = in_parts(listed, places * len(inputs.groups))
    evidence = join_evidence(placed.frame, read.log, read.tables, few=read.few)
    states = with_state_words(evidence, options.url, inputs.snapshot)
    judged = classified(states, options.rules, few=read.few)
    frame = read.kept.keep(arranged(judged, placed.parts))
    letters = FewLetters.of(frame) if read.few else ManyLetters(frame)
    return _JudgedLetters(frame, letters, letters.part_digests())


def _find_missing(read: _Evidence) -> _FoundMissing:
    """Return what is missing, and its counts."""
    found = missing_rows(
        read.spark, read.inputs, read.options.mapping, read.tables, read.log, read.kept
    )
    rows = FewMissing.of(found) if read.few else ManyMissing(read.kept.keep(found))
    return _FoundMissing(rows, rows.summary())


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
