"""Replay plans for services, by control calls, without I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from txmq.client.protocol.letters import LetterOptions, selection_args
from txmq.errors import LocalProtocolError

PAGE = 1_000
ENDED = ("done", "cancelled")
OUTCOMES = ("planned", "delivered", "processed", "died_again", "skipped", "ended")  # of letters
RESTING = ("planned", "paused", *ENDED)
Place = tuple[str, int, int]  # topic, partition, offset


class PlanOptions(TypedDict, total=False):
    """Options of a plan: the way it puts its letters back; docs/operations/plans.md.

    `rate` is in letters per second, 0 = as fast as the broker can. With `start` the
    plan starts as soon as it may.
    """

    rate: float
    ramp_s: float
    canary: int
    pause: bool
    stop_share: float
    stop_after: int
    in_flight: int
    second_approver: bool
    start: bool
    most: int


class PlanStatus(NamedTuple):
    """A plan, with its letters by outcome.

    `state` is "building", "planned", "canary", "ramping", "paused", "abandoning",
    "done" or "cancelled", `why` the reason. `progress` is the share of letters with an
    outcome, `rate_now` in letters per second. Times are microseconds, `eta_s` seconds.
    """

    name: str
    group: str
    state: str
    why: str
    letters: int
    planned: int
    delivered: int
    processed: int
    died_again: int
    skipped: int
    ended: int
    by: str
    approved_by: str
    made_at: int
    started_at: int
    progress: float
    rate_now: float
    eta_s: float | None
    digest: str

    @property
    def is_over(self) -> bool:
        """True if nothing more will happen by itself or by an operator."""
        return self.state in ENDED


class PlannedLetter(NamedTuple):
    """A letter of a plan, and what became of it: "planned", "delivered", "processed",
    "died_again" (as number `died_as`), "skipped" or "ended", with the reason.
    """

    topic: str
    partition: int
    offset: int
    outcome: str
    why: str
    number: int
    died_as: int | None


def create_args(
    name: str,
    group: str,
    saved: str | None,
    options: PlanOptions | None,
    selection: LetterOptions,
    letters: Sequence[Place] | None,
    *,
    operator: str | None,
    reason: str,
) -> dict[str, object]:
    """Return the arguments of plan.create. Raises LocalProtocolError where letters are
    both named and selected.
    """
    if letters is not None and (saved is not None or selection):
        raise LocalProtocolError(
            "letters that are both named and selected", hint="give either `letters` or properties"
        )
    return {
        "name": name,
        "group": group,
        "settings": dict(options or {}),
        "operator": operator,
        "reason": reason,
        **(selection_args(saved, selection) if letters is None else {}),
    }


def parse_status(reply: Mapping[str, Any]) -> PlanStatus:
    """Return the plan of a reply to plan.show."""
    return PlanStatus(**{name: reply[name] for name in PlanStatus._fields})


class PlanLetterPages:
    """The pages of a plan's letters: while `next_args` has the arguments of a call,
    `read` gets its reply.
    """

    def __init__(self, name: str, outcome: str | None) -> None:
        self._args: dict[str, object] = {"name": name, "outcome": outcome, "limit": PAGE}
        self._over = False

    def next_args(self) -> dict[str, object] | None:
        """Return the arguments of the next call of plan.letters, or None at the end."""
        return None if self._over else self._args

    def read(self, reply: Mapping[str, Any]) -> Iterator[PlannedLetter]:
        """Yield the letters of a page, which may have none and not be the last."""
        self._over = reply["next"] is None
        self._args["cursor"] = reply["next"]
        return (PlannedLetter(**letter) for letter in reply["letters"])


def add_calls(name: str, letters: Sequence[Place] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the calls that add named letters to a new plan, and fix them."""
    if letters is None:
        return
    for at in range(0, len(letters), PAGE):
        places = [list(place) for place in letters[at : at + PAGE]]
        yield "plan.add", {"name": name, "letters": places}
    yield "plan.freeze", {"name": name}
