"""The life of messages in the order of time, from the parts that a broker tells.

What has no time of its own, such as that a group has processed a message, comes last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from txmq.model.causation import CAUSATION
from txmq.model.tracebacks import last_line

Fields = Mapping[str, Any]
MAX_INDENT = 20  # steps of a sequence
FILTERED = "passed over by the filter (tags, selector) of a member"


class LifeEvent(NamedTuple):
    """Something that happened to a message; `at` None = before now."""

    at: int | None
    message: str
    what: str
    who: str = ""
    text: str = ""


def events_of(traced: Sequence[Fields]) -> list[LifeEvent]:
    """Return the events of all messages, merged by time."""
    found = [event for message in traced for event in _of_message(message)]
    return sorted(found, key=lambda event: (event.at is None, event.at or 0))


def name_of(message: Fields) -> str:
    """Return how a message is called: its place, or its id where it has none."""
    if message.get("offset") is None:
        return str(message["message_id"])
    return f"{message['topic']}/{message['partition']}/{message['offset']}"


class SequenceStep(NamedTuple):
    """A message in the sequence of what follows from what: `depth` is the number of
    its causes that are in the sequence, too.
    """

    at: int | None
    depth: int
    name: str
    topic: str
    key: str
    state: str

    @property
    def indent(self) -> str:
        """The beginning of its line, which puts its name behind that of its cause."""
        return "  " * min(self.depth, MAX_INDENT) + ("└ " if self.depth else "")


def sequence_of(traced: Sequence[Fields]) -> list[SequenceStep]:
    """Return messages in the order of their storage, each behind its cause."""
    ids = {str(message["message_id"]) for message in traced}
    effects: dict[str, list[Fields]] = {}
    for message in traced:
        cause = str(message.get("headers", {}).get(CAUSATION, ""))
        effects.setdefault(cause if cause in ids else "", []).append(message)
    found, seen = list[SequenceStep](), set[str]()
    for first in (*effects.get("", ()), *traced):  # the others only where causes form a circle
        waiting = [(first, 0)]
        while waiting:
            message, depth = waiting.pop()
            name = str(message["message_id"])
            if name not in seen:
                seen.add(name)
                found.append(_step(message, depth))
                waiting += [(effect, depth + 1) for effect in reversed(effects.get(name, ()))]
    return found


def _step(message: Fields, depth: int) -> SequenceStep:
    return SequenceStep(
        message.get("stored_at") or message.get("born_at"),
        depth,
        name_of(message),
        str(message.get("topic") or ""),
        str(message.get("key") or ""),
        str(message["state"]),
    )


def _of_message(message: Fields) -> Iterator[LifeEvent]:
    name, life = name_of(message), message.get("life") or {}
    transaction = message.get("transaction") or life.get("transaction")
    if message.get("born_at"):
        yield LifeEvent(message["born_at"], name, "sent", "", f"id {message['message_id']}")
    if transaction:
        yield from _of_transaction(name, transaction)
    if message.get("due_at"):
        yield LifeEvent(message["due_at"], name, "due")
    if message.get("stored_at") and message.get("offset") is not None:
        yield LifeEvent(message["stored_at"], name, "published", "", name)
    elif message["state"] not in ("published", "undecided"):
        yield LifeEvent(None, name, str(message["state"]))
    for group in life.get("groups", ()):
        yield from _of_group(name, group, life.get("deliveries_known"))
        yield from _of_fence(message, group)
    if "deliveries_known" in life:
        yield from _of_log(name, life["deliveries_known"])
    for entry in message.get("audit", ()):
        yield _of_operator(name, entry)
    for row in message.get("inbox", ()):
        applied = {True: "applied", False: "not applied", None: "unknown"}[row["applied"]]
        text = f"effect of epoch {row['epoch']}: {applied}"
        yield LifeEvent(None, name, "inbox", row["group"], text)


def _of_transaction(name: str, row: Fields) -> Iterator[LifeEvent]:
    token, service = row["token"], row["service"]
    if row["stored_at"]:
        yield LifeEvent(row["stored_at"], name, "half stored", service, f"transaction {token}")
    if row["decided_at"]:
        what = "rolled back" if row["state"] == "ROLLED_BACK" else "committed"
        text = ": ".join(filter(None, (f"transaction {token}", row["reason"])))
        yield LifeEvent(row["decided_at"], name, what, row["by"], text)
    else:
        yield LifeEvent(None, name, row["state"].lower(), "", f"transaction {token}")


def _of_fence(message: Fields, group: Fields) -> Iterator[LifeEvent]:
    """The fence of the key as it is now. Who was through before is not behind it."""
    fence = group.get("fence")
    if not fence:
        return
    head, own = ((one["partition"], one["offset"]) for one in (fence, message))
    if head[0] == own[0] and own[1] is not None and own[1] < head[1]:
        return
    place = f"{message['topic']}/{head[0]}/{head[1]}"
    text = f"since then; now {place} is {fence['state']}, {fence['parked']} parked behind it"
    # what came later was behind it from its own beginning on
    since = max(fence["since"], message.get("stored_at") or 0)
    yield LifeEvent(since, name_of(message), "key fenced", str(group["group"]), text)


def _of_group(name: str, group: Fields, known: Fields | None) -> Iterator[LifeEvent]:
    who = str(group["group"])
    for attempt in group.get("history", ()):
        error = attempt["error_type"] or "no error was given"
        last = last_line(str(attempt["error_text"]))
        named = () if last.startswith(error) else (error,)
        text = ": ".join(filter(None, (f"attempt {attempt['attempt']}", *named, last)))
        by = f"{who}, {attempt['consumer']}" if attempt["consumer"] else who
        yield LifeEvent(attempt["at"], name, "failed", by, text)
    yield from _of_deliveries(name, group)
    if group.get("leased_at") and not _is_told(group, group["leased_at"]):
        by = f"{who}, {group['consumer']}"
        yield LifeEvent(group["leased_at"], name, "delivered", by, f"attempt {group['attempt']}")
    if group.get("dead_at"):
        yield LifeEvent(group["dead_at"], name, "dead letter", who, f"number {group['number']}")
    if group.get("store"):
        at = f"{group['consumer']} on {group['host']}" if group["host"] else group["consumer"]
        text = f"store {group['store']}, attempt {group['attempt']}"
        yield LifeEvent(group["first_failed_at"], name, "at a consumer", f"{who}, {at}", text)
    plan = group.get("plan")
    if plan:
        text = f"plan {plan['plan']}: {plan['outcome']} {plan['why']}".rstrip()
        yield LifeEvent(plan["started_at"], name, "in a plan", who, text)
    for edit in group.get("edits", ()):
        text = f"version {edit['number']}: {edit['reason']}"
        yield LifeEvent(edit["at"], name, "edited", edit["by"], text)
    reason = f": {group['reason']}" if group.get("reason") else ""
    given = f", given by group {group['given_by']}" if group.get("given_by") else ""
    yield LifeEvent(None, name, "state", who, f"{state_of(group, known)}{reason}{given}")


# ends of the last delivery of a settled message, and what they say of it
SETTLED_BY = {
    "processed": "processed",
    "filtered": FILTERED,
    "expired": "expired",
    "acked in a transaction": "processed",
}


def state_of(group: Fields, known: Fields | None) -> str:
    """Return what a group has done with a message. How it was settled, only its
    deliveries in the log tell.
    """
    if group["state"] != "settled":
        return str(group["state"])
    ends = [one["ended"] for one in group.get("deliveries", ())]
    if ends and ends[-1] in SETTLED_BY:
        return SETTLED_BY[ends[-1]]
    if known is not None and known["whole"] and not known["more"] and not ends:
        return "not delivered: the group began behind it, or was reset"
    return "settled: processed, or passed over by a filter, expiry or a reset"


def _of_deliveries(name: str, group: Fields) -> Iterator[LifeEvent]:
    """Yield what the log tells of deliveries. Failures were told with their errors."""
    failed = {attempt["at"] for attempt in group.get("history", ())}
    for one in group.get("deliveries", ()):
        who = f"{group['group']}, {one['consumer']}" if one["consumer"] else str(group["group"])
        text = "" if one["attempt"] is None else f"attempt {one['attempt']}"
        if one["at"] is not None:
            yield LifeEvent(one["at"], name, "delivered", who, text)
        told = one["ended"] == "failed" and one["ended_at"] in failed
        if one["ended"] is not None and not told:
            token = f"transaction {one['token']}" if one.get("token") else ""
            yield LifeEvent(one["ended_at"], name, one["ended"], who, token or text)


def _is_told(group: Fields, at: int) -> bool:
    return any(one["at"] == at for one in group.get("deliveries", ()))


UNKNOWN = "not known: they may not be read"
LOST = "the log before is gone, or damaged: earlier deliveries are not known"
UNREAD = "the log was not read from here on: later deliveries are not known"


def what_is_known(known: Fields | None) -> str:
    """Return a sentence on the deliveries of a message that were found."""
    if known is None:
        return UNKNOWN
    said = [text for wrong, text in ((not known["whole"], LOST), (known["more"], UNREAD)) if wrong]
    return "; ".join(said) or "all, up to now"


def _of_log(name: str, known: Fields | None) -> Iterator[LifeEvent]:
    """Yield what is no longer known, or was not looked for."""
    if known is None:
        yield LifeEvent(None, name, "deliveries", "", UNKNOWN)
        return
    if not known["whole"]:
        yield LifeEvent(known["from_at"], name, "deliveries", "", LOST)
    if known["more"]:
        yield LifeEvent(known["until_at"], name, "deliveries", "", UNREAD)


def _of_operator(name: str, entry: Fields) -> LifeEvent:
    text = ": ".join(filter(None, (str(entry["about"]), str(entry["reason"]))))
    return LifeEvent(entry["at"], name, str(entry["call"]), str(entry["operator"]), text)
