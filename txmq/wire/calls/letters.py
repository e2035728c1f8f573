"""Arguments of control calls of dead letters, and selections of them."""

from __future__ import annotations

import re
from base64 import b64decode
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field, StringConstraints

from txmq.model import limits
from txmq.wire.calls.arguments import Args, Limit, ListArgs, Name, Reason, Text
from txmq.wire.calls.consumers import GroupArgs, MessagePlace, Offset, OperatorArgs, Partition
from txmq.wire.calls.messages import BodyCriterion, HeaderCriterion

PLACE_BYTES = 32
_CURSOR = re.compile(r"[0-9a-f]{96}")
_NUMBER = 16  # hexadecimal digits


BODY_TEXT = -(-limits.MESSAGE // 3) * 4  # characters of the largest body in base64


class Cursor(NamedTuple):
    """Beginning of the next page of a selection. On the wire it is 96 hexadecimal
    digits, which no client need understand.
    """

    place: bytes
    below: int
    until: int

    def __str__(self) -> str:
        return f"{self.place.hex()}{self.below:016x}{self.until:016x}"


def parse_cursor(text: str) -> Cursor:
    """Return the cursor that a page has ended with."""
    at = 2 * PLACE_BYTES
    return Cursor(
        bytes.fromhex(text[:at]), int(text[at : at + _NUMBER], 16), int(text[at + _NUMBER :], 16)
    )


def _cursor(text: str) -> str:
    if _CURSOR.fullmatch(text) is None:
        raise ValueError("not a cursor: repeat `next` of the page before")
    return text


def _base64(text: str) -> str:
    try:
        b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError("not base64") from error
    return text


Headers = Annotated[
    dict[
        Annotated[str, StringConstraints(min_length=1, max_length=1_024)],
        Annotated[str, StringConstraints(max_length=limits.HEADERS)],
    ],
    Field(max_length=limits.ALL_HEADER_PAIRS),
]
CursorText = Annotated[str, AfterValidator(_cursor)]
TraceParent = Annotated[str, StringConstraints(max_length=55)]  # as W3C writes it
Time = Annotated[int, Field(ge=0, le=limits.TIME)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Short = Annotated[str, StringConstraints(max_length=256)]
State = Literal["open", "replaying", "abandoned", "local", "retrying"]


class SelectionArgs(Args):
    """The dead letters to select: those with all of these properties; null = any.

    `died_from` <= time of death < `died_before`, in microseconds. `body` and `header`
    are as for messages. `text` is part of the error's type or text, in any
    case of its letters.
    """

    states: Annotated[tuple[State, ...], Field(min_length=1, max_length=5)] = ("open",)
    topic: Name | None = None
    key: Annotated[str, StringConstraints(max_length=limits.KEY)] | None = None
    died_from: Time | None = None
    died_before: Time | None = None
    error_type: Short | None = None
    fingerprint: Short | None = None
    min_attempts: Count | None = None
    max_attempts: Count | None = None
    header: HeaderCriterion | None = None
    body: BodyCriterion | None = None
    text: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    max_replays: Count | None = None


class SelectArgs(GroupArgs):
    """Letters of a group: by a selection, or by the name of a saved one."""

    select: SelectionArgs | None = None
    saved: Name | None = None

    @property
    def selects(self) -> bool:
        """Return True if letters are selected."""
        return self.select is not None or self.saved is not None

    @property
    def judges_bodies(self) -> bool:
        return self.select is not None and self.select.body is not None


class DlqList(SelectArgs):
    """A page of dead letters.

    Without a selection, all in the order of their numbers, open or abandoned, and
    `after` is a number. With one, `cursor` is `next` of the page before.
    """

    after: Annotated[int, Field(ge=0, lt=2**63)] = 0
    cursor: CursorText | None = None
    limit: Limit = 100
    bodies: bool = False


class DlqShow(GroupArgs):
    """One dead letter; `version` is the number of one of an edited letter's versions, 0
    = the original, null = the newest.
    """

    topic: Name
    partition: Partition
    offset: Offset
    bodies: bool = True
    version: Count | None = None


class DlqStats(SelectArgs):
    """Statistics of the dead letters of a group, by default of the open ones. To count
    keys, up to 100,000 letters are read in the index.
    """

    keys: bool = True


class DlqReplay(OperatorArgs, SelectArgs):
    """Dead letters to deliver again: by their places, or the next ones of a
    selection.
    """

    letters: Annotated[tuple[MessagePlace, ...], Field(max_length=10_000)] = ()
    cursor: CursorText | None = None


class DlqAbandon(DlqReplay):
    """Dead letters to close for good."""

    reason: Reason


class RetryNow(DlqReplay):
    """Messages that are retried, not to wait for their next attempt: by their places,
    or the next ones of a selection.
    """


class RetryEnd(RetryNow):
    """Messages that are retried, to have no further attempt."""

    reason: Reason


class DlqEdit(GroupArgs):
    """Another version of the message of one open dead letter, or of one that waits for
    a retry.

    A `body` in base64 or `headers`, null = as they are; or `revert` to what was
    published. `edits` is the number of edits that the caller has seen. `any_format`
    takes a body that is no JSON though the former one is.
    """

    topic: Name
    partition: Partition
    offset: Offset
    edits: Annotated[int, Field(ge=0, lt=2**31)]
    body: Annotated[str, AfterValidator(_base64), Field(max_length=BODY_TEXT)] | None = None
    headers: Headers | None = None
    revert: bool = False
    any_format: bool = False
    operator: Name
    reason: Reason


class DlqRedrive(DlqReplay):
    """Dead letters to copy to another topic, or to give to another group: by their
    places, or the next ones of a selection.

    `abandon` closes them in the same record. `again`: also those that have a copy
    there. `traceparent`: of the span of the call, for copies to link to.
    """

    to: Name | None = None
    to_group: Name | None = None
    abandon: bool = False
    again: bool = False
    traceparent: TraceParent | None = None
    operator: Name
    reason: Reason


class DlqExported(OperatorArgs):
    """Dead letters that an export has: places, numbers of their deaths and of their
    edits.
    """

    letters: Annotated[
        tuple[tuple[Name, Partition, Offset, Count, Count], ...],
        Field(min_length=1, max_length=1_000),
    ]
    operator: Name


class DlqTry(OperatorArgs):
    """One open dead letter to deliver once, to one member."""

    topic: Name
    partition: Partition
    offset: Offset
    member: Name
    operator: Name


class DlqTried(GroupArgs):
    """The outcome of a trial; `number` is that of the death that was tried."""

    topic: Name
    partition: Partition
    offset: Offset
    number: Annotated[int, Field(ge=0, lt=2**63)]


class DlqNote(OperatorArgs):
    """A note on a fingerprint; "" removes it."""

    fingerprint: Short
    text: Annotated[str, StringConstraints(max_length=1_024)]


class DlqSave(Args):
    """A selection to save under a name; null removes it."""

    name: Name
    select: SelectionArgs | None = None
    operator: Name | None = None
    reason: Text = ""

    @property
    def judges_bodies(self) -> bool:
        return self.select is not None and self.select.body is not None


class DlqSaved(ListArgs):
    """The saved selections by name."""
