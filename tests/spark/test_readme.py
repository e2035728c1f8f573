"""The frames, writes and streams of spark/README.md, as they stand there."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

import txmq
from tests.document_examples import blocks
from tests.spark.queries import require_late_worker
from tests.spark.test_writing import bodies
from txmq.testing.own_broker import OwnBroker
from txmq.testing.wait import PATIENCE_S
from txmq_spark.session.query_run import run_query

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.usefixtures("spark")  # the page's own `getOrCreate` returns it
def test_the_first_blocks_do_what_the_page_says(tmp_path: Path) -> None:
    with (
        OwnBroker(tmp_path / "broker") as broker,
        txmq.connect(broker.url, service="tests", timeout=PATIENCE_S) as client,
    ):
        for name in ("orders", "refunds", "copies"):
            client.call("topic.create", name=name, partitions=1)
        client.send("orders", b"o-1", key="c-7", tag="new")
        with client.consumer("billing", ["orders"]):
            pass
        addresses = {"txmq://127.0.0.1:7650": broker.url, "/data/checkpoints": str(tmp_path)}
        names: dict[str, Any] = {}
        frames, query, copy = (printed(number, addresses) for number in (1, 2, 3))
        exec(frames, names)
        assert bodies(broker.url, "copies") == Counter([b"o-1"])
        run_at_once(query, names)
        assert bodies(broker.url, "copies") == Counter([b"o-1"] * 2)
        exec(copy, names)
        copying = names["stream"].writeStream.foreachBatch(names["copy"])
        run_query(copying.option("checkpointLocation", str(tmp_path / "again")), None)
        assert bodies(broker.url, "copies") == Counter([b"o-1"] * 3)


def printed(number: int, addresses: dict[str, str]) -> str:
    """Return a block of the page, with these addresses."""
    [text] = [one.text for one in blocks("spark/README.md") if one[1:3] == ("python", number)]
    for old, new in addresses.items():
        text = text.replace(old, new)
    return text


def run_at_once(program: str, names: dict[str, Any]) -> None:
    """Run the query of a program until it has all that is there."""
    while True:
        exec(program, names)
        try:
            names["query"].processAllAvailable()
        except PySparkException as error:
            require_late_worker(error)
        else:
            return
        finally:
            names["query"].stop()
