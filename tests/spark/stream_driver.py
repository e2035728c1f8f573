"""A query that drives a stream's reader as Spark does, without Spark."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Self

from pyspark.sql.streaming.datasource import ReadAllAvailable

from txmq_spark import TxmqDataSource
from txmq_spark.source.message_stream import BrokerStream


class StreamDriver:
    """A query whose progress goes through JSON, while readers come and go."""

    def __init__(self, **options: str) -> None:
        self.batches: list[tuple[str, str]] = []
        self._reader: BrokerStream | None = None
        self._options = options
        self.restart(**options)
        try:
            self.progress = json.dumps(self.reader.initialOffset())
        except BaseException:
            self.close()
            raise

    @property
    def reader(self) -> BrokerStream:
        """The reader of the present run."""
        assert self._reader is not None, "before the first run"
        return self._reader

    def restart(self, **options: str) -> None:
        """Go on with a new reader, and perhaps other options, at the checkpoint."""
        self.close()
        self._options = options or self._options
        source = TxmqDataSource(self._options)
        reader = source.streamReader(source.schema())
        assert isinstance(reader, BrokerStream)
        reader._rest = 0  # a test wants to see what has just happened
        self._reader = reader

    def plan(self, *, all_available: bool = False) -> str:
        """Return the next progress."""
        limit = ReadAllAvailable() if all_available else self.reader.getDefaultReadLimit()
        return json.dumps(self.reader.latestOffset(json.loads(self.progress), limit))

    def step(self) -> list[bytes]:
        """Carry out the next batch; return its bodies."""
        end = self.plan()
        found = self.run(self.progress, end)
        self.batches.append((self.progress, end))
        self.progress = end
        return found

    def run(self, start: str, end: str) -> list[bytes]:
        """Carry out a batch that was planned before; return its bodies."""
        tasks = self.reader.partitions(json.loads(start), json.loads(end))
        return [
            body
            for task in tasks
            for batch in self.reader.read(task)
            for body in batch.column("body").to_pylist()
        ]

    def close(self) -> None:
        if self._reader is not None:
            self._reader.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def texts(*numbers: int) -> list[bytes]:
    """Return the bodies of numbered messages."""
    return [b"%d" % n for n in numbers]
