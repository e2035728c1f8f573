"""The window of event time in spark/README.md, as it stands there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.document_examples import blocks
from tests.spark.queries import require_late_worker
from tests.spark.test_writing import sent
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq_spark.source.stream_progress import parse_progress

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    import txmq


def documented(changes: dict[str, str]) -> str:
    [program] = [one.text for one in blocks("spark/README.md") if one[1:3] == ("python", 4)]
    for old, new in changes.items():
        assert old in program
        program = program.replace(old, new)
    return program


def test_a_window_is_sent_once_when_its_watermark_has_passed(
    spark: SparkSession, broker: str, topic: str, client: txmq.Client, tmp_path: Path
) -> None:
    program = documented(
        {
            '"topic", "orders-per-minute"': f'"topic", "{topic}-2"',
            '"topic", "orders"': f'"topic", "{topic}"',
            "/data/checkpoints": str(tmp_path),
            "10 seconds": "0 seconds",
        }
    )
    for name in (topic, f"{topic}-2"):
        client.call("topic.create", name=name, partitions=1)
    names: dict[str, Any] = {"spark": spark, "url": broker}
    exec(program, names)  # the document's own code

    def read() -> int:
        """Return the number of orders that the batches until now have read."""
        failure = names["query"].exception()
        if failure is not None:
            require_late_worker(failure)
            exec(program, names)
        progress = names["query"].lastProgress
        end = None if progress is None else progress.sources[0].endOffset
        return sum(parse_progress(json.loads(end))[0].topics[topic].offsets) if end else 0

    def windows(*orders: tuple[str, int, str]) -> list[tuple[str, int, int]]:
        """Place orders at these times, and return the windows that have been sent."""
        before = read()
        for customer, cents, time in orders:
            order = {"customer": customer, "cents": cents, "placed_at": f"2026-11-22T{time}Z"}
            client.send(topic, json.dumps(order).encode(), key=customer)
        # For a while the query takes what it has just seen for all that there is.
        all_read = before + len(orders)
        wait_until(lambda: read() == all_read, 2 * PATIENCE_S, what="the orders are read")
        names["query"].processAllAvailable()
        found = [json.loads(one.body) for _partition, one in sent(broker, f"{topic}-2")]
        return sorted((one["customer"], one["orders"], one["cents"]) for one in found)

    try:
        told = [
            windows(
                ("ann", 100, "12:00:10"),
                ("ann", 20, "12:00:50"),
                ("bob", 3, "12:00:59"),
                ("ann", 4_000, "12:00:00"),
                ("bob", 5, "12:06:00"),
            ),
            windows(("bob", 9, "12:00:30"), ("bob", 9, "12:06:30")),  # one is too late
        ]
    finally:
        names["query"].stop()
    closed = [("ann", 3, 4_120), ("bob", 1, 3)]
    assert told == [closed, closed]
