"""Reconciling: every dead letter of a consumer group, and what log and business tables
say of it, made into a plan.

First a snapshot of the database, then the published ends of the topics: what is seen in
the tables had its message sent before, unless its transaction is still undecided. The
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
from txmq.tx.postgres.identity import ServerIdentity
from txmq_spark.columns import MESSAGES
from txmq_spark.evidence import Tables, evidence, unseen_keys, unseen_tokens, version_of
from txmq_spark.letters import LETTERS
from txmq_spark.link import Link
from txmq_spark.manifest import Facts, Manifest, freeze, thaw
from txmq_spark.plan import Letter, Planned, Rules, Token, plan
from txmq_spark.postgres import Snapshot, snapshot
from txmq_spark.tables import Business, Group, oldest_token, tables

REMEMBERED_US: Final = (
    7 * 24 * 3_600 * 1_000_000
)  # how long a broker knows the outcome of a transaction
MISSING_LISTED: Final = (
    10_000  # committed rows without a message, listed one by one; the rest is counted
)


class Question(NamedTuple):
    """What to reconcile. Without `dsn` only the letters themselves are looked at."""

    url: str
    group: str
    dsn: str | None = None
    topics: tuple[str, ...] = ()  # () = those that the group reads
    business: Business | None = None
    applied_query: str | None = None
    version: str | None = None  # where a message says its key's version: header:NAME or json:PATH
    rules: Rules = Rules()


class Missing(NamedTuple):
    """Something committed whose message is not in the log.

    `state`: "missing"; "pending" = stored and undecided, or waiting behind an earlier
    message of its key; "rolled back" = decided against its own row; "forgotten" = too
    old for the broker to know whether its messages went elsewhere.
    """

    what: str  # "transaction" or "key"
    name: str
    state: str
    at: int | None  # microseconds, None where the table does not say


class Reconciliation(NamedTuple):
    """What was found, and the plan that follows from it. `unlisted` are more missing
    ones than `missing` names.
    """

    data: bytes  # of the plan's file
    manifest: Manifest
    planned: tuple[Planned, ...]
    missing: tuple[Missing, ...]
    unlisted: int

    def counts(self) -> Counter[str]:
        """Letters by class."""
        return Counter(str(item.cls) for item in self.planned)


class _Frozen(NamedTuple):
    """The moment that everything is read at."""

    link: Link
    taken: Snapshot | None
    group: Group
    ends: dict[str, tuple[int, ...]]


def reconcile(spark: SparkSession, question: Question) -> Reconciliation:
    """Looks at everything and changes nothing. Raises TxmqError."""
    version = version_of(question.version)
    with ExitStack() as stack:
        taken = stack.enter_context(snapshot(question.dsn)) if question.dsn else None
        moment = _freeze(stack.enter_context(Link(question.url)), taken, question)
        found = Tables()
        if taken is not None:
            found = tables(spark, taken, moment.group, question.business, question.applied_query)
        log = _log(
            spark, question.url, moment, ["topic", "partition", "offset", "message_id", "key"]
        )
        frame = evidence(_letters(spark, question, moment), log, found, version)
        letters = list(_judged(moment, frame.toArrow().to_pylist(), versioned=version is not None))
        missing, unlisted = _missing(moment, found, log)
    planned = plan(letters, question.rules)
    data = freeze(_facts(moment, found), question.rules, planned)
    return Reconciliation(data, thaw(data), tuple(planned), missing, unlisted)


def _freeze(link: Link, taken: Snapshot | None, question: Question) -> _Frozen:
    shown = link.call("group.show", group=question.group)
    there = {topic["name"] for topic in link.call("topic.list")["topics"]}
    topics = question.topics or there.intersection(shown["topics"])
    if not topics:
        raise ConfigError(
            "group", f"{question.group} reads no topic", hint="is it the right group?"
        )
    ends = {topic: tuple(link.published_ends(topic)) for topic in sorted(topics)}
    return _Frozen(link, taken, Group(question.group, shown["epoch"], link.log_id), ends)


def _facts(moment: _Frozen, found: Tables) -> Facts:
    taken = moment.taken
    return Facts(
        group=moment.group.name,
        log_id=moment.group.log_id,
        ends=moment.ends,
        evidence=tuple(name for name, frame in found._asdict().items() if frame is not None),
        database=f"{taken.identity.system_id}/{taken.database}" if taken else None,
        snapshot=taken.sees if taken else None,
        snapshot_at=taken.at if taken else None,
    )


def _log(spark: SparkSession, url: str, moment: _Frozen, names: Sequence[str]) -> DataFrame:
    ends = {topic: dict(enumerate(ends)) for topic, ends in moment.ends.items()}
    reader = spark.read.format("txmq").option("url", url).option("topic", ",".join(ends))
    reader = reader.option("endingOffsets", json.dumps(ends)).option(
        "minPartitions", spark.sparkContext.defaultParallelism
    )
    return reader.schema(_ddl(MESSAGES, names)).load()


def _letters(spark: SparkSession, question: Question, moment: _Frozen) -> DataFrame:
    """Open letters of messages below the ends, with times as numbers."""
    names = [
        name
        for name in LETTERS.names
        if name != "body" or (question.version or "").startswith("json:")
    ]
    reader = spark.read.format("txmq").option("url", question.url).option("letters", question.group)
    letters = reader.schema(_ddl(LETTERS, names)).load()
    ends = [
        (topic, number, end)
        for topic, ends in moment.ends.items()
        for number, end in enumerate(ends)
    ]
    below = spark.createDataFrame(ends, "topic string, partition int, end bigint")
    known = (
        letters.join(f.broadcast(below), ["topic", "partition"]).where("offset < end").drop("end")
    )
    known = known.withColumns({name: f.unix_micros(name) for name in ("stored_at", "dead_at")})
    return known.localCheckpoint()  # listed once: several joins must see the same letters


def _ddl(schema: Any, names: Sequence[str]) -> str:  # Arrow has no types
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


def _judged(
    moment: _Frozen, rows: Sequence[Mapping[str, Any]], *, versioned: bool
) -> Iterator[Letter]:
    """Rows of evidence as letters; what the token table leaves open is asked of the
    broker.
    """
    oldest = oldest_token(moment.taken) if moment.taken else None
    asked: dict[str, Token] = {}
    for row in rows:
        token = Token.NONE
        if row["token"] is not None and moment.taken is not None:
            token = _token(moment.link, moment.taken, row, oldest, asked)
        fields = {name: row[name] for name in Letter._fields if name in row}
        fields |= {
            "busy": row["reserved_by"] is not None,
            "token": token,
            "readable": not versioned or row["version"] is not None,
        }
        yield Letter(**fields)


def _token(
    link: Link, taken: Snapshot, row: Mapping[str, Any], oldest: str | None, asked: dict[str, Token]
) -> Token:
    state, token = row["token_state"], row["token"]
    if state is not None:
        return Token.FENCED if state == "R" else Token.COMMITTED
    if oldest is None or token < oldest:
        return Token.NONE
    if token not in asked:
        asked[token] = Token.ABSENT if _decided_by(link, token, taken.identity) else Token.NONE
    return asked[token]


def _decided_by(link: Link, token: str, database: ServerIdentity) -> bool:
    """Whether this very database decided the transaction, so that a row of it should be
    there.
    """
    try:
        kind, *fields = link.call("tx.show", token=token)["decider"]
    except UnknownTransaction:
        return False
    return bool(
        kind == "postgres" and (fields[0], fields[2]) == (database.system_id, database.database_oid)
    )


def _missing(moment: _Frozen, found: Tables, log: DataFrame) -> tuple[tuple[Missing, ...], int]:
    """Committed rows whose messages are not in the log, and how many are not listed."""
    missing: list[Missing] = []
    more = 0
    if found.tokens is not None:
        rows, unlisted = _listed(unseen_tokens(found.tokens, log), "token")
        states = ((row, _state(moment, row["token"])) for row in rows)
        missing += [
            Missing("transaction", row["token"], state, row["at"]) for row, state in states if state
        ]
        more += unlisted
    if found.business is not None:
        rows, unlisted = _listed(unseen_keys(found.business, log), "key")
        missing += [Missing("key", row["key"], "missing", None) for row in rows]
        more += unlisted
    return tuple(missing), more


def _listed(frame: DataFrame, name: str) -> tuple[list[Row], int]:
    """The first rows in order, and how many more there are."""
    rows = frame.orderBy(name).limit(MISSING_LISTED).collect()
    return rows, frame.count() - len(rows) if len(rows) == MISSING_LISTED else 0


STATES: Final = {
    "OPEN": "pending",
    "UNDECIDED": "pending",
    "COMMITTED": "pending",
    "ROLLED_BACK": "rolled back",
    "PUBLISHED": "",
}


def _state(moment: _Frozen, token: str) -> str:
    """What the broker says of a transaction whose messages were not read; "" = they
    went elsewhere, or it had none.
    """
    try:
        return STATES[moment.link.call("tx.show", token=token)["state"]]
    except UnknownTransaction:
        now = moment.taken.at if moment.taken else 0
        return "missing" if int(token[:12], 16) * 1_000 > now - REMEMBERED_US else "forgotten"
