"""States of transactions, at the broker and in the token table of a database."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from txmq.tx.postgres.identity import ServerIdentity
from txmq_spark.database.snapshot import DatabaseSnapshot
from txmq_spark.evidence.database_tables import oldest_token
from txmq_spark.source.broker_link import BrokerLink

TOKENS_PER_CALL: Final = 5_000


def broker_states(tokens: DataFrame, urls: Sequence[str], database: ServerIdentity) -> DataFrame:
    """Return what the brokers know about transactions; the others are left out. Tasks
    ask in bulk. Of several brokers the first one counts that knows a transaction.

    The columns are `token`, its `known` state, and `ours`: this database decides it.
    """
    ours = (database.system_id, database.database_oid)

    def ask(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with ExitStack() as opened:
            links = [opened.enter_context(BrokerLink(url)) for url in urls]
            for batch in batches:
                every = batch.column("token").to_pylist()
                for start in range(0, len(every), TOKENS_PER_CALL):
                    yield _asked(links, every[start : start + TOKENS_PER_CALL], ours)

    schema = "token string, known string, ours boolean"
    return tokens.select("token").distinct().mapInArrow(ask, schema)


def _asked(links: Sequence[BrokerLink], tokens: list[str], ours: tuple[int, int]) -> pa.RecordBatch:
    found: dict[str, Any] = {}
    for link in links:
        found = link.call("tx.states", tokens=tokens)["transactions"] | found
    known = [state for state, _decider in found.values()]
    own = [
        kind == "postgres" and (fields[0], fields[2]) == ours
        for _state, (kind, *fields) in found.values()
    ]
    columns = {
        "token": pa.array(list(found), pa.string()),
        "known": pa.array(known, pa.string()),
        "ours": pa.array(own, pa.bool_()),
    }
    return pa.RecordBatch.from_pydict(columns)


def with_state_words(evidence: DataFrame, url: str, snapshot: DatabaseSnapshot | None) -> DataFrame:
    """Turn the letters in `token_state`, of the token table, into words.

    The broker is asked about tokens that the table does not have: one that this
    database decided should have its row there.
    """
    state = f.when(f.col("token_state") == "R", "fenced").when(
        f.col("token_state").isNotNull(), "committed"
    )
    oldest = oldest_token(snapshot) if snapshot else None
    if snapshot is None or oldest is None:
        return evidence.withColumn("token_state", state)
    unknown = (f.col("token") >= oldest) & f.col("token_state").isNull()
    asked = broker_states(evidence.where(unknown), [url], snapshot.identity)
    absent = asked.where("ours").select("token", f.lit(True).alias("absent"))
    joined = evidence.join(absent, "token", "left")
    return joined.withColumn("token_state", state.when(f.col("absent"), "absent")).drop("absent")
