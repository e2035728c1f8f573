"""Progress of a stream: the offsets that Spark keeps in its checkpoint, and how they
follow what the broker has. Pure arithmetic.

Letters of groups are streams like topics: a group is a topic of one partition, and the
numbers of its letters are the offsets.

Progress names the log, its incarnation and the ids of the topics: offsets have a
meaning in those only. It also counts the messages that the stream has had to skip, so
that `failOnDataLoss` false leaves a trace in the query's progress.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from txmq.errors import ConfigError
from txmq.model import limits
from txmq_spark.source.arrow_messages import OffsetRange
from txmq_spark.source.offset_ranges import (
    LogName,
    Loss,
    Survey,
    TopicBounds,
    TopicPartition,
    retention_loss,
)

VERSION: Final = 1
Number = Annotated[int, Field(ge=0, le=limits.SEQUENCE)]


class _TopicJson(BaseModel):
    id: Number
    offsets: dict[int, Number]


class _ProgressJson(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: Annotated[int, Field(ge=VERSION, le=VERSION)]
    log: str
    incarnation: str
    topics: dict[str, _TopicJson]
    skipped: dict[str, Number]
    at: str = ""
    left: bool = False


class _LogsJson(_ProgressJson):
    others: list[_ProgressJson] = []


class TopicProgress(NamedTuple):
    """The next offset to read of each partition of a topic."""

    topic_id: int
    offsets: tuple[int, ...]


class Progress(NamedTuple):
    """The next offsets of a stream in one log, and the numbers of messages it has
    skipped by partition.

    `at`: where a listed log is. It is `left` once it was listed no more, and read to
    its end.
    """

    log: LogName
    topics: Mapping[str, TopicProgress]
    skipped: Mapping[str, int]
    at: str = ""
    left: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the progress as Spark keeps it, always in the same order."""
        topics = {
            name: {
                "id": topic.topic_id,
                "offsets": {str(number): offset for number, offset in enumerate(topic.offsets)},
            }
            for name, topic in sorted(self.topics.items())
        }
        return {
            "version": VERSION,
            "log": self.log.log_id,
            "incarnation": self.log.incarnation,
            "topics": topics,
            "skipped": dict(sorted(self.skipped.items())),
            **({"at": self.at} if self.at else {}),
            **({"left": True} if self.left else {}),
        }

    def skipping(self, losses: Sequence[Loss]) -> Progress:
        """Count the messages of these losses as skipped."""
        counts = Counter(self.skipped)
        for loss in losses:
            counts[loss.place] += loss.messages or 0
        return self._replace(skipped={place: count for place, count in counts.items() if count})

    def ranges_from(self, start: Progress) -> list[OffsetRange]:
        """Return the offsets between two states of progress in the same log.

        A partition that `start` does not have is read from its first offset.
        """
        return [
            OffsetRange(name, number, begun, end)
            for name, topic in sorted(self.topics.items())
            for number, end in enumerate(topic.offsets)
            if (begun := _offset_of(start, name, topic.topic_id, number)) < end
        ]


def logs_json(logs: Sequence[Progress]) -> dict[str, Any]:
    """Return the progress in all logs as Spark keeps it."""
    first, *others = [one.to_json() for one in logs]
    return first | ({"others": others} if others else {})


