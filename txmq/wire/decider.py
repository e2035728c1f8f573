"""The forms of deciders and participants in requests (docs/FORMATS.md 2.1, 4.2).

Only the form is checked here. A resolver connects to the databases in the broker's own
settings, never to what a bundle names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, cast

from txmq.model.decider import DECIDERS, PARTICIPANTS, Decider, Participant
from txmq.model.message import is_name

Rule = Callable[[object], bool]


def _number(low: int, high: int) -> Rule:
    return lambda value: type(value) is int and low <= value <= high


def _raw(low: int, high: int) -> Rule:
    return lambda value: type(value) is bytes and low <= len(value) <= high


def _name(value: object) -> bool:
    return type(value) is str and is_name(value) is not None


def _or_none(rule: Rule) -> Rule:
    return lambda value: value is None or rule(value)


U31, U32, U64 = (1 << 31) - 1, (1 << 32) - 1, (1 << 64) - 1
FIRST_XID = 3  # PostgreSQL reserves lower ones, and calls them committed
UUID = _raw(16, 16)
XA_PART = _raw(0, 64)  # XA's limit for gtrid and bqual
GID = 199  # PostgreSQL's limit, in bytes
IDENTIFIER = 63  # PostgreSQL's limit for names of databases and roles, in bytes


def _text(most: int, characters: Callable[[str], bool]) -> Rule:
    return lambda value: (
        type(value) is str and 0 < len(value.encode(errors="replace")) <= most and characters(value)
    )


def _is_gid(text: str) -> bool:
    # A gid that psycopg2 makes of an Xid has no quotes and no backslashes.
    return text.isascii() and text.isprintable() and not set("'\"\\ ") & set(text)


SYSTEM_ID, OID, XID = _number(1, U64), _number(1, U32), _or_none(_number(FIRST_XID, U64))
NAME_IN_DATABASE = _text(IDENTIFIER, str.isprintable)
# The rules of the fields, by kind.
DECIDER_FORMS: Final[Mapping[object, tuple[Rule, ...]]] = {
    "checker": (_name,),
    "postgres": (SYSTEM_ID, _number(1, U32), OID, XID, _number(1, U64)),
    "home": (UUID, UUID),
    "job": (UUID,),
    "foreign": (_number(0, U31), XA_PART, XA_PART),
    "local": (),
}
PARTICIPANT_FORMS: Final[Mapping[object, tuple[Rule, ...]]] = {
    "postgres": (
        SYSTEM_ID,
        OID,
        NAME_IN_DATABASE,
        NAME_IN_DATABASE,
        _text(GID, _is_gid),
        XID,
        _number(1, U32),
        _number(1, U64),
    ),
    "broker": (UUID,),
}


def parse_decider(value: object) -> Decider | None:
    """Return the decider that a request names; None = it has not this form."""
    if not _has_form(value, DECIDER_FORMS):
        return None
    row = cast(tuple[object, ...], value)
    return DECIDERS[row[0]]._make(row)


def parse_participant(value: object) -> Participant | None:
    """Return the participant that a request names; None = it has not this form."""
    if not _has_form(value, PARTICIPANT_FORMS):
        return None
    row = cast(tuple[object, ...], value)
    return PARTICIPANTS[row[0]]._make(row)


def _has_form(value: object, forms: Mapping[object, tuple[Rule, ...]]) -> bool:
    if not isinstance(value, tuple) or not value or type(value[0]) is not str:
        return False
    rules = forms.get(value[0])
    fields = value[1:]
    return (
        rules is not None
        and len(fields) == len(rules)
        and all(rule(field) for rule, field in zip(rules, fields, strict=True))
    )
