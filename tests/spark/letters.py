"""Dead letters with evidence, as rows and as frames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from txmq_spark.plan.parts import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Letter = dict[str, Any]
MADE = ("class", "reason", "replay")  # by a plan
FIELDS = {name: kind for name, kind in COLUMNS.items() if name not in MADE} | {"mistake": "string"}
GIVEN: Letter = {"group": "billing", "topic": "orders", "partition": 0, "reserved": False}
NUMBERS: Letter = {"attempts": 3, "replays": 0, "deaths": 0, "parked": 0}
TEXTS: Letter = {"error_type": "", "error": "", "fingerprint": ""}


def letter(offset: int, key: str | None = None, **fields: object) -> Letter:
    """Return a safe letter of topic orders, partition 0."""
    own = {
        "offset": offset,
        "number": offset + 1,
        "message_id": f"{'0' * 32}-{offset}",
        "key": key,
        "stored_at": offset,
        "dead_at": 1_000 + offset,
    }
    return dict.fromkeys(FIELDS) | GIVEN | NUMBERS | TEXTS | own | fields


def letter_frame(spark: SparkSession, letters: Iterable[Letter]) -> DataFrame:
    rows = [tuple(one[name] for name in FIELDS) for one in letters]
    schema = ", ".join(f"`{name}` {kind}" for name, kind in FIELDS.items())
    return spark.createDataFrame(rows, schema)
