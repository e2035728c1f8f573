"""Rules for alerts about a stream of dead letters, and about its share of the log.

They are pure: Spark keeps the memory of a group, and hands it on from batch to batch.

- An error is *new* if the group has had no letter with its fingerprint for a while.
- A *flood* is a number of letters within one window of time, told once for each window.
  Where the log is watched, too, it is also a share of the messages of that window.
- A letter is *old* if it is still open after a while (`old_letters`).

Time is that of the letters' deaths, and each group has its own watermark. Fingerprints
and windows that are too old beside the group's newest letter are forgotten.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Self

from txmq.model.units import DAY, MINUTE
from txmq_spark.plan.rules import LetterClass, PlanRules

NEW_ERROR, FLOOD, OLD = "new-error", "flood", "old"
MAX_TEXT: Final = 1_000  # characters of an error in an alert
# Fingerprints that a group remembers. Texts of users in errors may make each letter a
# new one, and Spark keeps the whole memory of a group for each batch.
MAX_SEEN: Final = 10_000
NUL, REPLACEMENT = "\0", "\N{REPLACEMENT CHARACTER}"  # PostgreSQL's JSON has no NUL
PERCENT: Final = 100


class WatchRules(NamedTuple):
    """Limits of alerts; times are microseconds.

    `share` is the percentage of the messages of a window that must have died in a
    flood; 0 = the log is not watched. `replays` and `deaths` make a letter poison.
    """

    flood: int = 100  # letters of a window
    window: int = MINUTE
    memory: int = 7 * DAY  # after which a fingerprint is new again
    share: int = 0
    age: int = DAY  # after which an open letter is old
    replays: int = PlanRules().replays
    deaths: int = PlanRules().deaths

    def window_start(self, at: int) -> int:
        """Return the start of the window that a time is in."""
        return at - at % self.window


class DeadLetter(NamedTuple):
    """Fields of a letter that rules look at; letters are judged in their order."""

    dead_at: int
    topic: str
    partition: int
    offset: int
    fingerprint: str
    error_type: str
    error_text: str
    key: str = ""
    replays: int = 0
    deaths: int = 0
    parked: int = 0


class Alert(NamedTuple):
    """Something that a person should know: its kind and its fields.

    The field `id` is the same whenever the alert is made again.
    """

    kind: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, kind: str, fields: str) -> Self:
        """Return the alert of a kind and of what `to_fields` has returned."""
        return cls(kind, json.loads(fields))

    def to_fields(self) -> str:
        return json.dumps(self.fields, ensure_ascii=False)

    def to_json(self) -> str:
        """Return the body of the alert's message."""
        return json.dumps({"alert": self.kind, **self.fields}, ensure_ascii=False)


