"""Replay plans as plain objects: their states, their settings and their counts.

A plan is small: its letters are rows of table `plan_letters` (`plan_letters`).
`PlanRegistry.save` writes the plans that have changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from txmq.store import tables as t

COUNTERS_KEY = t.PLAN_KEY.pack(0)
UNSWEPT_AT = 19  # in a plan's row
CANARY_IS_THROUGH = "the canary is through"  # why a plan is paused, as it was told to be


class PlanState(IntEnum):
    """State of a plan; the numbers are on disk."""

    BUILDING = 1  # letters are being added
    PLANNED = 2  # frozen; waits to be approved and started
    CANARY = 3  # the first letters are put back and watched
    RAMPING = 4  # the others follow, at a rate
    PAUSED = 5
    DONE = 6  # each letter has its outcome
    CANCELLED = 7
    DELETED = 8  # rows of its letters are still to be removed
    ABANDONING = 9  # its letters are abandoned, one after the other


class LetterOutcome(IntEnum):
    """Outcome of a letter of a plan; the numbers are on disk."""

    PLANNED = 1  # nothing yet
    DELIVERED = 2  # put back, and not ended yet
    PROCESSED = 3
    DIED_AGAIN = 4
    SKIPPED = 5  # not put back: `why` says the reason
    ENDED = 6  # put back or abandoned by the plan, not processed: `why` says how


RUNNING = (PlanState.CANARY, PlanState.RAMPING)
FINISHED = (PlanState.DONE, PlanState.CANCELLED)
# which a plan may go to; a deleted one goes nowhere
TRANSITIONS: dict[PlanState, frozenset[PlanState]] = {
    PlanState.BUILDING: frozenset((PlanState.PLANNED, PlanState.CANCELLED)),
    PlanState.PLANNED: frozenset(
        (PlanState.CANARY, PlanState.RAMPING, PlanState.ABANDONING, PlanState.CANCELLED)
    ),
    PlanState.ABANDONING: frozenset((PlanState.DONE, PlanState.CANCELLED)),
    PlanState.CANARY: frozenset(
        (PlanState.RAMPING, PlanState.PAUSED, PlanState.DONE, PlanState.CANCELLED)
    ),
    PlanState.RAMPING: frozenset((PlanState.PAUSED, PlanState.DONE, PlanState.CANCELLED)),
    PlanState.PAUSED: frozenset((PlanState.CANARY, PlanState.RAMPING, PlanState.CANCELLED)),
    PlanState.DONE: frozenset((PlanState.DELETED,)),
    PlanState.CANCELLED: frozenset((PlanState.DELETED,)),
    PlanState.DELETED: frozenset(),
}


class PlanSettings(NamedTuple):
    """Settings by which a plan puts its letters back.

    `rate` is in letters per second (0 = as fast as the broker can), reached after
    `ramp_s` seconds. The first `canary` letters are watched; with `pause` the plan
    pauses behind them. It also does if more than the share `stop_share` of the last
    `stop_after` outcomes (0 = no rule) failed again with one fingerprint. At most
    `in_flight` letters (0 = any number) are put back without an outcome.
    `second_approver`: somebody else than the author has to approve it. `start`: it
    starts as soon as it may. `most` bounds the letters of its manifest (0 = no bound).
    """

    rate: float = 100.0
    ramp_s: float = 60.0
    canary: int = 0
    pause: bool = False
    stop_share: float = 0.5
    stop_after: int = 20
    in_flight: int = 1_000
    second_approver: bool = False
    start: bool = False
    most: int = 0


@dataclass(slots=True)
class Plan:
    """A replay plan of a group.

    `selection` is JSON that the broker has checked; "" = a client adds the letters.
    `scan` is where its search goes on; `complete`: no more letters will be added.
    `cursor` is behind the last letter that was put back, abandoned or skipped. `recent`
    are the last outcomes and first failures: fingerprints, "" = processed.
    `abandoned` is the key of the last letter that the cursor has abandoned for a
    `reason`, and `swept` that of the last one whose row says so.
    """

    plan_id: int
    name: str
    group_id: int
    group: str
    settings: PlanSettings
    selection: str
    by: str
    made_at: int
    state: PlanState = PlanState.BUILDING
    why: str = ""  # it is paused or cancelled, or its letters are abandoned
    resume_to: PlanState = PlanState.RAMPING
    approved_by: str = ""
    changed_at: int = 0  # its state
    started_at: int = 0
    digest: str = ""  # of the manifest, once it is frozen
    scan: str = ""
    complete: bool = False
    cursor: bytes = b""
    counts: dict[int, int] = field(default_factory=dict)  # letters by outcome
    recent: tuple[str, ...] = ()
    # processed letters that are not swept, by chunk: topic id, partition, number
    unswept: dict[tuple[int, int, int], int] = field(default_factory=dict)
    abandoned: bytes = b""
    swept: bytes = b""
    reason: str = ""

    @property
    def letters(self) -> int:
        """Number of letters of the manifest."""
        return sum(self.counts.values())

    def count(self, outcome: LetterOutcome) -> int:
        """Return the number of letters with an outcome."""
        return self.counts.get(outcome, 0)

    @property
    def put_back(self) -> int:
        """Number of letters that were put back."""
        return self.letters - self.count(LetterOutcome.PLANNED) - self.count(LetterOutcome.SKIPPED)

    @property
    def unfinished(self) -> bool:
        """True while the plan may put letters back."""
        return self.state not in FINISHED and self.state is not PlanState.DELETED

    @property
    def abandons(self) -> bool:
        """True if its cursor abandons letters: it was never started."""
        return not self.started_at

    @property
    def waits_for_approval(self) -> bool:
        """True if somebody has to approve it before it may start."""
        return self.settings.second_approver and not self.approved_by

    @property
    def has_unswept(self) -> bool:
        """True if rows of letters that are processed or abandoned do not say so."""
        return bool(self.unswept) or self.swept < self.abandoned

    def to_row(self) -> t.Row:
        return (
            self.name,
            self.group_id,
            self.group,
            tuple(self.settings),
            self.selection,
            self.by,
            self.made_at,
            self.state,
            self.why,
            self.resume_to,
            self.approved_by,
            self.changed_at,
            self.started_at,
            self.digest,
            self.scan,
            self.complete,
            self.cursor,
            tuple(sorted(self.counts.items())),
            self.recent,
            bool(self.unswept),
            self.abandoned,
            self.swept,
            self.reason,
        )

    @classmethod
    def from_row(cls, plan_id: int, row: Any) -> Plan:  # noqa: ANN401  # rows are untyped
        name, group_id, group, settings, selection, by, made_at, state, why, *rest = row
        resume_to, approved_by, changed_at, started_at, digest, scan, *rest = rest
        complete, cursor, counts, recent, _unswept, *abandoned = rest
        plan = cls(
            plan_id, name, group_id, group, PlanSettings(*settings), selection, by, made_at,
            PlanState(state), why, PlanState(resume_to), approved_by, changed_at, started_at,
            digest, scan, complete, cursor, dict(counts), tuple(recent),
        )  # fmt: skip
        plan.abandoned, plan.swept, plan.reason = abandoned
        return plan


@dataclass(slots=True)
class PlanRegistry:
    """All plans. `by_name` has those that are not deleted, `active` those with work, or
    that wait for an operator.
    """

    by_id: dict[int, Plan] = field(default_factory=dict)
    by_name: dict[str, Plan] = field(default_factory=dict)
    active: dict[int, Plan] = field(default_factory=dict)
    next_id: int = 1
    dirty: set[int] = field(default_factory=set, compare=False)

    def add(self, plan: Plan) -> None:
        """Apply: add a new plan."""
        self.by_id[plan.plan_id] = self.by_name[plan.name] = plan
        self.active[plan.plan_id] = plan
        self.next_id = max(self.next_id, plan.plan_id + 1)
        self.dirty.add(plan.plan_id)

    def set_state(self, plan: Plan, state: PlanState) -> None:
        """Apply: a plan goes to another state."""
        assert state in TRANSITIONS[plan.state], f"a plan went from {plan.state} to {state}"
        plan.state = state
        if state in FINISHED:
            self.active.pop(plan.plan_id, None)
        else:
            self.active[plan.plan_id] = plan
        if state is PlanState.DELETED:
            del self.by_name[plan.name]
        self.dirty.add(plan.plan_id)

    def remove(self, plan: Plan) -> None:
        """Apply: the last row of a deleted plan is removed."""
        del self.by_id[plan.plan_id], self.active[plan.plan_id]
        self.dirty.add(plan.plan_id)

    def cancel_of_group(self, group_id: int, at: int) -> None:
        """Apply: a group is deleted, and its plans end."""
        for plan in list(self.active.values()):
            if plan.group_id == group_id and plan.unfinished:
                plan.why, plan.changed_at = "its group was deleted", at
                self.set_state(plan, PlanState.CANCELLED)

    def save(self, tables: t.Tables | dict[str, t.Table]) -> None:
        """Write the rows of what has changed since the last call."""
        if not self.dirty:
            return
        table = tables[t.PLANS]
        for plan_id in self.dirty:
            plan = self.by_id.get(plan_id)
            if plan is None:
                table.delete(t.PLAN_KEY.pack(plan_id))
            else:
                table.put(t.PLAN_KEY.pack(plan_id), plan.to_row())
        table.put(COUNTERS_KEY, (self.next_id,))
        self.dirty.clear()

    def load(self, tables: t.Tables) -> None:
        """Read all rows."""
        for key, row in tables[t.PLANS].range(b""):
            (plan_id,) = t.PLAN_KEY.unpack(key)
            if not plan_id:
                (self.next_id,) = row
                continue
            plan = Plan.from_row(plan_id, row)
            self.by_id[plan_id] = plan
            if plan.state is not PlanState.DELETED:
                self.by_name[plan.name] = plan
            if plan.state not in FINISHED:
                self.active[plan_id] = plan
            if row[UNSWEPT_AT]:
                self._load_unswept(tables, plan)

    def _load_unswept(self, tables: t.Tables, plan: Plan) -> None:
        start, stop = t.PLAN_KEY.pack(plan.plan_id), t.PLAN_KEY.pack(plan.plan_id + 1)
        rows: Any = tables[t.PLAN_DONE].range(start, stop)
        for key, (done, swept) in rows:
            if done != swept:
                _plan_id, topic_id, partition, chunk = t.PLAN_DONE_KEY.unpack(key)
                plan.unswept[topic_id, partition, chunk] = (done & ~swept).bit_count()
