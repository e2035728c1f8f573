"""Replay plans of clients on an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Unpack

from txmq.client.protocol.awaited.core import AwaitedCalls
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

POLL_S = 0.1
Sleep = Callable[[float], Awaitable[object]]


class ReplayPlan:
    """A replay plan at the broker, by its name; see that of the blocking client.

    Methods are coroutines; cancel one for an end before its time.
    """

    def __init__(self, calls: AwaitedCalls, sleep: Sleep, name: str) -> None:
        self._calls, self._sleep, self.name = calls, sleep, name

    async def create(
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
        """Make the plan of the open letters of a selection, and wait until it is
        frozen.
        """
        args = create_args(
            self.name, group, saved, options, selection, letters, operator=operator, reason=reason
        )
        await self._calls.call("plan.create", **args)
        for call, its_args in add_calls(self.name, letters):
            await self._calls.call(call, **its_args)
        while (shown := await self.show()).state == "building":
            await self._sleep(POLL_S)
        return shown

    async def show(self) -> PlanStatus:
        """Return the plan as it stands."""
        return parse_status(await self._calls.call("plan.show", name=self.name))

    async def letters(self, outcome: str | None = None) -> AsyncIterator[PlannedLetter]:
        """Iterate over the plan's letters in the order of publication."""
        pages = PlanLetterPages(self.name, outcome)
        while (args := pages.next_args()) is not None:
            for letter in pages.read(await self._calls.call("plan.letters", **args)):
                yield letter

    async def wait(self) -> PlanStatus:
        """Wait until the plan is paused or over, and return it."""
        while (shown := await self.show()).state not in RESTING:
            await self._sleep(POLL_S)
        return shown

    async def approve(self, *, operator: str | None = None, reason: str = "") -> None:
        """Approve the plan of somebody else."""
        await self._order("approve", operator, reason)

    async def start(self, *, operator: str | None = None, reason: str = "") -> None:
        """Begin to put the letters back."""
        await self._order("start", operator, reason)

    async def pause(self, *, operator: str | None = None, reason: str = "") -> None:
        """Put no more letters back, until `resume`."""
        await self._order("pause", operator, reason)

    async def resume(self, *, operator: str | None = None, reason: str = "") -> None:
        """Go on where the plan was paused."""
        await self._order("resume", operator, reason)

    async def cancel(self, *, operator: str | None = None, reason: str = "") -> None:
        """End the plan. What was put back stays put back."""
        await self._order("cancel", operator, reason)

    async def abandon(self, *, reason: str, operator: str | None = None) -> None:
        """Abandon all letters of the plan, which was not started: the broker goes
        through them by itself, `wait` until it is over.
        """
        await self._order("abandon", operator, reason)

    async def delete(self, *, operator: str | None = None, reason: str = "") -> None:
        """Forget the plan, which has ended."""
        await self._order("delete", operator, reason)

    async def _order(self, what: str, operator: str | None, reason: str) -> None:
        await self._calls.call(f"plan.{what}", name=self.name, operator=operator, reason=reason)
