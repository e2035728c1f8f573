"""States of transactions at the broker, asked for by tasks in bulk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame

from txmq.tx.postgres.identity import ServerIdentity
from txmq_spark.broker_link import BrokerLink

TOKENS_PER_CALL: Final = 5_000


def broker_states(tokens: DataFrame, url: str, database: ServerIdentity) -> DataFrame:
    """Return what the broker knows about transactions; the others are left out.

    The columns are `token`, its `known` state, and `ours`: this database decides it.
    """
    ours = (database.system_id, database.database_oid)

    def ask(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with BrokerLink(url) as link:
            for batch in batches:
                every = batch.column("token").to_pylist()
                for start in range(0, len(every), TOKENS_PER_CALL):
                    yield _asked(link, every[start : start + TOKENS_PER_CALL], ours)

    schema = "token string, known string, ours boolean"
    return tokens.select("token").distinct().mapInArrow(ask, schema)


def _asked(link: BrokerLink, tokens: list[str], ours: tuple[int, int]) -> pa.RecordBatch:
    found = link.call("tx.states", tokens=tokens)["transactions"]
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
