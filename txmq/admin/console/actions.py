"""The table of actions: the control calls that forms of the console make.

Nothing else can be called by a form. A row says which fields of a form become which
arguments, and what is asked before: with `ask`, or where the call has to have a reason,
the first POST shows a form that asks, and the second one acts.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from math import isfinite, nan
from typing import Any, NamedTuple

from txmq.admin.addresses import is_whole_number
from txmq.errors import LocalProtocolError
from txmq.model.letter_filter import parse_filter
from txmq.wire.calls.registry import CALLS

Form = Mapping[str, Sequence[str]]
Parse = Callable[[str], Any]
MATCHING = "matching"  # a field: all letters of the filter, not only those of the page
DANGEROUS = frozenset({
    "topic.grow", "topic.delete", "group.reset", "group.delete", "user.delete", "tx.decide",
    "xa.forget", "dlq.abandon", "retry.skip", "plan.cancel", "plan.abandon", "plan.delete",
    "clock.confirm",
})  # fmt: skip
# they go on where a reply ends, until there is no `next`
CONTINUED = {
    "dlq.replay", "dlq.abandon", "dlq.redrive", "retry.now", "retry.bury", "retry.skip",
}  # fmt: skip


class WrongForm(LocalProtocolError):
    """A form has a field that it should not have, or a wrong value."""

    advice = "load the page again, and send its form"


class Action(NamedTuple):
    """A call, the fields of its form, and what is asked before.

    `title` is what people read: its first word is a verb. `has_reason` and `must_say`:
    whether the call keeps a reason, and refuses an empty one. `danger`: it takes away
    what cannot be had again, or moves keys for good, and its buttons look so.
    """

    call: str
    title: str
    fields: Mapping[str, Parse]
    ask: str = ""
    makes: Callable[[dict[str, Any], int], dict[str, Any]] | None = None

    @property
    def danger(self) -> bool:
        return self.call in DANGEROUS

    @property
    def has_reason(self) -> bool:
        return "reason" in CALLS[self.call].model_fields

    @property
    def must_say(self) -> bool:
        return self.has_reason and CALLS[self.call].model_fields["reason"].is_required()

    @property
    def has_operator(self) -> bool:
        return "operator" in CALLS[self.call].model_fields

    def arguments(self, form: Form, now: int) -> dict[str, Any]:
        """Return the arguments in a form; empty fields are left out. Raises WrongForm,
        and InvalidFilter.
        """
        found: dict[str, Any] = {}
        for name, values in form.items():
            parse = self.fields.get(name)
            if parse is None:
                raise WrongForm(f"{self.call} has no field {name[:64]!r}")
            if parse is place:
                found[name] = [place(value) for value in values]
            elif len(values) > 1:
                raise WrongForm(f"the field {name!r} is there {len(values)} times")
            elif values[0].strip() or parse in (body, str):  # empty ones say something
                try:
                    found[name] = parse(values[0])
                except ValueError as error:
                    raise WrongForm(f"{name}: {error}", hint="correct the field") from None
        return found if self.makes is None else self.makes(found, now)


def text(value: str) -> str:
    """Return a text without spaces around it."""
    return value.strip()


def number(value: str) -> int:
    """Return a whole number."""
    if not is_whole_number(value):
        raise ValueError(f"{value[:64]!r} is not a whole number")
    return int(value)


def decimal(value: str) -> float:
    """Return a number, which may have a fraction."""
    try:
        found = float(value)
    except ValueError:
        found = nan
    if not isfinite(found):
        raise ValueError(f"{value[:64]!r} is not a number")
    return found


def flag(value: str) -> bool:
    """Return the value of a check box."""
    return value not in ("", "no", "false")


def names(value: str) -> list[str]:
    """Return names that are separated by commas or spaces."""
    return value.replace(",", " ").split()


def body(value: str) -> str:
    """Return a body in base64; browsers send line breaks as CR LF."""
    return b64encode(value.replace("\r\n", "\n").encode()).decode()


def headers(value: str) -> dict[str, str]:
    """Return headers, one in a line as `name: value`."""
    found: dict[str, str] = {}
    for line in value.replace("\r\n", "\n").split("\n"):
        if line.strip():
            name, colon, rest = line.partition(":")
            if not colon or name.strip() in found:
                raise ValueError(f"{line[:64]!r} is no header: use `name: value`, each name once")
            found[name.strip()] = rest.strip()
    return found


def place(value: str) -> list[Any]:
    """Return a message's place, topic/partition/offset."""
    parts = value.split("/")
    if len(parts) != 3:
        raise WrongForm(f"{value[:64]!r} is no place of a message: use topic/partition/offset")
    try:
        return [parts[0], number(parts[1]), number(parts[2])]
    except ValueError as error:
        raise WrongForm(f"{value[:64]!r}: {error}") from None


