"""Dead letters of consumer groups as a DataFrame."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final
from uuid import UUID

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from txmq.errors import UnknownTopic
from txmq.model.schemas.bodies import CONTENT_TYPE, mistake_in
from txmq_spark.source.arrow_letters import letter_batches, letter_state
from txmq_spark.source.broker_link import BrokerLink
from txmq_spark.source.letter_ranges import LetterRange, letter_tasks
from txmq_spark.source.logs import Logs, LogTask, ask_of_group, with_log
from txmq_spark.source.options import ReadOptions
from txmq_spark.source.pushed_filters import PushedLetters, push_letter_filters

NOTHING_PUSHED: Final = PushedLetters()


class LetterReader(DataSourceReader):
    """Reader of the letters that groups had at planning and that are still there."""

    def __init__(self, options: ReadOptions, names: Sequence[str]) -> None:
        self._options, self._names = options, names
        self._pushed = PushedLetters(options.select)

    def partitions(self) -> Sequence[InputPartition]:
        with Logs(self._options) as logs:
            places = logs.places()
            least = -(-self._options.min_partitions // len(places))
            tasks = [
                LogTask(place.link.url, place.link.log_id, task)
                for group in self._options.letters
                for place, found in ask_of_group(places, partial(self._tasks, group, least))
                for task in found
            ]
        # Spark would take an empty list for a source without partitions.
        return [InputPartition(task) for task in tasks] or [InputPartition(None)]

    def _tasks(self, group: str, least: int, link: BrokerLink) -> list[LetterRange]:
        return letter_tasks(link, group, self._options.states, self._pushed, least)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        task: LogTask | None = partition.value
        if task is None:
            return
        options = task.of(self._options)
        yield from with_log(
            lambda names: read_letters(options, task.work, names, self._pushed),
            self._names,
            task.log_id,
        )


class FilteringLetterReader(LetterReader):
    """Reader of letters that takes filters from Spark."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        self._pushed, rest = push_letter_filters(filters, self._options.select)
        return rest


def read_letters(
    options: ReadOptions,
    task: LetterRange,
    names: Sequence[str],
    pushed: PushedLetters = NOTHING_PUSHED,
) -> Iterator[pa.RecordBatch]:
    """Yield the letters of a task. Raises LogChanged where another log answers."""

    def has(letter: dict[str, Any]) -> bool:
        if "damaged" in letter and "key" in pushed.select:
            return False  # a letter whose message is damaged has no key
        state = letter_state(letter)
        return (
            (state in options.states if options.states else letter["state"] == "dead")
            and (pushed.states is None or state in pushed.states)
            and pushed.has(letter)
        )

    with BrokerLink(options.url) as link:
        if options.log is not None:
            link.expect_log(UUID(options.log))
        judged = "unfit" in names
        found = _listed(link, task, bodies="body" in names or judged)
        if judged:
            found = with_mistakes(link, found)
        yield from letter_batches((letter for letter in found if has(letter)), names)


def with_mistakes(link: BrokerLink, letters: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield letters, of which those whose bodies do not fit their topics' schemas say
    why.
    """
    schemas: dict[str, str] = {}
    for letter in letters:
        topic = letter["topic"]
        if topic not in schemas:
            schemas[topic] = _schema(link, topic)
        if schemas[topic] and "body" in letter:
            kind = letter["headers"].get(CONTENT_TYPE, "")
            letter["unfit"] = mistake_in(schemas[topic], b64decode(letter["body"]), kind) or None
        yield letter


def _schema(link: BrokerLink, topic: str) -> str:
    try:
        return str(link.call("topic.show", name=topic).get("schema") or "")
    except UnknownTopic:  # deleted since
        return ""


def _listed(link: BrokerLink, task: LetterRange, *, bodies: bool) -> Iterable[dict[str, Any]]:
    if task.select is None:
        return link.letters(task.group, bodies=bodies, after=task.after, last=task.last)
    found = link.selected_letters(task.group, task.select, bodies=bodies, cursor=task.cursor)
    return (letter for letter in found if letter["number"] <= task.last)
