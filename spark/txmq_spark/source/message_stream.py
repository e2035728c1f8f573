"""Topics, and letters of groups, as a stream: Spark keeps the progress, and asks for
what is new.

The broker keeps nothing for a stream. A batch that Spark has planned is read again
exactly, as long as the log has its messages. Of letters, those that were closed
meanwhile are left out.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from txmq.errors import ConfigError, UnknownGroup
from txmq_spark.source.arrow_messages import OffsetRange
from txmq_spark.source.broker_link import BrokerLink
from txmq_spark.source.letter_ranges import LetterRange, number_ranges
from txmq_spark.source.letter_reading import read_letters
from txmq_spark.source.message_reading import read_task
from txmq_spark.source.offset_ranges import (
    Loss,
    Survey,
    TopicBounds,
    TopicPartition,
    bound_offsets,
    cut_ranges,
    report_losses,
)
from txmq_spark.source.options import ReadOptions
from txmq_spark.source.stream_progress import (
    Progress,
    first_progress,
    follow,
    limit_progress,
    newest_progress,
    parse_progress,
    restored_ends,
)

REST: Final = 4  # between two surveys, as a multiple of the time that one takes


class _Taken(NamedTuple):
    """A survey, when it was taken, and how many seconds that took."""

    survey: Survey
    at: float
    cost: float


class BrokerStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader for a query.

    Spark makes one in a process of its own, which plans the query's batches, and
    others in the tasks, which only `read`.
    """

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options, self._names = options, names
        self._link: BrokerLink | None = None
        self._until: dict[TopicPartition, int] | None = None
        self._last: _Taken | None = None
        self._rest = REST
        # Losses of a batch whose end was planned before: the next progress counts them.
        self._uncounted: list[Loss] = []

    @abstractmethod
    def _survey(self, *, missing: bool = True) -> Survey:
        """Return what the broker has to read. `missing`: some of it may be gone."""

    @abstractmethod
    def _tasks(self, ranges: Sequence[OffsetRange], survey: Survey) -> Sequence[object]:
        """Cut ranges into those of tasks, for `read`."""

    @abstractmethod
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield what a task reads."""

    @abstractmethod
    def _restored(self, progress: Progress, survey: Survey) -> dict[int, list[int]] | None:
        """Return the ends at restores since the progress, as `restored_ends` does."""

    @property
    def _selects(self) -> Callable[[str], bool]:
        return self._options.selects

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        survey, link = self._survey(missing=False), self._broker()
        offsets = bound_offsets(self._options.start, survey, "startingOffsets", link.offset_at)
        return first_progress(survey, offsets).to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        most = self._options.max_offsets
        return ReadMaxRows(most) if most else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        self._until = self._survey().ends()

    def latestOffset(  # noqa: N802  # Spark's name
        self, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, Any]:
        before, survey = parse_progress(start), self._recent()
        now, losses = self._follow(before, survey)
        report_losses(losses, fail=self._options.fail_on_data_loss)
        now = now.skipping([*losses, *self._uncounted])
        self._uncounted.clear()
        end = newest_progress(now, survey, self._until)
        if isinstance(limit, ReadMaxRows):
            end = limit_progress(now, end, limit.max_rows)
        return start if end == before else end.to_json()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  # Spark's name
        survey = self._survey() if self._last is None else self._last.survey
        return first_progress(survey, survey.ends()).to_json()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if start == end:
            return []
        survey, planned = self._survey(), parse_progress(end)
        begun, losses = self._follow(parse_progress(start), survey)
        ended, lost = self._follow(planned, survey)
        ranges = ended.ranges_from(begun)
        left = _left_out(ranges, survey, fail=self._options.fail_on_data_loss)
        report_losses([*losses, *lost, *left], fail=self._options.fail_on_data_loss)
        self._uncounted = _uncounted([*losses, *left], start, planned)
        tasks = self._tasks([one for one in ranges if one.topic in survey.topics], survey)
        return [InputPartition(task) for task in tasks]

    def stop(self) -> None:
        if self._link is not None:
            self._link.close()

    def _broker(self) -> BrokerLink:
        if self._link is None:
            self._link = BrokerLink(self._options.url)
        return self._link

    def _recent(self) -> Survey:
        """Return a survey of now, or the last one if Spark asks too often: it may ask a
        hundred times a second, and there may be thousands of topics.
        """
        began, last = time.monotonic(), self._last
        if last is not None and began - last.at < self._rest * last.cost:
            return last.survey
        survey = self._survey()
        at = time.monotonic()
        self._last = _Taken(survey, at, at - began)
        return survey

    def _follow(self, progress: Progress, survey: Survey) -> tuple[Progress, list[Loss]]:
        same = progress.log == survey.log
        restored = {} if same else self._restored(progress, survey)
        return follow(progress, survey, self._selects, restored)


class MessageStream(BrokerStream):
    """Reader of topics."""

    def _survey(self, *, missing: bool = True) -> Survey:
        return self._broker().survey(self._options, missing=missing)

    def _tasks(self, ranges: Sequence[OffsetRange], survey: Survey) -> Sequence[object]:
        return cut_ranges(ranges, survey, self._options)

    def _restored(self, progress: Progress, survey: Survey) -> dict[int, list[int]] | None:
        reply = self._broker().call("log.restores")
        return restored_ends(reply, progress.log, survey.log)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from read_task(self._options, partition.value, self._names)


class LetterStream(BrokerStream):
    """Reader of the letters of groups, in the order of their deaths."""

    def _survey(self, *, missing: bool = True) -> Survey:
        link, groups = self._broker(), dict[str, TopicBounds]()
        for group in sorted(self._options.letters):
            try:
                shown = link.call("group.show", group=group)
            except UnknownGroup:
                if not missing:
                    raise
                continue
            groups[group] = TopicBounds(shown["group_id"], [1], [shown["next_letter"]])
        return Survey(link.log_name, groups)

    def _tasks(self, ranges: Sequence[OffsetRange], survey: Survey) -> Sequence[object]:
        least = self._options.min_partitions
        return [
            LetterRange(one.topic, *numbers)
            for one in ranges
            for numbers in number_ranges(one.start - 1, one.end - 1, one.end - one.start, least)
        ]

    def _restored(self, progress: Progress, survey: Survey) -> None:
        """Return None: the log does not tell the numbers of letters at a restore."""

    @property
    def _selects(self) -> Callable[[str], bool]:
        return self._options.letters.__contains__

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        yield from read_letters(self._options, partition.value, self._names)


def _left_out(ranges: Sequence[OffsetRange], survey: Survey, *, fail: bool) -> list[Loss]:
    """Return what a planned batch reads of topics that the query does not select any
    more.

    Raises ConfigError to `fail`: otherwise messages would be skipped in silence.
    """
    left = [one for one in ranges if one.topic not in survey.topics]
    if left and fail:
        raise ConfigError(
            "checkpointLocation",
            f"the batch that Spark has planned also reads {left[0].topic}",
            hint="select that until the batch is done, or use a new checkpoint",
        )
    why = "a batch was planned with it, and the query does not select it any more"
    return [Loss(f"{one.topic}/{one.partition}", why, one.end - one.start) for one in left]


def _uncounted(losses: Sequence[Loss], start: dict[str, Any], planned: Progress) -> list[Loss]:
    """Return the losses in a batch that its end does not count as skipped yet."""
    counted = Counter(planned.skipped)
    counted.subtract(start["skipped"])
    return [
        loss._replace(messages=loss.messages - counted[loss.place])
        for loss in losses
        if loss.messages is not None and loss.messages > counted[loss.place]
    ]
