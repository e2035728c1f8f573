"""Classification of dead letters by log and database, as a plan.

The snapshot of the database comes first, then the published ends. So a row of the
snapshot had its message sent before, unless the transaction is still undecided. The
plan is a function of the two, byte for byte. Nothing is changed.

A plan is about the letters of one log. Where others are listed with it, their messages
count, too, where rows and messages are missing: what is not here may be there.

What grows with the letters stays in executors: they read letters, log and tables, ask
the broker, join and classify. The driver has counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from psycopg2.sql import Identifier
from pyspark.sql import DataFrame, SparkSession

from txmq.errors import ConfigError
from txmq_spark.database.mapping import Mapping
from txmq_spark.database.snapshot import open_snapshot
from txmq_spark.evidence.broker_frames import elsewhere_frame, letter_frame, log_frame
from txmq_spark.evidence.database_tables import evidence_names, query_tables, read_tables
from txmq_spark.evidence.inputs import Inputs, fix_inputs, mapping_of_read, require_same_topics
from txmq_spark.evidence.letter_evidence import EvidenceTables, join_evidence
from txmq_spark.evidence.missing_messages import missing_rows
from txmq_spark.evidence.token_states import with_state_words
from txmq_spark.plan.directory import (
    PlanFilters,
    PlanInputs,
    PlanMade,
    PlanManifest,
    StoredPlan,
    write_plan,
)
from txmq_spark.plan.parts import arranged, in_parts, part_digests
from txmq_spark.plan.rules import LetterClass, PlanRules, classified
from txmq_spark.plan.summary import PlanSummary, summarized
from txmq_spark.session.kept_frames import KeptFrames, computed
from txmq_spark.session.query_errors import job_errors
from txmq_spark.source.broker_link import BrokerLink


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
    elsewhere: DataFrame | None  # messages of other logs, if there are any
    kept: KeptFrames


class Reconciliation(NamedTuple):
    """A plan and what it is about. Its frames are there until the block of `reconciled`
    ends.
    """

    manifest: PlanManifest
    made: PlanMade
    summary: PlanSummary
    letters: DataFrame
    missing: DataFrame

    def write(self, path: str) -> StoredPlan:
        """Write the plan into a directory of any file system that Spark knows."""
        return write_plan(path, self.manifest, self.made, self.letters, self.missing)


@contextmanager
def reconciled(spark: SparkSession, options: ReconcileOptions) -> Iterator[Reconciliation]:
    """Classify the letters and make a plan, which lasts for the block; change nothing.

    Raises TxmqError.
    """
    if options.mapping.applied and len(options.groups) > 1:
        raise ConfigError(
            "applied", "a query is about one group", hint="reconcile each group by itself"
        )
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
        kept, tables = stack.enter_context(KeptFrames()), EvidenceTables()
        log = elsewhere = None
        if snapshot is not None:
            tables = read_tables(spark, snapshot, inputs.groups, mapping, kept)
            log = kept.keep(log_frame(spark, inputs, mapping))
            elsewhere = elsewhere_frame(spark, inputs, mapping)
        yield _reconcile(_Evidence(spark, options, inputs, tables, log, elsewhere, kept))


def _reconcile(read: _Evidence) -> Reconciliation:
    options, inputs, snapshot = read.options, read.inputs, read.inputs.snapshot
    letters = _judged(read)
    parts = part_digests(letters)
    told = read.log
    if told is not None and read.elsewhere is not None:
        told = read.kept.keep(told.unionByName(read.elsewhere))
    missing = missing_rows(read.spark, inputs, options.mapping, read.tables, told, read.kept)
    read.kept.keep(missing)
    summary = summarized(letters, missing, snapshot.at if snapshot else None)
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
        parts=parts,
    )
    require_same_topics(inputs)
    made = PlanMade()
    if snapshot is not None:
        made = PlanMade(snapshot=snapshot.visible, snapshot_at=snapshot.at)
    return Reconciliation(manifest.sealed(), made, summary, letters, missing)


def _judged(read: _Evidence) -> DataFrame:
    """Return the letters with their classes, in the parts of a plan."""
    options, inputs = read.options, read.inputs
    # listed once, because several joins must see the same letters
    placed = in_parts(computed(letter_frame(read.spark, inputs, options.mapping)))
    evidence = join_evidence(placed.frame, read.log, read.tables)
    states = with_state_words(evidence, options.url, inputs.snapshot)
    return read.kept.keep(arranged(classified(states, options.rules), placed.parts))


def _names_to_lock(dsn: str, options: ReconcileOptions) -> list[str | Identifier]:
    """Return the names of all tables that the job reads."""
    names: list[str | Identifier] = [*evidence_names(options.mapping)]
    if options.mapping.applied:
        with open_snapshot(dsn, standby=options.standby) as before:
            names += query_tables(before, options.mapping.applied)
    return names
