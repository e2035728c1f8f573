"""The observations of all clients: the evidence for the checks of invariants.

Some checks are made with an observation, because its time matters.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


class InvariantBroken(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True)
class SimulationHistory:
    """The sends of clients, and all that they saw of them.

    Bodies are unique texts: `key|version|name` of a plain send, `key|version|token-n`
    of a transaction. Times are seconds of the simulated clock, those of `due_at` are
    microseconds.
    """

    attempted: set[str] = field(default_factory=set)
    # body → partition and offset of its receipt; None = the receipt had no offset yet
    acknowledged: dict[str, tuple[int, int] | None] = field(default_factory=dict)
    rolled_back: set[bytes] = field(default_factory=set)  # tokens, for certain
    bundles: dict[bytes, list[str]] = field(default_factory=dict)  # token → its bodies
    # broker-local bundles and winners of jobs whose commit was acknowledged
    committed: set[bytes] = field(default_factory=set)
    # partition, offset → the body that was first seen there
    bodies_at: dict[tuple[int, int], str] = field(default_factory=dict)
    # ordered group: key → versions in the order of their first success
    processed_versions: dict[str, list[int]] = field(default_factory=dict)
    # group, key and partition → offsets in the order of their first success
    processed_offsets: dict[tuple[str, str, int], list[int]] = field(default_factory=dict)
    # group, key and partition → offset of the latest success, first or not
    last_processed: dict[tuple[str, str, int], int] = field(default_factory=dict)
    # token → when the receipt of its bundle arrived
    stored_at: dict[bytes, float] = field(default_factory=dict)
    # body of a plain send → when it was first sent, or due
    sent_at: dict[str, float] = field(default_factory=dict)
    # body, with the prefix `o:` for the ordered group → successes
    handled: Counter[str] = field(default_factory=Counter)
    due_at: dict[str, int] = field(default_factory=dict)  # body → not visible before
    delayed: set[str] = field(default_factory=set)  # of those: stored before they were due
    recalled: set[str] = field(default_factory=set)  # bodies with an acknowledged recall
    # as in `handled` → successes before a reset asked for more
    times_before_reset: dict[str, int] = field(default_factory=dict)
    # group, partition, offset → bodies by the number of the edit, 0 = the published one
    edits: dict[tuple[str, int, int], list[str]] = field(default_factory=dict)
    # as in `edits` → number of the newest edit that is known to be there
    edited: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    # group, topic, partition, offset, number of the death → its copy was reported
    copies: dict[tuple[str, str, int, int, int], bool] = field(default_factory=dict)
    # operators' calls by their reasons → their replies said that something was changed
    operations: dict[str, bool] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def record_seen(self, partition: int, offset: int, body: str) -> None:
        """Note a message that was read or delivered."""
        self.counts["seen"] += 1
        first = self.bodies_at.setdefault((partition, offset), body)
        if first != body:
            raise InvariantBroken(f"{partition}/{offset} was {first} and is {body}")
        if body not in self.attempted:
            raise InvariantBroken(f"{body} was never sent")

    def record_processed(self, key: str, version: int) -> None:
        """Note a version that the ordered group has processed, perhaps once more."""
        done = self.processed_versions.setdefault(key, [])
        if version in done:
            self.counts["processed again"] += 1
            return
        if version != len(done) + 1:
            raise InvariantBroken(f"version {version} of {key} was processed after {done[-3:]}")
        done.append(version)

    def record_in_order(self, group: str, key: str, partition: int, offset: int) -> None:
        """Note a message that an ordered group has processed, perhaps once more.

        What is processed once more is followed by all that was processed after it.
        """
        done = self.processed_offsets.setdefault((group, key, partition), [])
        last = self.last_processed.get((group, key, partition), -1)
        self.last_processed[group, key, partition] = offset
        if skipped := [other for other in done if last < other < offset]:
            raise InvariantBroken(
                f"{partition}/{offset} of key {key} was processed by {group} after {last}, "
                f"without {skipped[:3]}, which were processed before"
            )
        if offset in done:
            self.counts["processed again"] += 1
            return
        if done and offset < done[-1]:
            raise InvariantBroken(
                f"{partition}/{offset} of key {key} was processed by {group} after {done[-3:]}"
            )
        done.append(offset)
