"""Offsets of a read: what the broker has, what options and filters leave of it, and the
ranges for tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from txmq.errors import ConfigError, TxmqError
from txmq_spark.source.arrow_messages import OffsetRange
from txmq_spark.source.options import LATEST, Bound, ReadOptions

TopicPartition = tuple[str, int]
# The offset at a time: of topic, partition, first offset, end offset, microseconds.
OffsetAt = Callable[[str, int, int, int, int], int]

LOSS_HINT: Final = (
    'find out what was lost; to go on without it, set option("failOnDataLoss", "false")'
)


class DataLoss(TxmqError):
    """Messages of a read are not in the broker's log any more, or not in this log."""

    advice = LOSS_HINT


class LogName(NamedTuple):
    """The log that offsets belong to. `incarnation` "" = it was never restored."""

    log_id: str
    incarnation: str


class TopicBounds(NamedTuple):
    """The offsets that a topic has, by partition: those retained, and those visible.

    `size` is the number of bytes that its retained messages take.
    """

    topic_id: int
    firsts: Sequence[int]
    ends: Sequence[int]
    size: int = 0

    @property
    def message_bytes(self) -> int:
        """The size of a message, on average and at least 1."""
        messages = sum(self.ends) - sum(self.firsts)
        return max(1, self.size // messages) if messages > 0 else 1


class Survey(NamedTuple):
    """The topics to read as the broker has them, in the order of their names."""

    log: LogName
    topics: Mapping[str, TopicBounds]

    def ends(self) -> dict[TopicPartition, int]:
        """Return the published end of every partition."""
        return {
            (name, number): end
            for name, bounds in self.topics.items()
            for number, end in enumerate(bounds.ends)
        }


class Loss(NamedTuple):
    """Messages that a read cannot have. `messages` None = nobody knows how many."""

    place: str
    why: str
    messages: int | None = None

    def __str__(self) -> str:
        return f"{self.place}: {self.why}"


class TaskRange(NamedTuple):
    """The offsets that one task reads, of which topic of which log."""

    offsets: OffsetRange
    log: LogName
    topic_id: int


def report_losses(losses: Sequence[Loss], *, fail: bool) -> None:
    """Raise DataLoss for the first one, or write all of them to the log."""
    if losses and fail:
        more = f"; and {len(losses) - 1} more" if len(losses) > 1 else ""
        raise DataLoss(f"{losses[0]}{more}")
    if losses:
        # Without it a process of Spark's starts 0.1 s earlier, and few have losses.
        import structlog  # noqa: PLC0415

        log = structlog.get_logger()
        for loss in losses:
            log.warning("spark.skipped", place=loss.place, why=loss.why, messages=loss.messages)


def bound_offsets(
    bound: Bound, survey: Survey, name: str, offset_at: OffsetAt
) -> dict[TopicPartition, int]:
    """Return the offset of every partition at a bound of the read.

    Raises ConfigError for offsets of partitions that are not read, or that are not
    published: a read would wait for them in silence, as after a restore of the log.
    """
    _require_existing(bound, survey, name)
    found: dict[TopicPartition, int] = {}
    for topic, bounds in survey.topics.items():
        given = bound.given.get(topic, {})
        for partition, (first, end) in enumerate(zip(bounds.firsts, bounds.ends, strict=True)):
            if partition in given:
                if given[partition] > end:
                    raise ConfigError(
                        name,
                        f"{topic}/{partition} ends at {end}, not at {given[partition]}",
                        hint="choose an offset up to the published end",
                    )
                found[topic, partition] = given[partition]
            elif bound.time is not None:
                found[topic, partition] = offset_at(topic, partition, first, end, bound.time)
            else:
                found[topic, partition] = end if bound.default == LATEST else first
    return found


def batch_ranges(options: ReadOptions, survey: Survey, offset_at: OffsetAt) -> list[OffsetRange]:
    """Return the range of each partition that a batch reads.

    Raises ConfigError for offsets that the topics do not have, and DataLoss for those
    that retention has removed.
    """
    starts = bound_offsets(options.start, survey, "startingOffsets", offset_at)
    ends = bound_offsets(options.end, survey, "endingOffsets", offset_at)
    ranges, losses = [], []
    for (topic, partition), start in starts.items():
        bounds, end = survey.topics[topic], ends[topic, partition]
        first = bounds.firsts[partition]
        if start < min(first, end):
            losses.append(retention_loss((topic, partition), start, min(first, end)))
        ranges.append(OffsetRange(topic, partition, max(start, first), end))
    report_losses(losses, fail=options.fail_on_data_loss)
    return ranges


def retention_loss(place: TopicPartition, start: int, first: int) -> Loss:
    """Return the loss of messages that retention has removed before they were read."""
    name = f"{place[0]}/{place[1]}"
    return Loss(name, f"retention has removed offsets {start} to {first - 1}", first - start)


def cut_ranges(
    ranges: Iterable[OffsetRange], survey: Survey, options: ReadOptions
) -> list[TaskRange]:
    """Cut ranges into those of tasks: by size, and in at least `min_partitions`."""
    filled = [offsets for offsets in ranges if offsets.start < offsets.end]
    rows = sum(offsets.end - offsets.start for offsets in filled)
    most = max(1, -(-rows // options.min_partitions))
    if len(filled) >= options.min_partitions:
        most = rows
    return [
        TaskRange(piece, survey.log, survey.topics[offsets.topic].topic_id)
        for offsets in filled
        for piece in _pieces(offsets, most, survey.topics[offsets.topic], options.partition_bytes)
    ]


def _pieces(
    offsets: OffsetRange, most: int, bounds: TopicBounds, size: int
) -> Iterator[OffsetRange]:
    step = min(most, max(1, size // bounds.message_bytes))
    for start in range(offsets.start, offsets.end, step):
        yield offsets._replace(start=start, end=min(start + step, offsets.end))


def _require_existing(bound: Bound, survey: Survey, name: str) -> None:
    for topic, partitions in bound.given.items():
        known = survey.topics.get(topic)
        count = 0 if known is None else len(known.ends)
        unknown = [f"{topic}/{number}" for number in partitions if not 0 <= number < count]
        if known is None or unknown:
            raise ConfigError(
                name,
                f"{topic if known is None else unknown[0]} is not among the partitions to read",
                hint="name existing topics and partitions of this read",
            )
