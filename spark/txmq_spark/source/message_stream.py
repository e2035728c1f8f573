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
from functools import partial
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
from txmq_spark.source.logs import (
    LogPlace,
    Logs,
    LogTask,
    Surveyed,
    require_one_log,
    survey_all,
    survey_removed,
    with_log,
)
from txmq_spark.source.message_reading import read_task
from txmq_spark.source.offset_ranges import (
    Loss,
    Survey,
    TaskRange,
    TopicBounds,
    TopicPartition,
    bound_offsets,
    cut_ranges,
    report_losses,
)
from txmq_spark.source.options import ReadOptions
from txmq_spark.source.stream_progress import (
    Paired,
    Progress,
    first_progress,
    follow,
    limit_logs,
    logs_json,
    newest_progress,
    paired,
    parse_progress,
    restored_ends,
)

REST: Final = 4  # between two surveys, as a multiple of the time that one takes


class _Taken(NamedTuple):
    """Surveys of all logs, when they were taken, and how many seconds that took."""

    surveys: list[Surveyed]
    at: float
    cost: float


class BrokerStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader for a query.

    Spark makes one in a process of its own, which plans the query's batches, and
    others in the tasks, which only `read`.
    """

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options, self._names = options, names
        self._opened: Logs | None = None
        # the last offsets to read, by log
        self._until: dict[str, dict[TopicPartition, int]] | None = None
        self._last: _Taken | None = None
        self._rest = REST
        # Losses of a batch whose end was planned before: the next progress counts them.
        self._uncounted: list[Loss] = []

    @abstractmethod
    def _survey(self, link: BrokerLink, missing: bool) -> Survey:  # noqa: FBT001  # a Look
        """Return what a log has to read. `missing`: some of it may not be there."""

    @abstractmethod
    def _tasks(self, ranges: Sequence[OffsetRange], survey: Survey) -> Sequence[object]:
        """Cut ranges into those of tasks, for `read`."""

    @abstractmethod
    def _read(
        self,
        options: ReadOptions,
        work: Any,  # noqa: ANN401  # of a LogTask
        names: Sequence[str],
    ) -> Iterator[pa.RecordBatch]:
        """Yield what a task reads of one log."""

    @abstractmethod
    def _restored(
        self, link: BrokerLink, progress: Progress, survey: Survey
    ) -> dict[int, list[int]] | None:
        """Return the ends at restores since the progress, as `restored_ends` does."""

    @property
    def _selects(self) -> Callable[[str], bool]:
        return self._options.selects

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        task: LogTask = partition.value
        read = partial(self._read, task.of(self._options), task.work)
        return with_log(read, self._names, task.log_id)

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  # Spark's name
        places, start = self._logs.places(), self._options.start
        require_one_log(places, start.given)
        names = (*self._options.topics, *self._options.letters)
        return logs_json(
            [
                first_progress(
                    survey, bound_offsets(start, survey, "startingOffsets", place.link.offset_at)
                )._replace(at=place.at)
                for place, survey in survey_all(places, self._survey, names)
            ]
        )

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        most = self._options.max_offsets
        return ReadMaxRows(most) if most else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        surveys = self._surveys(())
        self._until = {survey.log.log_id: survey.ends() for _place, survey in surveys}

    def latestOffset(  # noqa: N802  # Spark's name
        self, start: dict[str, Any], limit: ReadLimit
    ) -> dict[str, Any]:
        before = parse_progress(start)
        surveys = self._recent(before)
        (now, _gone, left), losses = self._follow(before, surveys)
        report_losses(losses, fail=self._options.fail_on_data_loss)
        now[0] = now[0].skipping([*losses, *self._uncounted])
        self._uncounted.clear()
        ends = [
            newest_progress(one, survey, self._until_of(place, survey))
            for one, (place, survey) in zip(now, surveys, strict=True)
        ]
        if isinstance(limit, ReadMaxRows):
            ends = limit_logs(now, ends, limit.max_rows)
        end = (*map(leaving, now, ends, surveys), *left)
        return start if end == before else logs_json(end)

    def _until_of(self, place: LogPlace, survey: Survey) -> dict[TopicPartition, int] | None:
        """Return where a run that is to end stops in a log; None = it goes on."""
        if self._until is None:
            return None
        if not place.listed:  # only its progress has told of it
            self._until.setdefault(survey.log.log_id, survey.ends())
        return self._until.get(survey.log.log_id, {})

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802  # Spark's name
        surveys = self._surveys(()) if self._last is None else self._last.surveys
        return logs_json([first_progress(survey, survey.ends()) for _place, survey in surveys])

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if start == end:
            return []
        planned, fail = parse_progress(end), self._options.fail_on_data_loss
        over = {one.log.log_id for one in planned if one.left}
        before = [one for one in parse_progress(start) if one.log.log_id not in over]
        surveys = self._surveys([*before, *planned])
        (begun, *_), losses = self._follow(before, surveys)
        (ended, *_), lost = self._follow(planned, surveys)
        left: list[Loss] = []
        tasks: list[LogTask] = []
        for (place, survey), first, last in zip(surveys, begun, ended, strict=True):
            ranges = last.ranges_from(first)
            left += _left_out(ranges, survey, fail=fail)
            there = [one for one in ranges if one.topic in survey.topics]
            url, log_id = place.link.url, survey.log.log_id
            tasks += [LogTask(url, log_id, work) for work in self._tasks(there, survey)]
        report_losses([*losses, *lost, *left], fail=fail)
        self._uncounted = _uncounted([*losses, *left], parse_progress(start), planned)
        return [InputPartition(task) for task in tasks]

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()

    @property
    def _logs(self) -> Logs:
        if self._opened is None:
            self._opened = Logs(self._options)
        return self._opened

    def _surveys(self, progress: Sequence[Progress]) -> list[Surveyed]:
        """Return what is to be read in the logs that are listed, and in those that
        were, of which there is progress.
        """
        logs = self._logs
        places = logs.places(begins=not progress)
        found = survey_all(places, self._survey)
        known = {one.survey.log.log_id for one in found}
        for one in progress:
            if one.left or one.log.log_id in known:
                continue
            known.add(one.log.log_id)
            place = logs.removed(one.log.log_id, one.at)
            found += survey_removed(place, self._survey) if place else []
        return found

    def _recent(self, progress: Sequence[Progress]) -> list[Surveyed]:
        """Return surveys of now, or the last ones if Spark asks too often: it may ask a
        hundred times a second, and there may be thousands of topics.
        """
        began, last = time.monotonic(), self._last
        if last is not None and began - last.at < self._rest * last.cost:
            return last.surveys
        surveys = self._surveys(progress)
        at = time.monotonic()
        self._last = _Taken(surveys, at, at - began)
        return surveys

    def _follow(
        self, progress: Sequence[Progress], surveys: Sequence[Surveyed]
    ) -> tuple[Paired, list[Loss]]:
        """Return the progress in the logs as they are now, and what is lost."""
        pairs = paired(progress, [survey.log for _place, survey in surveys])
        now, losses = [], pairs.lost(self._selects)
        for one, (place, survey) in zip(pairs.present, surveys, strict=True):
            same = one.log == survey.log
            restored = {} if same else self._restored(place.link, one, survey)
            followed, lost = follow(one, survey, self._selects, restored)
            now.append(followed._replace(at=place.at))
            losses += lost
        return pairs._replace(present=now), losses


class MessageStream(BrokerStream):
    """Reader of topics."""

    def _survey(self, link: BrokerLink, missing: bool) -> Survey:  # noqa: FBT001  # a Look
        return link.survey(self._options, missing=missing)

    def _tasks(self, ranges: Sequence[OffsetRange], survey: Survey) -> Sequence[object]:
        return cut_ranges(ranges, survey, self._options)

    def _restored(
        self, link: BrokerLink, progress: Progress, survey: Survey
    ) -> dict[int, list[int]] | None:
        return restored_ends(link.call("log.restores"), progress.log, survey.log)

    def _read(
        self, options: ReadOptions, work: TaskRange, names: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        return read_task(options, work, names)


class LetterStream(BrokerStream):
    """Reader of the letters of groups, in the order of their deaths."""

    def _survey(self, link: BrokerLink, missing: bool) -> Survey:  # noqa: FBT001  # a Look
        groups: dict[str, TopicBounds] = {}
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

    def _restored(self, link: BrokerLink, progress: Progress, survey: Survey) -> None:
        """Return None: the log does not tell the numbers of letters at a restore."""

    @property
    def _selects(self) -> Callable[[str], bool]:
        return self._options.letters.__contains__

    def _read(
        self, options: ReadOptions, work: LetterRange, names: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        return read_letters(options, work, names)


def leaving(now: Progress, end: Progress, surveyed: Surveyed) -> Progress:
    """Return the progress at an end; a log that is listed no more is left behind its
    last message.
    """
    rest = newest_progress(now, surveyed.survey, None)
    return end if surveyed.place.listed or rest != now else end._replace(at="", left=True)


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


def _uncounted(
    losses: Sequence[Loss], start: Sequence[Progress], planned: Sequence[Progress]
) -> list[Loss]:
    """Return the losses in a batch that its end does not count as skipped yet."""
    counted = Counter[str]()
    for one in planned:
        counted.update(one.skipped)
    for one in start:
        counted.subtract(one.skipped)
    left: list[Loss] = []
    for loss in losses:
        known = max(0, min(counted[loss.place], loss.messages or 0))
        counted[loss.place] -= known  # several logs have this place
        if loss.messages is not None and loss.messages > known:
            left.append(loss._replace(messages=loss.messages - known))
    return left
