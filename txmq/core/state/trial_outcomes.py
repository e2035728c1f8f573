"""Outcomes of trials whose dead letters are no failed messages any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Mapping

    from txmq.core.state.consumer_groups import MessageRef

KEPT = 1_000  # a few have waiting operators
ROW = b"trials"  # of table `meta`


class TrialOutcomes:
    """The last outcomes, by group id, message and the number of the death that was
    tried; "" = processed.

    A trial is an operator's order, and its outcome is told to one that asks for it: so
    there are few, and all of them are one row.
    """

    def __init__(self) -> None:
        self._outcomes: dict[tuple[int, MessageRef, int], str] = {}
        self._dirty = False

    def note(self, group_id: int, ref: MessageRef, number: int, why: str) -> None:
        """Apply: a message that was tried is a failed message no more."""
        self._outcomes[group_id, ref, number] = why
        if len(self._outcomes) > KEPT:
            del self._outcomes[next(iter(self._outcomes))]
        self._dirty = True

    def outcome(self, group_id: int, ref: MessageRef, number: int) -> str | None:
        """Return how a trial ended; None = not known any more."""
        return self._outcomes.get((group_id, ref, number))

    def save(self, tables: Mapping[str, t.Table]) -> None:
        """Write them, if there are others since the last call."""
        if self._dirty:
            found = self._outcomes.items()
            row = tuple((group, *ref, number, why) for (group, ref, number), why in found)
            tables[t.META].put(ROW, row)
            self._dirty = False

    def load(self, tables: t.Tables) -> None:
        """Read what `save` wrote, oldest first."""
        rows: Any = tables[t.META].get(ROW)
        for group_id, topic_id, partition, offset, number, why in rows or ():
            self._outcomes[group_id, (topic_id, partition, offset), number] = why
