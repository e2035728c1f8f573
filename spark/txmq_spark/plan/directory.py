"""A plan as a directory: its letters as Parquet, a manifest, and what is missing.

    plan.json    the manifest; it is written last, so a directory without it is no plan
    made.json    when and under which snapshot it was made
    letters/     the letters with their classes and evidence, in parts
    missing/     rows without messages, and messages without rows
    outcomes/    what became of the letters, once `replay` has run

The digest covers the manifest, which has a digest of each part (`parts.py`); no time
is in it.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Final, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from txmq.errors import ConfigError, RemoteProtocolError
from txmq.wire.json import WireModel, parse_as
from txmq_spark.plan.parts import SCHEMA, Count, PlanPart, arranged, part_digests
from txmq_spark.plan.rules import LetterClass, PlanRules
from txmq_spark.session.hadoop_files import Directory
from txmq_spark.session.query_errors import cause_of

VERSION: Final = 1
HINT: Final = "do not edit a plan: run reconcile again for another one"
MANIFEST, MADE, LETTERS, MISSING = "plan.json", "made.json", "letters", "missing"
OUTCOMES: Final = "outcomes"
OURS: Final = frozenset({MANIFEST, MADE, LETTERS, MISSING, OUTCOMES})
LARGEST_MANIFEST: Final = 64 << 20  # bytes


class PlanFilters(WireModel):
    """The rules that the plan was made with."""

    include: tuple[LetterClass, ...]
    replays: int
    deaths: int
    error_types: tuple[str, ...]
    fingerprints: tuple[str, ...]

    @classmethod
    def of(cls, rules: PlanRules) -> PlanFilters:
        return cls(
            include=tuple(sorted(rules.include)),
            replays=rules.replays,
            deaths=rules.deaths,
            error_types=tuple(sorted(rules.error_types)),
            fingerprints=tuple(sorted(rules.fingerprints)),
        )


class PlanInputs(WireModel):
    """The state that the plan was made from: messages up to `ends` were classified."""

    groups: tuple[str, ...]
    log_id: str
    firsts: dict[str, tuple[Count, ...]]  # retention has left these, by topic and partition
    ends: dict[str, tuple[Count, ...]]
    evidence: tuple[str, ...] = ()  # the tables that were read
    database: str | None = None  # its system identifier and name; None without a database
    incarnation: str = ""  # of the log; "" = it was never restored


class PlanManifest(WireModel):
    """All about a plan but its letters, of which it has counts by group and class."""

    txmq_plan: int = VERSION
    facts: PlanInputs
    filters: PlanFilters
    letters: dict[str, dict[LetterClass, Count]]
    replays: dict[str, Count]  # by group
    parts: tuple[PlanPart, ...]
    digest: str = ""

    def sealed(self) -> PlanManifest:
        """Return the manifest with its digest."""
        return self.model_copy(update={"digest": sha256(self._text().encode()).hexdigest()})

    def text(self) -> str:
        """Return the bytes of its file, the same for the same plan."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, indent=1) + "\n"

    def _text(self) -> str:
        return self.model_copy(update={"digest": ""}).text()

    @property
    def is_sealed(self) -> bool:
        return self.digest == self.sealed().digest


class PlanMade(WireModel):
    """When a plan was made: by the database's clock, under which snapshot."""

    snapshot: str | None = None  # as pg_current_snapshot() prints it
    snapshot_at: int | None = None  # microseconds


class StoredPlan(NamedTuple):
    """A plan in its directory."""

    path: str
    manifest: PlanManifest
    letters: DataFrame


def write_plan(
    path: str, manifest: PlanManifest, made: PlanMade, letters: DataFrame, missing: DataFrame
) -> StoredPlan:
    """Write a plan; one that is there is replaced. Of `letters`, each part is sorted in
    one task.

    Raises ConfigError where the directory has anything else.
    """
    spark = letters.sparkSession
    directory = plan_place(spark, path)
    for name in sorted(OURS, reverse=True):  # the manifest before what it stands for
        directory.remove(name)
    letters.write.partitionBy("part").parquet(f"{directory.path}/{LETTERS}", mode="overwrite")
    missing.write.parquet(f"{directory.path}/{MISSING}", mode="overwrite")
    directory.write(MADE, f"{made.model_dump_json()}\n")
    directory.write(MANIFEST, manifest.text())
    return StoredPlan(directory.path, manifest, _stored(spark, directory.path))


def plan_place(spark: SparkSession, path: str) -> Directory:
    """Return a directory that a plan may be written to.

    Raises ConfigError where it has anything else, or no file system takes the path.
    """
    directory = Directory(spark, path)
    foreign = _foreign(spark, directory)
    if foreign:
        raise ConfigError(
            "plan", f"{path} has {foreign[0]}, which is of no plan", hint="name a new directory"
        )
    return directory


def _foreign(spark: SparkSession, directory: Directory) -> list[str]:
    """Return the names in a directory that are neither of a plan, nor of what a killed
    job has left of one.
    """
    names = directory.names()
    below = [
        f"{name}/{one}"
        for name in (LETTERS, MISSING, OUTCOMES)
        if name in names
        for one in Directory(spark, f"{directory.path}/{name}").names()
        if not one.startswith(("part=", "part-", "_", "."))
    ]
    return [name for name in names if name not in OURS and name[0] not in "._"] + below


def _stored(spark: SparkSession, path: str) -> DataFrame:
    return spark.read.schema(f"{SCHEMA}, part int").parquet(f"{path}/{LETTERS}")


def read_plan(spark: SparkSession, path: str) -> StoredPlan:
    """Return the plan of a directory; its letters are compared with its digest.

    Raises ConfigError where there is no plan, or one that was changed.
    """
    directory = Directory(spark, path)
    try:
        text = directory.read(MANIFEST, LARGEST_MANIFEST)
        if text is None:
            raise ConfigError(
                "plan", f"{path} has no {MANIFEST}", hint="name a directory that reconcile wrote"
            )
        manifest = parse_as(PlanManifest, text.encode())
    except (RemoteProtocolError, ValueError) as error:
        raise ConfigError("plan", f"{path}/{MANIFEST}: {error}", hint=HINT) from error
    if manifest.txmq_plan != VERSION:
        raise ConfigError(
            "plan",
            f"version {manifest.txmq_plan} is not supported, only version {VERSION}",
            hint="run reconcile again",
        )
    stored = _stored(spark, directory.path)
    letters = arranged(stored, max(1, len(manifest.parts)))
    try:
        same = manifest.is_sealed and part_digests(letters) == manifest.parts
    except (PySparkException, Py4JJavaError) as error:  # Spark does not translate all
        reason = cause_of(error)[:1_000]
        raise ConfigError("plan", f"its letters cannot be read: {reason}", hint=HINT) from error
    if not same:
        raise ConfigError("plan", "it was changed after it was made", hint=HINT)
    return StoredPlan(directory.path, manifest, stored)
