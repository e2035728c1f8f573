"""Dead letters of a group for services, by control calls, without I/O."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypedDict

from txmq.errors import LocalProtocolError
from txmq.model.message import to_micros

PAGE = 100


class LetterOptions(TypedDict, total=False):
    """The properties of the letters to select; a letter has all that are given.

    `died_from` <= time of death < `died_before`. `header` is a name and a value, None =
    any value; `body` is as for `find`. `text` is part of the error's type or text, in
    any case of its letters.
    `states` are some of "open" (the default), "abandoned", and of messages that have
    another attempt: "retrying", "replaying" (was dead) and "local" (in the local store
    of a consumer). These have not died; their time is that of their first failure.
    """

    states: Sequence[str]
    topic: str
    key: str
    error_type: str
    fingerprint: str
    text: str
    header: tuple[str, str | None]
    body: str
    min_attempts: int
    max_attempts: int
    max_replays: int
    died_from: datetime | int
    died_before: datetime | int


class DeadLetter(NamedTuple):
    """A dead letter of a consumer group, or a message that is retried: a message, and
    its last error.

    `state` is "dead", "replaying", "abandoned", "local" or "retrying". `next_at` is the
    time of its next attempt, 0 = it waits for none. `held_by` says which consumer has
    it, "" = it waits at the broker. `attempts` are counted from
    the last replay on. `body` is None where bodies were not asked for. Times are
    microseconds. A letter that is `damaged` on the broker's disk has that reason, and
    no key, id and body. `edits` is the number of times that its message was edited.
    """

    group: str
    topic: str
    partition: int
    offset: int
    state: str
    key: str | None
    tag: str | None
    headers: Mapping[str, str]
    body: bytes | None
    message_id: str | None
    attempts: int
    replays: int
    consumer: str
    error_type: str
    error_text: str
    fingerprint: str
    first_failed_at: int
    dead_at: int
    stored_at: int
    damaged: str
    edits: int = 0
    next_at: int = 0
    held_by: str = ""


def selection_args(saved: str | None, options: LetterOptions) -> dict[str, object]:
    """Return the arguments of a call that select letters. Raises LocalProtocolError
    where a selection is both named and given.
    """
    if saved is not None and options:
        raise LocalProtocolError(
            f"both the saved selection {saved!r} and {', '.join(options)}",
            hint="give either the name or the properties",
        )
    select: dict[str, object] = dict(options)
    for name in ("died_from", "died_before"):
        if name in select:
            select[name] = to_micros(select[name])  # type: ignore[arg-type]  # its own type
    return {"saved": saved} if saved is not None else {"select": select}


class LetterSearch:
    """The pages of a selection: while `next_args` has the arguments of a call, `read`
    gets its reply.
    """

    def __init__(
        self, group: str, saved: str | None, options: LetterOptions, *, bodies: bool
    ) -> None:
        """Raises LocalProtocolError where a selection is both named and given."""
        chosen = selection_args(saved, options)
        self._args: dict[str, object] = {"group": group, "limit": PAGE, "bodies": bodies, **chosen}
        self._over = False

    def next_args(self) -> dict[str, object] | None:
        """Return the arguments of the next call of dlq.list, or None at the end."""
        return None if self._over else self._args

    def read(self, reply: Mapping[str, Any]) -> list[DeadLetter]:
        """Return the letters of a page, which may have none and not be the last."""
        self._over = reply["next"] is None
        self._args["cursor"] = reply["next"]
        return [_parse(fields) for fields in reply["letters"]]


def _parse(fields: Mapping[str, Any]) -> DeadLetter:
    known = {name: fields[name] for name in DeadLetter._fields if name in fields}
    body = fields.get("body")
    known |= {
        "body": None if body is None else b64decode(body),
        "damaged": fields.get("damaged", ""),
    }
    return DeadLetter(**known)
