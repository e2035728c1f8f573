"""Replay plans of the blocking client."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Unpack

from txmq.client.protocol.letters import LetterOptions
from txmq.client.protocol.plans import (
    RESTING,
    Place,
    PlanLetterPages,
    PlannedLetter,
    PlanOptions,
    PlanStatus,
    add_calls,
    create_args,
    parse_status,
)
from txmq.errors import RequestTimeout

POLL_S = 0.1


class PlanCalls(Protocol):
    """A client that makes control calls."""

    def call(self, name: str, /, **args: object) -> dict[str, Any]: ...


class ReplayPlan:
    """A replay plan at the broker, by its name. Made by `client.plan`.

    The broker carries it out: this object may go. Methods raise UnknownPlan where there
    is no such plan, Conflict where its state does not allow the order.
    """

    def __init__(self, calls: PlanCalls, name: str) -> None:
        self._calls, self.name = calls, name

    def create(
        self,
        group: str,
        *,
        saved: str | None = None,
        letters: Sequence[Place] | None = None,
        options: PlanOptions | None = None,
        operator: str | None = None,
        reason: str = "",
        **selection: Unpack[LetterOptions],
    ) -> PlanStatus:
        """Make the plan of a selection of open letters, and wait until it is frozen.

        The letters have all properties in `selection`, or those of the selection that
        was `saved` by its name. Or they are those at these places: topic, partition,
        offset. A repetition with the same arguments does no harm.
        """
        args = create_args(
            self.name, group, saved, options, selection, letters, operator=operator, reason=reason
        )
        self._calls.call("plan.create", **args)
        for call, its_args in add_calls(self.name, letters):
            self._calls.call(call, **its_args)
        while (shown := self.show()).state == "building":
            time.sleep(POLL_S)
        return shown

    def show(self) -> PlanStatus:
        """Return the plan as it stands."""
        return parse_status(self._calls.call("plan.show", name=self.name))

    def letters(self, outcome: str | None = None) -> Iterator[PlannedLetter]:
        """Iterate over the plan's letters in the order of publication, page by page."""
        pages = PlanLetterPages(self.name, outcome)
        while (args := pages.next_args()) is not None:
            yield from pages.read(self._calls.call("plan.letters", **args))

    def wait(self, timeout: float | None = None) -> PlanStatus:
        """Wait until the plan is paused or over, and return it. Raises RequestTimeout
        after `timeout` seconds.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while (shown := self.show()).state not in RESTING:
            if until is not None and time.monotonic() >= until:
                raise RequestTimeout(f"plan {self.name!r} is {shown.state} after {timeout} s")
            time.sleep(POLL_S)
        return shown

    def approve(self, *, operator: str | None = None, reason: str = "") -> None:
        """Approve the plan of somebody else."""
        self._order("approve", operator, reason)

    def start(self, *, operator: str | None = None, reason: str = "") -> None:
        """Begin to put the letters back."""
        self._order("start", operator, reason)

    def pause(self, *, operator: str | None = None, reason: str = "") -> None:
        """Put no more letters back, until `resume`."""
        self._order("pause", operator, reason)

    def resume(self, *, operator: str | None = None, reason: str = "") -> None:
        """Go on where the plan was paused."""
        self._order("resume", operator, reason)

    def cancel(self, *, operator: str | None = None, reason: str = "") -> None:
        """End the plan. What was put back stays put back."""
        self._order("cancel", operator, reason)

    def abandon(self, *, reason: str, operator: str | None = None) -> None:
        """Abandon all letters of the plan, which was not started: the broker goes
        through them by itself, `wait` until it is over.
        """
        self._order("abandon", operator, reason)

    def delete(self, *, operator: str | None = None, reason: str = "") -> None:
        """Forget the plan, which has ended."""
        self._order("delete", operator, reason)

    def _order(self, what: str, operator: str | None, reason: str) -> None:
        self._calls.call(f"plan.{what}", name=self.name, operator=operator, reason=reason)
