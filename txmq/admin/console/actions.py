"""The table of actions: the control calls that forms of the console make.

Nothing else can be called by a form.
"""

from __future__ import annotations

from typing import Any

from txmq.admin.console import fields as f
from txmq.admin.console.action import Action, WrongForm
from txmq.admin.console.fields import Parse, decimal, flag, number, text
from txmq.model.access import what_is_wrong
from txmq.model.letter_filter import parse_filter

MATCHING = "matching"  # a field: all letters of the filter, not only those of the page
# they go on where a reply ends, until there is no `next`
CONTINUED = {
    "dlq.replay", "dlq.abandon", "dlq.redrive", "retry.now", "retry.bury", "retry.skip",
}  # fmt: skip


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
    settings = {name: found.pop(name) for name in PLAN if name in found}
    return found | {"settings": settings}


def _saved(found: dict[str, Any], now: int) -> dict[str, Any]:
    written = found.pop("filter", None)
    return found if written is None else found | {"select": parse_filter(written, now).select}


def _reset(found: dict[str, Any], now: int) -> dict[str, Any]:
    """Return the arguments of a reset, where one partition has an offset."""
    del now
    partition, offset = found.pop("partition", None), found.pop("offset", None)
    return found if offset is None else found | {"to": {partition or 0: offset}}


def _altered(found: dict[str, Any], now: int) -> dict[str, Any]:
    """Return the arguments of a change of a group: a retry policy is changed whole."""
    del now
    retry = {name: found.pop(name) for name in RETRY if name in found}
    return found | ({"retry": retry} if retry else {})


def _granted(found: dict[str, Any], now: int) -> dict[str, Any]:
    """Return the arguments of a grant on a kind of resources, and a name."""
    del now
    kind, name = found.pop("kind", ""), found.pop("of", "")
    if kind:
        found["resource"] = kind if kind == "cluster" else f"{kind}:{name}"
    if "what" in found and (wrong := what_is_wrong(found["what"], found.get("resource", ""))):
        raise WrongForm(wrong, hint="correct the form")
    return found


def _user(found: dict[str, Any], now: int) -> dict[str, Any]:
    """Return the arguments of a change of a user, of a password its verifier."""
    del now
    try:
        verifier = f.verifier_of(found)
    except ValueError as error:
        raise WrongForm(f"password: {error}", hint="type it again") from None
    return {name: found[name] for name in USER if name in found} | verifier


PLAN: dict[str, Parse] = {
    **f.parsers(f.PLAN), "most": number, **dict.fromkeys(f.PLAN_FLAGS, flag),
}  # fmt: skip
RETRY = f.parsers(f.RETRY)
USER: dict[str, Parse] = {"name": text, "roles": f.role, "new": flag}
GROUP: dict[str, Parse] = {"group": text}
TOPIC: dict[str, Parse] = {"name": text}
SELECTION: dict[str, Parse] = {"filter": text, "saved": text}
LETTERS: dict[str, Parse] = {
    **GROUP, **SELECTION, MATCHING: flag, "letters": f.place, "cursor": text,
}  # fmt: skip
LETTER: dict[str, Parse] = {**GROUP, "topic": text, "partition": number, "offset": number}
TOPIC_SETTINGS: dict[str, Parse] = {**f.parsers(f.TOPIC_SETTINGS), "policy": text, "note": str}
GRANT: dict[str, Parse] = {"name": text, "what": text, "resource": text, "kind": text, "of": text}


def _plan(verb: str, title: str, ask: str = "", does: str = "", leads: str = "") -> Action:
    return Action(f"plan.{verb}", title, {"name": text}, ask, does=does, leads=leads)