def parse_progress(tree: object) -> tuple[Progress, ...]:
    """Return the progress in each log of a checkpoint. Raises ConfigError for anything
    else.
    """
    try:
        found = _LogsJson.model_validate(tree)
        return tuple(map(_parsed, (found, *found.others)))
    except (ValidationError, ValueError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise ConfigError(
            "checkpointLocation",
            f"the offsets {str(tree)[:200]} are not those of a txmq stream: {why}",
            hint="use the checkpoint of this query, or a new one",
        ) from None


def _parsed(found: _ProgressJson) -> Progress:
    topics = {
        name: TopicProgress(topic.id, _in_order(topic.offsets))
        for name, topic in found.topics.items()
    }
    if found.at:
        UUID(found.log)  # by which a log is known at its address
    log = LogName(found.log, found.incarnation)
    return Progress(log, topics, found.skipped, found.at, found.left)


def first_progress(survey: Survey, offsets: Mapping[TopicPartition, int]) -> Progress:
    """Return the progress of a stream that starts at these offsets."""
    topics = {
        name: TopicProgress(
            bounds.topic_id, tuple(offsets[name, number] for number in range(len(bounds.ends)))
        )
        for name, bounds in survey.topics.items()
    }
    return Progress(survey.log, topics, {})


class Paired(NamedTuple):
    """Progress by the logs that are there: that of each, that of logs that are `gone`,
    and that of logs that were `left`.
    """

    present: list[Progress]
    gone: list[Progress]
    left: list[Progress]

    def lost(self, selects: Callable[[str], bool]) -> list[Loss]:
        """Return what cannot be read of logs that are gone."""
        return [
            Loss(name, f"log {one.log.log_id} is listed no more, and was not read to its end")
            for one in self.gone
            for name in one.topics
            if selects(name)
        ]


def paired(progress: Iterable[Progress], logs: Sequence[LogName]) -> Paired:
    """Return the progress by the logs that are there. A log without progress has that
    of one that is gone: it may have taken its place. Otherwise it is a new one.
    """
    known = {one.log.log_id: one for one in progress}
    found = [known.pop(log.log_id, None) for log in logs]
    gone = [one for one in known.values() if not one.left]
    present = [
        one or (gone.pop(0) if gone else Progress(log, {}, {}))
        for one, log in zip(found, logs, strict=True)
    ]
    return Paired(present, gone, [one for one in known.values() if one.left])


def follow(
    progress: Progress,
    survey: Survey,
    selects: Callable[[str], bool],
    restored: Mapping[int, Sequence[int]] | None,
) -> tuple[Progress, list[Loss]]:
    """Return the progress in the log as it is now, and the messages that are lost.

    `restored` has the ends of topics, by id, at restores of the log since the progress:
    a stream that was behind them has lost nothing. None = the log is not the same one.
    New topics and partitions are read from their beginning. Topics that the stream does
    not select any more keep their progress, for when it selects them again: another
    run would read them twice. In a log that was restored, or another one, their offsets
    have no meaning, and are left out.
    """
    topics: dict[str, TopicProgress] = {}
    losses: list[Loss] = []
    for name, topic in progress.topics.items():
        bounds = survey.topics.get(name)
        if not selects(name):
            if progress.log == survey.log:
                topics[name] = topic
            continue
        if bounds is None:
            losses.append(Loss(name, "it was deleted"))
        elif restored is None:
            losses.append(Loss(name, _other_log(progress.log, survey.log)))
        elif bounds.topic_id != topic.topic_id:
            losses.append(Loss(name, "it was deleted and made again"))
        else:
            offsets, lost = _follow_topic(name, topic, bounds, restored.get(topic.topic_id))
            topics[name] = topic._replace(offsets=offsets)
            losses += lost
    for name, bounds in survey.topics.items():
        topics.setdefault(name, TopicProgress(bounds.topic_id, tuple(bounds.firsts)))
    return Progress(survey.log, topics, progress.skipped), losses


def _follow_topic(
    name: str, topic: TopicProgress, bounds: TopicBounds, restored: Sequence[int] | None
) -> tuple[tuple[int, ...], list[Loss]]:
    offsets: list[int] = []
    losses: list[Loss] = []
    count = len(bounds.ends)
    for number in range(max(count, len(topic.offsets))):
        # A partition that was not there before has been made since.
        offset = topic.offsets[number] if number < len(topic.offsets) else 0
        first, end = (bounds.firsts[number], bounds.ends[number]) if number < count else (0, 0)
        least = end
        if restored is not None:
            least = min(end, restored[number] if number < len(restored) else 0)
        if offset > least:
            why = (
                f"the log was restored from a backup: it ended at offset {least}, and the"
                f" stream had read up to {offset}"
            )
            losses.append(Loss(f"{name}/{number}", why))
            offset = least
        if offset < first:
            losses.append(retention_loss((name, number), offset, first))
            offset = first
        if number < count:
            offsets.append(offset)
    return tuple(offsets), losses


def restored_ends(
    reply: Mapping[str, Any], before: LogName, now: LogName
) -> dict[int, list[int]] | None:
    """Return the lowest ends of topics, by id, at restores since an incarnation.

    `reply` is that of `log.restores`. None = the log does not descend from that
    incarnation: what was read is not in it, whatever the offsets.
    """
    if before == now:
        return {}
    restores = reply["restores"]
    known = ["", *(restore["incarnation"] for restore in restores)]
    if before.log_id != now.log_id or before.incarnation not in known:
        return None
    epochs = {restore["epoch"] for restore in restores[known.index(before.incarnation) :]}
    ends: dict[int, list[int]] = {}
    for topic in reply["topics"]:
        at_restores = [found for epoch, found in topic["ends"] if epoch in epochs]
        if at_restores:
            count = min(map(len, at_restores))
            ends[topic["topic_id"]] = [min(found[n] for found in at_restores) for n in range(count)]
        else:
            ends[topic["topic_id"]] = []
    return ends


def newest_progress(
    progress: Progress, survey: Survey, until: Mapping[TopicPartition, int] | None
) -> Progress:
    """Return the progress at the published ends, or at those of `until` if given."""
    topics = dict(progress.topics)  # also those that are not selected
    for name, bounds in survey.topics.items():
        ends = [
            end if until is None else min(end, until.get((name, number), 0))
            for number, end in enumerate(bounds.ends)
        ]
        topic = topics[name]
        topics[name] = topic._replace(offsets=tuple(map(max, topic.offsets, ends)))
    return progress._replace(topics=topics)


def limit_progress(start: Progress, end: Progress, most: int) -> Progress:
    """Return progress by about `most` messages, in proportion to what waits.

    Each partition with messages goes on by at least one, so that none starves.
    """
    lags = sorted(
        (offsets.end - offsets.start, offsets.topic, offsets.partition, offsets.start)
        for offsets in end.ranges_from(start)
    )
    waiting, left = sum(lag for lag, *_place in lags), most
    if waiting <= most:
        return end
    limited = {name: list(topic.offsets) for name, topic in end.topics.items()}
    for lag, name, number, begun in lags:
        share = min(lag, max(1, left * lag // waiting))
        limited[name][number] = begun + share
        waiting, left = waiting - lag, max(0, left - share)
    return end._replace(
        topics={
            name: topic._replace(offsets=tuple(limited[name])) for name, topic in end.topics.items()
        }
    )


def limit_logs(start: Sequence[Progress], end: Sequence[Progress], most: int) -> list[Progress]:
    """Return progress in several logs, as `limit_progress` does in one."""
    pairs = list(zip(start, end, strict=True))
    waiting = [sum(one.end - one.start for one in to.ranges_from(at)) for at, to in pairs]
    total = max(most, sum(waiting))
    return [
        limit_progress(at, to, max(1, most * waits // total)) if waits else to
        for (at, to), waits in zip(pairs, waiting, strict=True)
    ]


def _offset_of(start: Progress, name: str, topic_id: int, number: int) -> int:
    topic = start.topics.get(name)
    if topic is None or topic.topic_id != topic_id or number >= len(topic.offsets):
        return 0
    return topic.offsets[number]


def _in_order(offsets: Mapping[int, int]) -> tuple[int, ...]:
    if sorted(offsets) != list(range(len(offsets))):
        raise ValueError("partitions are missing")
    return tuple(offsets[number] for number in range(len(offsets)))


def _other_log(before: LogName, now: LogName) -> str:
    if before.log_id != now.log_id:
        return f"the broker has log {now.log_id}, and the stream has read log {before.log_id}"
    return (
        f"the log has incarnation {now.incarnation or 'original'}, and the stream has read"
        f" {before.incarnation or 'the original'}"
    )
