"""Records of the local store's log (docs/FORMATS.md): encoding, checked decoding.

    1 STORED     a message and its state; a message that is moved is stored again
    2 CHANGED    outcomes
    3 TOLD       states that the broker knows
    4 FORGOTTEN  places that the store no longer has
    5 RELEASED   the position below which segments may be gone
    6 ENTRY      the state of a message whose body is no longer needed

Heads are MessagePack arrays; the attachment of STORED is the body. A checksum says that
a record is what was written, not that it makes sense: `decode` checks types and ranges.
"""

from __future__ import annotations

from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from txmq.model import limits
from txmq.model.retry import FailureReport
from txmq.recover.local_store.values import Place, State, StoredMessage
from txmq.store.log.record import split_body

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from txmq.recover.local_store.values import Change, Entry
    from txmq.store.log.record import Record

STORED, CHANGED, TOLD, FORGOTTEN, RELEASED, ENTRY = range(1, 7)
LAZY = frozenset((TOLD, FORGOTTEN, RELEASED))  # a restart without them only repeats work
_MAX = (1 << 63) - 1
_U32 = (1 << 32) - 1
_FAILURE_CHARACTERS = 1_000  # of an error's text: the broker cuts it, too
_BASES = 32
_NOTHING = FailureReport()
_INTEGERS, _TEXTS = {int}, {str}


class LyingRecord(ValueError):
    """A record with a valid checksum and senseless contents."""


class Row(NamedTuple):
    """State of a message in the store, beside its place.

    Its record is at `position`, and has `size` bytes; `whole`: with the body. `chain`
    is the key's hash where the key's order matters. `run` and the place order what the
    broker is told.
    """

    position: int
    size: int
    whole: bool
    chain: int | None
    run: int
    state: int
    attempt: int
    due: int
    first_at: int
    told: bool
    key: str | None
    failure: tuple[str, ...]
    generation: int
    epoch: int


class StoredHead(NamedTuple):
    """The head of STORED, as an array; that of ENTRY ends with `epoch`."""

    topic_id: int
    partition: int
    offset: int
    key: str | None
    run: int
    state: int
    attempt: int
    due: int
    first_at: int
    told: bool
    failure: tuple[str, ...]
    generation: int
    epoch: int
    tag: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    message_id: str = ""
    born_at: int = 0
    stored_at: int = 0

    @property
    def place(self) -> Place:
        return Place(self.topic_id, self.partition, self.offset)


_ENTRY_FIELDS = 13
_LISTS = (StoredHead._fields.index("failure"), StoredHead._fields.index("headers"))
_numbers = attrgetter(
    "topic_id", "partition", "offset", "run", "attempt", "due", "first_at", "generation",
    "epoch", "stored_at",
)  # fmt: skip

_HEAD_TYPES = {
    (int, int, int, key, int, int, int, int, int, bool, tuple, int, int, tag, tuple, str, int, int)
    for key in (str, NoneType)
    for tag in (str, NoneType)
}

Places = list[Place]
Changes = list[tuple[Place, int, int, int, tuple[str, ...]]]  # state, attempt, due, failure
Told = list[tuple[Place, int, int, int]]  # state, attempt, due


def failure_fields(failure: FailureReport) -> tuple[str, ...]:
    """Return a failure as the log has it, its text cut."""
    if failure == _NOTHING:
        return ()
    names = (failure.type, failure.text, failure.fingerprint, *failure.bases[:_BASES])
    return tuple(text[:_FAILURE_CHARACTERS] for text in names)


def failure_of(fields: Sequence[str]) -> FailureReport:
    if not fields:
        return _NOTHING
    return FailureReport(fields[0], fields[1], fields[2], tuple(fields[3:]))


def encode_stored(head: StoredHead) -> bytes:
    return _pack(head)


def encode_entry(head: StoredHead) -> bytes:
    return _pack(head[:_ENTRY_FIELDS])


def head_of(place: Place, row: Row) -> StoredHead:
    """Return the head of an ENTRY record for what is known of a message."""
    return StoredHead(
        *place,
        row.key,
        row.run,
        row.state,
        row.attempt,
        row.due,
        row.first_at,
        row.told,
        row.failure,
        row.generation,
        row.epoch,
    )


def change_fields(changes: Iterable[Change]) -> Changes:
    """Return outcomes as the log has them. Raises LyingRecord for impossible ones."""
    fields: Changes = []
    for place, state, attempt, due, failure in changes:
        texts = failure_fields(failure)
        _check_place(*place)
        _check_numbers(attempt, due)
        _check_state(int(state))
        _check_failure(texts)
        fields.append((Place(*place), int(state), attempt, due, texts))
    return fields


def encode_changes(changes: Changes) -> bytes:
    return _pack([(*place, *rest) for place, *rest in changes])


def told_fields(entries: Iterable[Entry]) -> Told:
    """Return entries as a TOLD record has them."""
    return [(entry.place, int(entry.state), entry.attempt, entry.due) for entry in entries]


