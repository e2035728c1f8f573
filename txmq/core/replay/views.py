"""Views of replay plans: answers for operators, in JSON values."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from txmq.core.replay.orders import find_plan, state_name
from txmq.core.state import plan_letters
from txmq.core.state.plans import RUNNING, LetterOutcome, Plan, PlanState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from txmq.core.state.plan_letters import PlacedLetter
    from txmq.core.state.state import State

SCANNED = 5_000  # letters that a page reads at most


class LetterPage(NamedTuple):
    """Letters of a plan, and the key to go on behind; None = there are no more."""

    letters: list[dict[str, Any]]
    following: bytes | None


def describe(state: State, plan: Plan) -> dict[str, Any]:
    """Describe a plan."""
    return {
        "name": plan.name,
        "group": plan.group,
        "state": state_name(plan),
        "why": plan.why or _what_it_waits_for(state, plan),
        "letters": plan.letters,
        **{outcome.name.lower(): plan.count(outcome) for outcome in LetterOutcome},
        "by": plan.by,
        "approved_by": plan.approved_by,
        "made_at": plan.made_at,
        "started_at": plan.started_at,
        "changed_at": plan.changed_at,
        "cleanup_pending": plan.has_unswept,
    }


def _what_it_waits_for(state: State, plan: Plan) -> str:
    """Return what a plan that has not stopped waits for; "" = it goes on."""
    if plan.unfinished and plan.waits_for_approval:
        return "waits for an approval"
    if plan.state is PlanState.PLANNED and plan.settings.start:
        return "waits for its group, whose circuit breaker is open"
    if plan.state not in RUNNING or not plan.count(LetterOutcome.DELIVERED):
        return ""
    group = state.groups.by_id[plan.group_id]
    if group.paused:
        return "waits for its group, which is paused"
    return "" if group.members else "waits for its group, which has no members"


def describe_whole(state: State, name: str) -> dict[str, Any]:
    """Describe a plan with its settings."""
    plan = find_plan(state, name)
    return describe(state, plan) | {"digest": plan.digest, "settings": plan.settings._asdict()}


def page(state: State, name: str, outcome: str | None, after: bytes, limit: int) -> LetterPage:
    """Return a page of the letters of a plan, in their order."""
    plan = find_plan(state, name)
    wanted = None if outcome is None else LetterOutcome[outcome.upper()]
    found: list[dict[str, Any]] = []
    read, last = 0, after
    for read, placed in enumerate(_some(state, plan, after), 1):  # noqa: B007  # the last one counts
        last = placed.key
        if wanted in (None, placed.letter.outcome):
            found.append(_describe_letter(state, placed))
        if len(found) == limit:
            return LetterPage(found, last)
    return LetterPage(found, last if read == SCANNED else None)


def _some(state: State, plan: Plan, after: bytes) -> Iterator[PlacedLetter]:
    return islice(plan_letters.letters_of(state, plan.plan_id, after), SCANNED)


def _describe_letter(state: State, placed: PlacedLetter) -> dict[str, Any]:
    topic_id, partition, offset = placed.ref
    letter = placed.letter
    return {
        "topic": state.topics_by_id[topic_id].name,
        "partition": partition,
        "offset": offset,
        "outcome": LetterOutcome(letter.outcome).name.lower(),
        "why": letter.why,
        "number": letter.number,
        "died_as": letter.died_as or None,
    }