def position(value: str) -> object:
    """Return where a group is reset to: first, last, or a time in microseconds."""
    if value in ("first", "last"):
        return value
    return int(value) if is_whole_number(value.removeprefix("-")) else value


def _selected(found: dict[str, Any], now: int) -> dict[str, Any]:
    """Replace a filter by what it selects, where all letters of it are meant."""
    written, matching = found.pop("filter", ""), found.pop(MATCHING, False)
    if matching and "saved" not in found:
        found["select"] = parse_filter(written, now).select
        found.pop("letters", None)
    if not (matching or found.get("letters")):
        raise WrongForm("no letters are chosen", hint="choose some, or all that match")
    return found


def _created(found: dict[str, Any], now: int) -> dict[str, Any]:
    """Return the arguments of a plan or a policy: a selection, and settings."""
    written = found.pop("filter", "")
    if "saved" not in found:
        found["select"] = parse_filter(written, now).select
    settings = {name: found.pop(name) for name in SETTINGS if name in found}
    return found | {"settings": settings}


def _saved(found: dict[str, Any], now: int) -> dict[str, Any]:
    written = found.pop("filter", None)
    return found if written is None else found | {"select": parse_filter(written, now).select}


def _reset(found: dict[str, Any], now: int) -> dict[str, Any]:
    """Return the arguments of a reset, where one partition has an offset."""
    del now
    partition, offset = found.pop("partition", None), found.pop("offset", None)
    return found if offset is None else found | {"to": {partition or 0: offset}}


SETTINGS: dict[str, Parse] = {
    **dict.fromkeys(("rate", "ramp_s", "stop_share"), decimal),
    **dict.fromkeys(("canary", "stop_after", "in_flight", "most"), number),
    **dict.fromkeys(("pause", "second_approver", "start"), flag),
}
GROUP: dict[str, Parse] = {"group": text}
TOPIC: dict[str, Parse] = {"name": text}
SELECTION: dict[str, Parse] = {"filter": text, "saved": text}
LETTERS: dict[str, Parse] = {
    **GROUP, **SELECTION, MATCHING: flag, "letters": place, "cursor": text
}  # fmt: skip
LETTER: dict[str, Parse] = {**GROUP, "topic": text, "partition": number, "offset": number}
TOPIC_SETTINGS: dict[str, Parse] = {
    **dict.fromkeys(("retention_ms", "retention_bytes", "letters_ms", "message_bytes"), number),
    "policy": text,
    **dict.fromkeys(("writable", "readable"), flag),
    "note": str,
}
QUOTA: dict[str, Parse] = dict.fromkeys(
    ("bytes_per_s", "requests_per_s", "topics", "undecided", "connections"), number
)
GRANT: dict[str, Parse] = {"name": text, "what": text, "resource": text}


def _plan(verb: str, title: str, ask: str = "") -> Action:
    return Action(f"plan.{verb}", title, {"name": text}, ask)


