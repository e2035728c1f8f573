"""What everybody outside the broker saw: the evidence for the verdict. Times of seeing
matter, so some checks are made at once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True)
class History:
    """Bodies are unique texts: `name` of a plain send, `token-n` of a transaction's,
    prefixed with key and version.
    """

    attempted: set[str] = field(default_factory=set)
    acknowledged: dict[str, tuple[int, int] | None] = field(
        default_factory=dict
    )  # body → partition, offset (None: no offset yet)
    dead_tokens: set[bytes] = field(default_factory=set)  # rolled back for certain
    groups: dict[bytes, list[str]] = field(default_factory=dict)  # token → its bodies
    decided: set[bytes] = field(
        default_factory=set
    )  # local groups and jobs' winners whose commit was acknowledged
    places: dict[tuple[int, int], str] = field(
        default_factory=dict
    )  # partition, offset → body, for ever
    processed: dict[str, list[int]] = field(
        default_factory=dict
    )  # ordered group: key → versions as they first succeeded
    stored: dict[bytes, float] = field(
        default_factory=dict
    )  # token → when its group was known to be stored
    started: dict[str, float] = field(
        default_factory=dict
    )  # body of a plain send → when it was first sent, or due
    handled: Counter[str] = field(
        default_factory=Counter
    )  # body, in the ordered group with o: before it → successes
    due: dict[str, int] = field(default_factory=dict)  # body → before this nobody may see it
    waited: set[str] = field(default_factory=set)  # of those: stored before their time
    recalled: set[str] = field(default_factory=set)  # taken back, and that was acknowledged
    again: dict[str, int] = field(
        default_factory=dict
    )  # as in `handled` → successes before a reset asked for more
    counts: Counter[str] = field(default_factory=Counter)

    def seen(self, partition: int, offset: int, body: str) -> None:
        """A message was read or delivered."""
        self.counts["seen"] += 1
        first = self.places.setdefault((partition, offset), body)
        if first != body:
            raise Broken(f"{partition}/{offset} was {first} and is {body}")
        if body not in self.attempted:
            raise Broken(f"{body} was never sent")

    def succeeded(self, key: str, version: int) -> None:
        """The ordered group's handler has processed a version of a key, perhaps not for
        the first time.
        """
        done = self.processed.setdefault(key, [])
        if version in done:
            self.counts["processed again"] += 1
            return
        if version != len(done) + 1:
            raise Broken(f"version {version} of {key} was processed after {done[-3:]}")
        done.append(version)