def encode_told(told: Told) -> bytes:
    return _pack([(*place, *rest) for place, *rest in told])


def encode_places(places: Iterable[Place]) -> bytes:
    return _pack([tuple(place) for place in places])


def encode_released(position: int) -> bytes:
    return _pack([position])


def decode_stored(record: Record) -> StoredHead:
    """Return the head of a STORED or ENTRY record. Raises LyingRecord."""
    fields = _unpack(record)
    expected = _ENTRY_FIELDS if record.kind == ENTRY else len(StoredHead._fields)
    if type(fields) is not list or len(fields) != expected:
        raise LyingRecord("a head of other fields")
    for at in _LISTS:
        if at < expected:
            fields[at] = _as_tuple(fields[at])
    head = StoredHead(*fields)
    check_head(head)
    return head


def check_head(head: StoredHead) -> None:
    """Require types and ranges that `decode_stored` accepts. Raises LyingRecord."""
    if (*map(type, head),) not in _HEAD_TYPES:
        raise LyingRecord("a head of other types")
    numbers = _numbers(head)
    if min(numbers) < 0 or max(numbers) > _MAX or abs(head.born_at) > _MAX:
        raise LyingRecord(f"{numbers!r} where numbers belong")
    if head.topic_id > _U32 or head.partition > _U32:
        raise LyingRecord(f"a place of topic {head.topic_id}, partition {head.partition}")
    if len(head.key or "") > limits.KEY or len(head.tag or "") > limits.TAG:
        raise LyingRecord("a text of another length")
    _check_state(head.state)
    _check_failure(head.failure)
    for pair in head.headers:
        if type(pair) is not tuple or len(pair) != 2 or {*map(type, pair)} != _TEXTS:
            raise LyingRecord("headers of other types")


def decode_message(record: Record) -> StoredMessage:
    """Return the message of a STORED record. Raises LyingRecord."""
    head = decode_stored(record)
    return StoredMessage(
        head.place,
        head.key,
        head.tag,
        dict(head.headers),
        bytes(split_body(record).attachment),
        head.message_id,
        head.attempt,
        head.born_at,
        head.stored_at,
        head.epoch,
        head.generation,
    )


def decode_changes(record: Record) -> Changes:
    """Return the outcomes of a CHANGED record. Raises LyingRecord."""
    changes: Changes = []
    for fields in _rows(record, 7):
        *place, state, attempt, due, failure = fields
        _check_place(*place)
        _check_numbers(attempt, due)
        _check_state(state)
        if type(failure) is not list:
            raise LyingRecord("a failure of other types")
        _check_failure(tuple(failure))
        changes.append((Place(*place), state, attempt, due, tuple(failure)))
    return changes


def decode_told(record: Record) -> Told:
    """Return the states of a TOLD record. Raises LyingRecord."""
    told: Told = []
    for fields in _rows(record, 6):
        *place, state, attempt, due = fields
        _check_place(*place)
        _check_numbers(state, attempt, due)
        told.append((Place(*place), state, attempt, due))
    return told


def decode_places(record: Record) -> Places:
    """Return the places of a FORGOTTEN record. Raises LyingRecord."""
    places = []
    for fields in _rows(record, 3):
        _check_place(*fields)
        places.append(Place(*fields))
    return places


def decode_released(record: Record) -> int:
    """Return the position of a RELEASED record. Raises LyingRecord."""
    fields = _unpack(record)
    if type(fields) is not list or len(fields) != 1:
        raise LyingRecord("a head of other fields")
    _check_numbers(*fields)
    position: int = fields[0]
    return position


def _pack(value: object) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed


def _unpack(record: Record) -> Any:  # noqa: ANN401  # the caller checks it
    try:
        return msgpack.unpackb(split_body(record).head)
    except (ValueError, TypeError) as error:
        raise LyingRecord(str(error)) from error


def _as_tuple(value: Any) -> Any:  # noqa: ANN401  # anything
    return tuple(map(_as_tuple, value)) if type(value) is list else value


def _rows(record: Record, width: int) -> list[list[Any]]:
    rows = _unpack(record)
    if type(rows) is not list or any(type(row) is not list or len(row) != width for row in rows):
        raise LyingRecord("a head of other fields")
    return rows


def _check_place(topic_id: int, partition: int, offset: int) -> None:
    _check_numbers(topic_id, partition, offset)
    if topic_id > _U32 or partition > _U32:
        raise LyingRecord(f"a place of topic {topic_id!r}, partition {partition!r}")


def _check_numbers(*values: int) -> None:
    if {*map(type, values)} != _INTEGERS or min(values) < 0 or max(values) > _MAX:
        raise LyingRecord(f"{values!r} where numbers belong")


def _check_state(state: int) -> None:
    if type(state) is not int or not State.STORED <= state <= State.RETURNED:
        raise LyingRecord(f"state {state!r}")


def _check_failure(fields: tuple[object, ...]) -> None:
    if fields and ({*map(type, fields)} != _TEXTS or not 3 <= len(fields) <= 3 + _BASES):
        raise LyingRecord("a failure of other types")
