"""Queries whose worker is late, as on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from txmq_spark.query_errors import QueryFailed
from txmq_spark.query_run import STARTS, WORKER_LATE, run_query

LATE = f"[STREAM_FAILED] Query terminated with exception: {WORKER_LATE}. SQLSTATE: XXKST"


class ScriptedWriter:
    """A query of which each start ends as told: with an error's text, or well."""

    def __init__(self, *ends: str) -> None:
        self.left: Iterator[str] = iter(ends)
        self.stopped = 0

    def trigger(self, **_when: object) -> ScriptedWriter:
        return self

    def start(self) -> ScriptedWriter:
        return self

    def awaitTermination(self, _seconds: int) -> bool:  # noqa: N802  # Spark's name
        if end := next(self.left):
            raise StreamingQueryException(message=end)
        return True

    def stop(self) -> None:
        self.stopped += 1


def test_a_query_whose_worker_is_late_is_started_again() -> None:
    writer: Any = ScriptedWriter(LATE, LATE, "")
    run_query(writer, None)
    assert writer.stopped == 3


@pytest.mark.parametrize(("ends", "starts"), [([LATE] * STARTS, STARTS), (["lost"], 1)])
def test_other_errors_end_it(ends: list[str], starts: int) -> None:
    writer: Any = ScriptedWriter(*ends)
    with pytest.raises(QueryFailed):
        run_query(writer, 1)
    assert writer.stopped == starts
