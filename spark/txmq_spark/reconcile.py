"""Classification of a consumer group's dead letters by log and database, as a plan.

The snapshot of the database comes first, then the published ends. So a row of the
snapshot had its message sent before, unless the transaction is still undecided. The
plan is a function of the two, byte for byte. Nothing is changed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as f

from txmq.errors import ConfigError, UnknownTransaction
from txmq.model.units import DAY, MILLISECOND
from txmq.tx.postgres.identity import ServerIdentity
from txmq_spark.arrow_letters import LETTERS
from txmq_spark.arrow_messages import MESSAGES
from txmq_spark.broker_link import BrokerLink
from txmq_spark.database_snapshot import DatabaseSnapshot, open_snapshot
from txmq_spark.database_tables import (
    BusinessTable,
    GroupIdentity,
    GroupPartition,
    oldest_token,
    read_tables,
)
from txmq_spark.letter_evidence import (
    EvidenceTables,
    join_evidence,
    keys_without_messages,
    tokens_without_messages,
    version_column,
)
from txmq_spark.plan import Letter, PlannedLetter, PlanRules, TokenEvidence, make_plan
from txmq_spark.plan_file import PlanFile, PlanInputs, decode_plan, encode_plan

# the broker keeps outcomes of transactions for so long
OUTCOME_KEPT_US: Final = 7 * DAY
# more missing messages are counted, not listed
MISSING_LISTED: Final = 10_000


class ReconcileOptions(NamedTuple):
    """Options of a reconciliation. Without `dsn` it uses the letters alone."""

    url: str
    group: str
    dsn: str | None = None
    topics: tuple[str, ...] = ()  # () = the topics that the group reads
    business: BusinessTable | None = None
    applied_query: str | None = None
    version: str | None = None  # source of the key's version in a message: header:NAME or json:PATH
    rules: PlanRules = PlanRules()


class MissingMessage(NamedTuple):
    """A committed transaction or key whose message is not in the log.

    `state` is "missing"; "pending" where the message is stored and undecided, or waits
    behind an earlier message of its key; "rolled back" where the broker decided against
    the committed row; "forgotten" where the transaction is too old for the broker to
    know whether its messages went to other topics.
    """

    what: str  # "transaction" or "key"
    name: str
    state: str
    at: int | None  # microseconds; None where the table has no time


class Reconciliation(NamedTuple):
    """The plan and the missing messages.

    `unlisted` is the number of missing messages that `missing` does not list.
    """

    data: bytes  # of the plan's file
    manifest: PlanFile
    planned: tuple[PlannedLetter, ...]
    missing: tuple[MissingMessage, ...]
    unlisted: int

    def counts(self) -> Counter[str]:
        """Return the number of letters by class."""
        return Counter(str(item.cls) for item in self.planned)


class _Inputs(NamedTuple):
    """The snapshot and the published ends, and the connections that read them."""

    link: BrokerLink
    snapshot: DatabaseSnapshot | None
    group: GroupIdentity
    ends: dict[str, tuple[int, ...]]


def reconcile(spark: SparkSession, options: ReconcileOptions) -> Reconciliation:
    """Classify the letters and make a plan; change nothing. Raises TxmqError."""
    version = version_column(options.version)
    with ExitStack() as stack:
        snapshot = stack.enter_context(open_snapshot(options.dsn)) if options.dsn else None
        inputs = _fix_inputs(stack.enter_context(BrokerLink(options.url)), snapshot, options)
        found = EvidenceTables()
        if snapshot is not None:
            found = read_tables(
                spark, snapshot, inputs.group, options.business, options.applied_query
            )
        log = _log(
            spark, options.url, inputs, ["topic", "partition", "offset", "message_id", "key"]
        )
        frame = join_evidence(_letters(spark, options, inputs), log, found, version)
        letters = list(
            _as_letters(inputs, frame.toArrow().to_pylist(), versioned=version is not None)
        )
        missing, unlisted = _missing(inputs, found, log)
    planned = make_plan(letters, options.rules)
    data = encode_plan(_plan_inputs(inputs, found), options.rules, planned)
    return Reconciliation(data, decode_plan(data), tuple(planned), missing, unlisted)


def _fix_inputs(
    link: BrokerLink, snapshot: DatabaseSnapshot | None, options: ReconcileOptions
) -> _Inputs:
    shown = link.call("group.show", group=options.group)
    there = {topic["name"] for topic in link.call("topic.list")["topics"]}
    topics = options.topics or there.intersection(shown["topics"])
    if not topics:
        raise ConfigError(
            "group", f"group {options.group} reads no topic", hint="check the name of the group"
        )
    ends = {topic: tuple(link.published_ends(topic)) for topic in sorted(topics)}
    places = tuple(
        place
        for position in shown["positions"]
        if position["topic"] in topics
        for place in GroupPartition.of(position)
    )
    return _Inputs(link, snapshot, GroupIdentity(options.group, link.log_id, places), ends)


def _plan_inputs(inputs: _Inputs, found: EvidenceTables) -> PlanInputs:
    snapshot = inputs.snapshot
    return PlanInputs(
        group=inputs.group.name,
        log_id=inputs.group.log_id,
        ends=inputs.ends,
        evidence=tuple(name for name, frame in found._asdict().items() if frame is not None),
        database=f"{snapshot.identity.system_id}/{snapshot.database}" if snapshot else None,
        snapshot=snapshot.visible if snapshot else None,
        snapshot_at=snapshot.at if snapshot else None,
    )


def _log(spark: SparkSession, url: str, inputs: _Inputs, names: Sequence[str]) -> DataFrame:
    ends = {topic: dict(enumerate(ends)) for topic, ends in inputs.ends.items()}
    reader = spark.read.format("txmq").option("url", url).option("topic", ",".join(ends))
    reader = reader.option("endingOffsets", json.dumps(ends)).option(
        "minPartitions", spark.sparkContext.defaultParallelism
    )
    return reader.schema(_ddl(MESSAGES, names)).load()


def _letters(spark: SparkSession, options: ReconcileOptions, inputs: _Inputs) -> DataFrame:
    """Return the open letters of messages below the ends, with times as numbers."""
    names = [
        name
        for name in LETTERS.names
        if name != "body" or (options.version or "").startswith("json:")
    ]
    reader = spark.read.format("txmq").option("url", options.url).option("letters", options.group)
    letters = reader.schema(_ddl(LETTERS, names)).load()
    ends = [
        (topic, number, end)
        for topic, ends in inputs.ends.items()
        for number, end in enumerate(ends)
    ]
    below = spark.createDataFrame(ends, "topic string, partition int, end bigint")
    known = (
        letters.join(f.broadcast(below), ["topic", "partition"]).where("offset < end").drop("end")
    )
    known = known.withColumns({name: f.unix_micros(name) for name in ("stored_at", "dead_at")})
    return known.localCheckpoint()  # listed once, because several joins must see the same letters


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


def _as_letters(
    inputs: _Inputs, rows: Sequence[Mapping[str, Any]], *, versioned: bool
) -> Iterator[Letter]:
    """Yield rows of evidence as letters.

    The broker is asked about tokens that the token table does not have.
    """
    oldest = oldest_token(inputs.snapshot) if inputs.snapshot else None
    by_token: dict[str, TokenEvidence] = {}
    for row in rows:
        token = TokenEvidence.NONE
        if row["token"] is not None and inputs.snapshot is not None:
            token = _token_evidence(inputs.link, inputs.snapshot, row, oldest, by_token)
        fields = {name: row[name] for name in Letter._fields if name in row}
        fields |= {
            "reserved": row["reserved_by"] is not None,
            "token": token,
            "readable": not versioned or row["version"] is not None,
        }
        yield Letter(**fields)


def _token_evidence(
    link: BrokerLink,
    snapshot: DatabaseSnapshot,
    row: Mapping[str, Any],
    oldest: str | None,
    by_token: dict[str, TokenEvidence],
) -> TokenEvidence:
    state, token = row["token_state"], row["token"]
    if state is not None:
        return TokenEvidence.FENCED if state == "R" else TokenEvidence.COMMITTED
    if oldest is None or token < oldest:
        return TokenEvidence.NONE
    if token not in by_token:
        by_token[token] = (
            TokenEvidence.ABSENT
            if _decided_by(link, token, snapshot.identity)
            else TokenEvidence.NONE
        )
    return by_token[token]


def _decided_by(link: BrokerLink, token: str, database: ServerIdentity) -> bool:
    """Return whether this database decided the transaction, and should have its row."""
    try:
        kind, *fields = link.call("tx.show", token=token)["decider"]
    except UnknownTransaction:
        return False
    return bool(
        kind == "postgres" and (fields[0], fields[2]) == (database.system_id, database.database_oid)
    )


def _missing(
    inputs: _Inputs, found: EvidenceTables, log: DataFrame
) -> tuple[tuple[MissingMessage, ...], int]:
    """Return the missing messages, and the number of those not listed."""
    missing: list[MissingMessage] = []
    more = 0
    if found.tokens is not None:
        rows, unlisted = _listed(tokens_without_messages(found.tokens, log), "token")
        states = ((row, _state(inputs, row["token"])) for row in rows)
        missing += [
            MissingMessage("transaction", row["token"], state, row["at"])
            for row, state in states
            if state
        ]
        more += unlisted
    if found.business is not None:
        rows, unlisted = _listed(keys_without_messages(found.business, log), "key")
        missing += [MissingMessage("key", row["key"], "missing", None) for row in rows]
        more += unlisted
    return tuple(missing), more


def _listed(frame: DataFrame, name: str) -> tuple[list[Row], int]:
    """Return the first rows in order, and the number of the others."""
    rows = frame.orderBy(name).limit(MISSING_LISTED).collect()
    return rows, frame.count() - len(rows) if len(rows) == MISSING_LISTED else 0


STATES: Final = {
    "OPEN": "pending",
    "UNDECIDED": "pending",
    "COMMITTED": "pending",
    "ROLLED_BACK": "rolled back",
    "PUBLISHED": "",
}


def _state(inputs: _Inputs, token: str) -> str:
    """Return the state of a transaction without messages in the frames.

    It is "" for one whose messages are in other topics, or that had none.
    """
    try:
        return STATES[inputs.link.call("tx.show", token=token)["state"]]
    except UnknownTransaction:
        now = inputs.snapshot.at if inputs.snapshot else 0
        return (
            "missing" if int(token[:12], 16) * MILLISECOND > now - OUTCOME_KEPT_US else "forgotten"
        )