ROWS = (
    Action("topic.create", "Create the topic", {**TOPIC, "partitions": number, **TOPIC_SETTINGS}),
    Action("topic.alter", "Change the topic's settings", {**TOPIC, **TOPIC_SETTINGS}),
    Action(
        "topic.grow",
        "Add partitions",
        {**TOPIC, "partitions": number},
        "Messages of a key go to other partitions from then on. Partitions cannot be removed.",
    ),
    Action(
        "topic.delete",
        "Delete the topic",
        TOPIC,
        "All its messages are lost. This cannot be undone.",
    ),
    Action("group.pause", "Pause deliveries", {**GROUP, "topic": text}),
    Action("group.resume", "Resume deliveries", {**GROUP, "topic": text}),
    Action(
        "group.reset",
        "Reset the group's position",
        {
            **GROUP, "topic": text, "to": position, "reprocess": flag, "dry_run": flag,
            "partition": number, "offset": number,
        },
        "Messages are delivered again, or left out.",
        _reset,
    ),
    Action("group.clone", "Copy the group's position", {**GROUP, "to": text}),
    Action(
        "group.delete",
        "Delete the group",
        GROUP,
        "Its positions and dead letters are lost. This cannot be undone.",
    ),
    Action("user.set", "Change the user's roles", {"name": text, "roles": names}),
    Action("user.quota", "Change the user's quota", {"name": text, **QUOTA}),
    Action("user.delete", "Delete the user", TOPIC, "The user's connections end."),
    Action("acl.grant", "Grant", GRANT),
    Action("acl.revoke", "Revoke", GRANT, "Open connections lose it, too."),
    Action(
        "tx.decide",
        "Decide by hand",
        {"token": text, "outcome": text, "force": flag},
        "The decision is final. With force it may contradict the database's.",
    ),
    Action("tx.check", "Check back now", {"token": text}),
    Action(
        "xa.forget",
        "Forget heuristic decisions",
        {"token": text},
        "Do this when the data of all databases are as they should be.",
    ),
    Action("dlq.replay", "Replay", LETTERS, makes=_selected),
    Action(
        "dlq.abandon",
        "Abandon",
        LETTERS,
        "The letters are closed for good, and are not delivered again. "
        "What is parked behind them is delivered.",
        _selected,
    ),
    Action("retry.now", "Retry now", LETTERS, makes=_selected),
    Action(
        "retry.bury",
        "Bury",
        LETTERS,
        "The messages have no further attempt: they are dead letters, to be replayed or "
        "abandoned later.",
        _selected,
    ),
    Action(
        "retry.skip",
        "Skip",
        LETTERS,
        "The messages are closed for good, and are not delivered again. "
        "What is parked behind them is delivered.",
        _selected,
    ),
    Action(
        "dlq.redrive",
        "Copy",
        {**LETTERS, "to": text, "to_group": text, "abandon": flag, "again": flag},
        "The letters are published again, to a topic or for another group.",
        _selected,
    ),
    Action(
        "dlq.edit",
        "Edit the message",
        {**LETTER, "edits": number, "body": body, "headers": headers, "revert": flag},
        "The message is delivered with the new version; what was published is kept.",
    ),
    Action("dlq.try", "Try once", {**LETTER, "member": text}),
    Action("dlq.note", "Save the note", {**GROUP, "fingerprint": text, "text": str}),
    Action("dlq.save", "Save the filter", {"name": text, "filter": str}, makes=_saved),
    Action(
        "plan.create", "Make a replay plan", {"name": text, **GROUP, **SELECTION, **SETTINGS},
        makes=_created,
    ),
    _plan("freeze", "Complete the plan", "No more letters can be added to it."),
    _plan("approve", "Approve the plan"),
    _plan("start", "Start the plan"),
    _plan("pause", "Pause the plan"),
    _plan("resume", "Resume the plan"),
    _plan("cancel", "Cancel the plan", "Letters that are not put back stay dead. It cannot go on."),
    _plan(
        "abandon",
        "Abandon the letters of the plan",
        "All its letters are closed for good, and are not delivered again.",
    ),
    _plan("delete", "Delete the plan", "The outcomes of its letters are forgotten."),
    Action(
        "policy.set",
        "Set the policy",
        {
            **GROUP, **SELECTION, **SETTINGS, "after_s": decimal, "on_version": flag,
            "max_replays": number,
        },
        "The broker replays such letters by itself. Without an age and a version, it never does.",
        _created,
    ),
    Action(
        "cluster.step_down",
        "Step down",
        {"force": flag},
        "This node drains, another one leads, and has the console; this one follows it.",
    ),
    Action(
        "clock.confirm",
        "Confirm the clock",
        {"force": flag},
        "What waits for certainty about the time, such as retention, goes on.",
    ),
)  # fmt: skip
ACTIONS = {row.call: row for row in ROWS}
