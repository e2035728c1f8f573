"""Who decides a group, and who takes part in what a home broker decides, as it stands
on the wire and in the log (docs/FORMATS.md 2.1, 4.2): a kind and its fields.

Only the form is checked here. Whether a database is known, and what it says, is for the
resolver: it connects to what its own settings name, never to what a group names.
"""

from __future__ import annotations

from collections.abc import Callable

from txmq.model.message import is_name

Decider = tuple[object, ...]
Rule = Callable[[object], bool]


def _number(low: int, high: int) -> Rule:
    return lambda value: type(value) is int and low <= value <= high


def _raw(least: int, most: int) -> Rule:
    return lambda value: type(value) is bytes and least <= len(value) <= most


def _name(value: object) -> bool:
    return type(value) is str and is_name(value)


def _or_none(rule: Rule) -> Rule:
    return lambda value: value is None or rule(value)


U31, U32, U64 = (1 << 31) - 1, (1 << 32) - 1, (1 << 64) - 1
FIRST_XID = 3  # PostgreSQL keeps those below for itself, and calls them committed
UUID = _raw(16, 16)
XA_PART = _raw(0, 64)  # XA's limit for gtrid and bqual
GID = 199  # PostgreSQL's limit, in bytes
IDENTIFIER = 63  # PostgreSQL's limit for names of databases and roles, in bytes


def _text(most: int, characters: Callable[[str], bool]) -> Rule:
    return lambda value: (
        type(value) is str and 0 < len(value.encode(errors="replace")) <= most and characters(value)
    )


def _is_gid(text: str) -> bool:
    """What psycopg2 makes of an Xid has no quotes and no backslashes."""
    return text.isascii() and text.isprintable() and not set("'\"\\ ") & set(text)


FORMS: dict[object, tuple[Rule, ...]] = {
    "checker": (_name,),  # service
    "postgres": (
        _number(1, U64),
        _number(1, U32),
        _number(1, U32),
        _or_none(_number(FIRST_XID, U64)),
    ),
    "home": (UUID, UUID),  # log id, token
    "job": (UUID,),  # token of the job
    "foreign": (_number(0, U31), XA_PART, XA_PART),
    "local": (),
}
PARTICIPANTS: dict[object, tuple[Rule, ...]] = {
    "postgres": (  # system id, database oid, database, owner, gid, xid
        _number(1, U64), _number(1, U32), _text(IDENTIFIER, str.isprintable), _text(IDENTIFIER, str.isprintable),
        _text(GID, _is_gid), _or_none(_number(FIRST_XID, U64)),
    ),
    "broker": (UUID,),  # log id
}  # fmt: skip


def is_decider(value: object) -> bool:
    """Whether `value` has the form of a decider."""
    return _has_form(value, FORMS)


def is_participant(value: object) -> bool:
    """Whether `value` has the form of a branch of a transaction."""
    return _has_form(value, PARTICIPANTS)


def _has_form(value: object, forms: dict[object, tuple[Rule, ...]]) -> bool:
    if not isinstance(value, tuple) or not value or type(value[0]) is not str:
        return False
    rules = forms.get(value[0])
    fields = value[1:]
    return rules is not None and len(rules) == len(fields) and all(map(_follows, rules, fields))


def _follows(rule: Rule, value: object) -> bool:
    return rule(value)
