"""Events of dead letters: kinds 128 to 191."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.core.events.base import event

if TYPE_CHECKING:
    from txmq.core.events.consumers import FenceChange
    from txmq.core.state.consumer_groups import MessageRef
    from txmq.core.state.failed_rows import Move


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
    reverts: bool


@event(141)
class LettersRedriven(NamedTuple):
    """Copies of dead letters were published in the topic `to`, by a BatchesStored in
    the same record.

    `copies` are (topic id, partition, offset) of the letter, then partition and offset
    of its copy. `moves` and `fences` are those of letters that are abandoned with it.
    """

    group_id: int
    to: int
    copies: tuple[tuple[int, int, int, int, int], ...]
    moves: tuple[Move, ...]
    fences: tuple[FenceChange, ...]
    by: str
    reason: str


@event(144)
class LettersGiven(NamedTuple):
    """Messages of dead letters are delivered to another group, too.

    `letters` are (topic id, partition, offset), and whether the new row points at a
    copy, which a record before has stored (MessagesCopied). `theirs` are moves and
    fences of the other group, `ours` those of letters that are abandoned with it.
    """

    group_id: int
    to: int
    letters: tuple[tuple[int, int, int, bool], ...]
    theirs: tuple[tuple[Move, ...], tuple[FenceChange, ...]]
    ours: tuple[tuple[Move, ...], tuple[FenceChange, ...]]
    by: str
    reason: str


@event(142)
class LettersExported(NamedTuple):
    """An operator has these dead letters in a file: retention may delete them."""

    group_id: int
    rows: tuple[MessageRef, ...]
    by: str


@event(143)
class LetterTried(NamedTuple):
    """A dead letter is delivered once, to the member that the new row names."""

    group_id: int
    moves: tuple[Move, ...]
    fences: tuple[FenceChange, ...]
    by: str


@event(156)
class HistoriesForgotten(NamedTuple):
    """The failures of messages that are gone are dropped, by their keys in table
    `attempts`.
    """

    keys: tuple[bytes, ...]
