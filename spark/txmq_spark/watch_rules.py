"""What is alarming in a stream of dead letters. Pure: Spark keeps the memory of a group
and hands it on from batch to batch.

- An error is *new* if the group has had no letter with its fingerprint for a while.
- A *flood* is a number of letters within one window of time, told once for each window.

Time is that of the letters' deaths, and each group has its own watermark: what is older
than the group's newest letter by more than a window or the memory is forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from txmq.model.units import DAY, MINUTE

NEW_ERROR, FLOOD = "new-error", "flood"
MAX_TEXT: Final = 1_000  # characters of an error in an alert


class WatchRules(NamedTuple):
    """Limits of alerts; times are microseconds."""

    flood: int = 100  # letters of a window
    window: int = MINUTE
    memory: int = 7 * DAY  # after which a fingerprint is new again


class DeadLetter(NamedTuple):
    """What a rule looks at; in the order in which letters are judged."""

    dead_at: int
    topic: str
    partition: int
    offset: int
    fingerprint: str
    error_type: str
    error_text: str


class Alert(NamedTuple):
    """Something that a person should know: its kind and its fields."""

    kind: str
    fields: dict[str, Any]

    def to_json(self) -> bytes:
        """Return the body of the alert's message."""
        return json.dumps({"alert": self.kind, **self.fields}, ensure_ascii=False).encode()


class GroupMemory:
    """What is remembered of a group: when fingerprints were seen last, and the letters
    of recent windows.
    """

    def __init__(self, group: str, text: str | None = None) -> None:
        """`text` is what `to_text` has returned; None = nothing is known yet."""
        known = json.loads(text) if text else {"seen": {}, "windows": {}}
        self._group = group
        self._seen: dict[str, int] = known["seen"]
        self._windows: dict[int, int] = {int(at): n for at, n in known["windows"].items()}

    def to_text(self) -> str:
        """Return the memory as text."""
        windows = {str(at): n for at, n in sorted(self._windows.items())}
        return json.dumps({"seen": dict(sorted(self._seen.items())), "windows": windows})

    def judge(self, letters: Iterable[DeadLetter], rules: WatchRules) -> list[Alert]:
        """Return the alerts of a batch of letters, whatever their order."""
        alerts = []
        for letter in sorted(letters):
            last = self._seen.get(letter.fingerprint)
            if last is None or letter.dead_at - last > rules.memory:
                alerts.append(self._alert(NEW_ERROR, letter, {}))
            self._seen[letter.fingerprint] = max(last or 0, letter.dead_at)
            begun = letter.dead_at - letter.dead_at % rules.window
            self._windows[begun] = self._windows.get(begun, 0) + 1
            if self._windows[begun] == rules.flood:
                window = {"letters": rules.flood, "from": begun, "until": begun + rules.window}
                alerts.append(self._alert(FLOOD, letter, window))
        self._forget(rules)
        return alerts

    def _alert(self, kind: str, letter: DeadLetter, more: dict[str, Any]) -> Alert:
        fields = letter._asdict() | {"error_text": letter.error_text[:MAX_TEXT]}
        return Alert(kind, {"group": self._group, **fields, **more})

    def _forget(self, rules: WatchRules) -> None:
        newest = max(self._seen.values(), default=0)
        self._seen = {one: at for one, at in self._seen.items() if newest - at <= rules.memory}
        self._windows = {
            at: n for at, n in self._windows.items() if newest - at <= 2 * rules.window
        }
