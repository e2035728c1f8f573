"""Events of dead letters: kinds 128 to 191."""

from __future__ import annotations

from typing import NamedTuple

from txmq.core.events.base import event


@event(140)
class LetterEdited(NamedTuple):
    """A dead letter has another version from now on: the batch of one row at
    `position`, which a record before has stored (MessagesCopied).

    `original` is position and length of the same record's copy of what was published,
    if this is the first edit; else (). `reverts`: the version is the original again.
    """

    group_id: int
    topic_id: int
    partition: int
    offset: int
    position: int
    length: int
    original: tuple[int, int] | tuple[()]
    by: str
    reason: str
    reverts: bool = False
