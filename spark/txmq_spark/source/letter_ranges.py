"""Tasks that read dead letters: ranges of their numbers, or slices of a selection."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple

from txmq.errors import UnknownTopic
from txmq.wire.calls.letters import PLACE_BYTES, Cursor, parse_cursor
from txmq_spark.source.broker_link import BrokerLink
from txmq_spark.source.options import LETTER_STATES
from txmq_spark.source.pushed_filters import PushedLetters

TASK_LETTERS: Final = 10_000  # letters for one task
MAX_TASKS: Final = 1_000  # of one group
# Properties by which the broker counts letters without a look at each.
COUNTED: Final = frozenset({"states", "topic", "error_type", "fingerprint"})
# An undecided transaction replays some of the letters that are dead to other clients.
DEFAULT_STATES: Final = ("open", "replaying")


class LetterRange(NamedTuple):
    """The letters of a group that one task reads.

    `select` None: those with numbers greater than `after`, and at most `last`. With a
    selection, those that it finds from `cursor` on, with numbers up to `last`.
    """

    group: str
    after: int = 0
    last: int = 0
    select: Mapping[str, Any] | None = None
    cursor: str | None = None


def letter_tasks(
    link: BrokerLink, group: str, states: tuple[str, ...], pushed: PushedLetters, least: int
) -> list[LetterRange]:
    """Return at least `least` tasks for the letters of a group as they are now, or none
    if there are no letters.
    """
    wanted = frozenset(states or DEFAULT_STATES)
    if pushed.states is not None:
        wanted &= pushed.states
    elif not (states or pushed.select):
        return _by_number(link, group, least)
    if not wanted:
        return []
    chosen = [state for state in LETTER_STATES if state in wanted]
    return _by_selection(link, group, {**pushed.select, "states": chosen}, least)


def number_ranges(after: int, last: int, count: int, least: int) -> list[tuple[int, int]]:
    """Cut the numbers behind `after`, up to `last`, into ranges for `count` letters.

    A range excludes its first number and includes its second.
    """
    tasks = task_count(count, last - after, least)
    cuts = [after + (last - after) * task // tasks for task in range(tasks + 1)]
    return list(pairwise(cuts))


def task_count(letters: int, width: int, least: int) -> int:
    """Return the number of tasks for so many letters in a range of that width."""
    return max(1, min(width, MAX_TASKS, max(least, -(-letters // TASK_LETTERS))))


def _by_number(link: BrokerLink, group: str, least: int) -> list[LetterRange]:
    first = link.call("dlq.list", group=group, limit=1, bodies=False)["letters"]
    if not first:
        return []
    after, shown = int(first[0]["number"]) - 1, link.call("group.show", group=group)
    numbers = number_ranges(after, int(shown["next_letter"]) - 1, int(shown["letters"]), least)
    return [LetterRange(group, *one) for one in numbers]


def _by_selection(
    link: BrokerLink, group: str, select: dict[str, Any], least: int
) -> list[LetterRange]:
    try:
        newest = _cursor(link, group, select)
        if newest is None:  # no more than one letter
            found = link.call("dlq.list", group=group, select=select, limit=1)["letters"]
            return [LetterRange(group, 0, int(one["number"]), select) for one in found]
        counted = {name: value for name, value in select.items() if name in COUNTED}
        stats = link.call("dlq.stats", group=group, select=counted)
    except UnknownTopic:  # a filter may name any topic
        return []
    after_last = (stats["newest"] or 0) + 1
    start = max(stats["oldest"] or 0, select.get("died_from", 0))
    end = min(after_last, select.get("died_before", after_last))
    letters = 0 if "key" in select else stats["counted"]
    tasks = task_count(letters, max(1, end - start), least)
    cuts = [start + (end - start) * task // tasks for task in range(1, tasks)]
    bounds = [select.get("died_from"), *cuts, select.get("died_before")]
    cursor, last = str(newest._replace(place=bytes(PLACE_BYTES))), newest.below - 1
    return [
        LetterRange(group, 0, last, select | _times(died_from, died_before), cursor)
        for died_from, died_before in pairwise(bounds)
    ]


def _times(died_from: int | None, died_before: int | None) -> dict[str, int]:
    times = {"died_from": died_from, "died_before": died_before}
    return {name: time for name, time in times.items() if time is not None}


def _cursor(link: BrokerLink, group: str, select: Mapping[str, Any]) -> Cursor | None:
    """Return a place in a selection, which tells the letters that are there now; None =
    there is no more than one.
    """
    text = link.call("dlq.list", group=group, select=dict(select), limit=1)["next"]
    return None if text is None else parse_cursor(text)
