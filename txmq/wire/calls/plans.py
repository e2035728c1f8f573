"""Arguments of control calls of replay plans."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from txmq.wire.calls.arguments import Args, Limit, ListArgs, Name, Text
from txmq.wire.calls.consumers import MessagePlace, OperatorArgs
from txmq.wire.calls.letters import Count, SelectArgs

_CURSOR = re.compile(r"([0-9a-f]{2}){1,48}")  # a place, which need not be of this plan
MAX_PLACES = 1_000


def _cursor(text: str) -> str:
    if _CURSOR.fullmatch(text) is None:
        raise ValueError("not a cursor: repeat `next` of the page before")
    return text


Number = Annotated[int, Field(ge=0, lt=2**63)]
PlanCursor = Annotated[str, AfterValidator(_cursor)]
Outcome = Literal["planned", "delivered", "processed", "died_again", "skipped", "ended"]


class PlanSettingsArgs(Args):
    """Settings by which a plan puts its letters back (`core/state/plans.py`)."""

    rate: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] = 100.0
    ramp_s: Annotated[float, Field(ge=0, le=86_400 * 7, allow_inf_nan=False)] = 60.0
    canary: Count = 0
    pause: bool = False
    stop_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    stop_after: Annotated[int, Field(ge=0, le=100)] = 20
    in_flight: Count = 1_000
    second_approver: bool = False
    start: bool = False
    most: Count = 0


class PlanCreate(SelectArgs):
    """A plan over the letters of a selection. Without one, the letters follow with
    plan.add.
    """

    name: Name
    settings: PlanSettingsArgs = Field(default_factory=PlanSettingsArgs)
    operator: Name | None = None
    reason: Text = ""


class PolicySet(OperatorArgs, SelectArgs):
    """The replay policy of a group. A plan begins by itself when letters have been dead
    for `after_s` seconds, or when a member joins with a version that is new to the
    policy. With neither the policy is removed.
    """

    after_s: Annotated[float, Field(ge=1, le=86_400 * 365, allow_inf_nan=False)] | None = None
    on_version: bool = False
    max_replays: Annotated[int, Field(ge=1, le=1_000)] = 1
    settings: PlanSettingsArgs = Field(default_factory=PlanSettingsArgs)


class PolicyList(ListArgs):
    """The replay policies by group."""


class PlanName(Args):
    """A plan by its name."""

    name: Name


class PlanOrder(PlanName):
    """An operator's action on a plan."""

    operator: Name | None = None
    reason: Text = ""


class PlanAdd(PlanName):
    """Letters to add to a plan that is being built. `numbers` are those that they had
    when a client judged them.
    """

    letters: Annotated[tuple[MessagePlace, ...], Field(max_length=MAX_PLACES)]
    numbers: Annotated[tuple[Number, ...], Field(max_length=MAX_PLACES)] = ()

    @model_validator(mode="after")
    def _a_number_for_each(self) -> Self:
        if self.numbers and len(self.numbers) != len(self.letters):
            raise ValueError("give a number for each letter, or none")
        return self


class PlanAbandon(PlanName):
    """Abandon all letters of a plan that was not started."""

    operator: Name | None = None
    reason: Annotated[str, Field(min_length=1, max_length=4_096)]


class PlanLeave(PlanName):
    """Letters to take out of a plan that was not started."""

    letters: Annotated[tuple[MessagePlace, ...], Field(max_length=MAX_PLACES)]
    operator: Name | None = None
    reason: Annotated[str, Field(min_length=1, max_length=4_096)]


class PlanList(ListArgs):
    """The plans by name."""


class PlanLetters(PlanName):
    """A page of the letters of a plan, with an outcome or all."""

    outcome: Outcome | None = None
    cursor: PlanCursor | None = None
    limit: Limit = 1_000


class PlanCheck(PlanName):
    """A part of the letters that a plan has not put back yet, judged as of now."""

    cursor: PlanCursor | None = None