class _Window:
    """The letters and messages of a window so far. `told` = its flood was."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self.classes = Counter[str](known["classes"])
        self.messages: int = known["messages"]
        self.told: bool = known["told"]

    @property
    def letters(self) -> int:
        return self.classes.total()

    def is_flood(self, rules: WatchRules) -> bool:
        """Return True if the window is a flood that was not told yet."""
        enough = self.letters >= rules.flood
        return enough and not self.told and self.letters * PERCENT >= rules.share * self.messages

    def to_json(self) -> dict[str, Any]:
        classes = dict(sorted(self.classes.items()))
        return {"classes": classes, "told": self.told, "messages": self.messages}


class GroupMemory:
    """Memory of a group: when fingerprints were seen last, and the letters of recent
    windows.
    """

    def __init__(self, group: str, text: str | None = None) -> None:
        """`text` is what `to_text` has returned; None = nothing is known yet."""
        known = json.loads(text) if text else {"seen": {}, "windows": {}}
        self._group = group
        self._seen: dict[str, int] = known["seen"]
        self._windows = {int(at): _Window(one) for at, one in known["windows"].items()}

    def to_text(self) -> str:
        """Return the memory as text."""
        windows = {str(at): one.to_json() for at, one in sorted(self._windows.items())}
        return json.dumps({"seen": dict(sorted(self._seen.items())), "windows": windows})

    def judge(
        self,
        letters: Iterable[DeadLetter],
        rules: WatchRules,
        messages: Mapping[int, int] | None = None,
    ) -> list[Alert]:
        """Return the alerts of a batch of letters, whatever their order.

        `messages` has the numbers of messages of the log by the beginnings of their
        windows.
        """
        for begun, count in (messages or {}).items():
            self._window(begun).messages += count
        alerts: list[Alert] = []
        ordered = sorted(letters)
        keys = Counter((one.topic, one.key) for one in ordered if one.key)
        for letter in ordered:
            cls = _class_of(letter, rules, chained=keys[letter.topic, letter.key] > 1)
            alerts += self._judge(letter, cls, rules)
        self._forget(rules)
        return alerts

    def _judge(self, letter: DeadLetter, cls: LetterClass, rules: WatchRules) -> Iterator[Alert]:
        last = self._seen.get(letter.fingerprint)
        if last is None or letter.dead_at - last > rules.memory:
            yield alert_of(NEW_ERROR, self._group, letter, cls)
        self._seen[letter.fingerprint] = max(last or 0, letter.dead_at)
        begun = rules.window_start(letter.dead_at)
        window = self._window(begun)
        window.classes[cls] += 1
        if window.is_flood(rules):
            window.told = True
            found = {"letters": window.letters, "from": begun, "until": begun + rules.window}
            if rules.share:
                found["messages"] = window.messages
            more = found | {"classes": dict(sorted(window.classes.items()))}
            yield alert_of(FLOOD, self._group, letter, cls, more)

    def _window(self, begun: int) -> _Window:
        return self._windows.setdefault(
            begun, _Window({"classes": {}, "told": False, "messages": 0})
        )

    def _forget(self, rules: WatchRules) -> None:
        newest = max(self._seen.values(), default=max(self._windows, default=0))
        seen = sorted(self._seen.items(), key=lambda one: (one[1], one[0]))[-MAX_SEEN:]
        self._seen = {one: at for one, at in seen if newest - at <= rules.memory}
        # Windows that only the log has are later than the newest letter, or empty.
        latest = max(self._windows, default=0)
        self._windows = {
            at: one
            for at, one in self._windows.items()
            if (newest if one.letters else latest) - at <= 2 * rules.window
        }


def old_letters(group: str, listed: Iterable[Mapping[str, Any]], rules: WatchRules) -> list[Alert]:
    """Return the alerts about letters, as the broker lists them, that are too old."""
    letters = [_listed(one) for one in listed]
    return [alert_of(OLD, group, one, _class_of(one, rules, chained=False)) for one in letters]


def _listed(listed: Mapping[str, Any]) -> DeadLetter:
    given = {name: listed[name] for name in DeadLetter._fields if name in listed}
    return DeadLetter(**given | {"key": listed["key"] or "", "parked": listed["parked_behind"]})


def alert_of(
    kind: str,
    group: str,
    letter: DeadLetter,
    cls: LetterClass,
    more: Mapping[str, Any] | None = None,
) -> Alert:
    """Return the alert of a letter. That of a flood is named by its window."""
    fields = letter._asdict() | {"error_text": letter.error_text[:MAX_TEXT]} | {"class": cls}
    place = (*letter[1:4], letter.dead_at) if more is None else (more["from"],)
    name = "/".join(map(str, (kind, group, *place)))
    texts = {
        field: value.replace(NUL, REPLACEMENT)
        for field, value in fields.items()
        if isinstance(value, str)
    }
    return Alert(kind, {"id": name, "group": group, **fields, **texts, **(more or {})})


def _class_of(letter: DeadLetter, rules: WatchRules, *, chained: bool) -> LetterClass:
    """Return the class by what the letter itself tells. `chained`: other letters of its
    key died at about the same time.
    """
    if letter.replays >= rules.replays or letter.deaths >= rules.deaths:
        return LetterClass.POISON
    if chained or letter.parked:
        return LetterClass.REPLAY_CHAIN
    return LetterClass.REPLAY_ALONE