ROWS = (
    Action(
        "topic.create",
        "Create the topic",
        {**TOPIC, "partitions": number, **TOPIC_SETTINGS},
        does="The topic takes messages at once.",
        leads="topics/{name}",
    ),
    Action(
        "topic.alter",
        "Change the topic's settings",
        {**TOPIC, **TOPIC_SETTINGS},
        does="An empty field leaves the setting as it is; default takes the broker's.",
    ),
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
        leads="topics",
    ),
    Action(
        "group.pause",
        "Pause deliveries",
        {**GROUP, "topic": text},
        does="Nothing more is delivered until it is resumed; what members have they finish.",
    ),
    Action(
        "group.resume",
        "Resume deliveries",
        {**GROUP, "topic": text},
        does="Deliveries go on where they stopped.",
    ),
    Action(
        "group.alter",
        "Change the group's settings",
        {**GROUP, **RETRY, **f.parsers(f.FAILURES, f.LIMITS)},
        makes=_altered,
        does="What is set here overrides what members ask for. A field that is left grey stays "
        "as it is.",
    ),
    Action(
        "group.reset",
        "Reset the group's position",
        {
            **GROUP, "topic": text, "to": f.position, "reprocess": flag, "dry_run": flag,
            "partition": number, "offset": number,
        },
        "Messages are delivered again, or left out.",
        _reset,
    ),
    Action(
        "group.clone",
        "Copy the group's position",
        {**GROUP, "to": text},
        does="A new group begins where this one is.",
        leads="groups/{to}",
    ),
    Action(
        "group.delete",
        "Delete the group",
        GROUP,
        "Its positions and dead letters are lost. This cannot be undone.",
        leads="groups",
    ),
    Action(
        "user.set",
        "Save the user",
        {**USER, **f.parsers(f.PASSWORD)},
        makes=_user,
        does="It holds from the next request on. Connections that are logged in stay.",
        leads="users/{name}",
    ),
    Action(
        "user.quota",
        "Change the user's quota",
        {"name": text, **f.parsers(f.QUOTA)},
        does="0 = no limit; an empty field leaves a limit as it is.",
    ),
    Action("user.delete", "Delete the user", TOPIC, "The user's connections end.", leads="users"),
    Action("token.revoke", "Revoke the token", {"name": text, "token": text},
           "Programs that use it are refused at once."),
    Action("acl.grant", "Grant", GRANT, makes=_granted,
           does="A name with * at its end stands for all that begin so."),
    Action("acl.revoke", "Revoke", GRANT, "Open connections lose it, too."),
    Action(
        "tx.decide",
        "Decide by hand",
        {"token": text, "outcome": text, "force": flag},
        "The decision is final. With force it may contradict the database's.",
    ),
    Action(
        "tx.check",
        "Check back now",
        {"token": text},
        does="Whoever decides is asked at once, not only at the next check-back.",
    ),
    Action(
        "xa.forget",
        "Forget heuristic decisions",
        {"token": text},
        "Do this when the data of all databases are as they should be.",
    ),
    Action(
        "dlq.replay",
        "Replay",
        LETTERS,
        makes=_selected,
        does="The group gets the message again, with all its retries; what is parked behind it "
        "follows.",
    ),
    Action(
        "dlq.abandon",
        "Abandon",
        LETTERS,
        "The letters are closed for good, and are not delivered again. "
        "What is parked behind them is delivered.",
        _selected,
    ),
    Action(
        "retry.now",
        "Retry now",
        LETTERS,
        makes=_selected,
        does="The next attempt is made at once, not only after its delay.",
    ),
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
        {
            **LETTER,
            "edits": number,
            "body": f.body,
            "headers": f.headers,
            "revert": flag,
            "any_format": flag,
        },
        "The message is delivered with the new version; what was published is kept.",
        leads="letters/{group}/{topic}/{partition}/{offset}",
    ),
    Action(
        "dlq.try",
        "Try once",
        {**LETTER, "member": text},
        does="One member gets it, once: it is processed, or a dead letter again.",
    ),
    Action(
        "dlq.note",
        "Save the note",
        {**GROUP, "fingerprint": text, "text": str},
        does="The note stands beside all letters of this error; an empty one removes it.",
    ),
    Action(
        "dlq.save",
        "Save the filter",
        {"name": text, "filter": str},
        makes=_saved,
        does="The filter is kept by its name, for the command line too; an empty one is removed.",
    ),
    Action(
        "plan.create",
        "Make a replay plan",
        {"name": text, **GROUP, **SELECTION, **PLAN},
        makes=_created,
        does="Nothing is delivered before the plan is started, unless it starts by itself.",
        leads="plans/{name}",
    ),
    _plan("freeze", "Complete the plan", "No more letters can be added to it."),
    _plan("approve", "Approve the plan", does="The plan may be started."),
    _plan(
        "start",
        "Start the plan",
        does="Its letters are delivered to the group again: the canary first, then all at the "
        "plan's rate.",
    ),
    _plan("pause", "Pause the plan", does="No further letter is put back until it is resumed."),
    _plan("resume", "Resume the plan", does="The plan goes on where it paused."),
    _plan(
        "cancel",
        "Cancel the plan",
        "The plan ends: letters that are not put back stay open dead letters, those that are "
        "go on. It cannot go on.",
    ),
    _plan(
        "abandon",
        "Abandon the letters of the plan",
        "All its letters are closed for good, and are not delivered again. "
        "What is parked behind them is delivered.",
    ),
    _plan("delete", "Delete the plan", "The outcomes of its letters are forgotten.",
          leads="plans"),
    Action(
        "policy.set",
        "Set the policy",
        {
            **GROUP, **SELECTION, **PLAN, "after_s": decimal, "on_version": flag,
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
