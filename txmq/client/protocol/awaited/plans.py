"""Replay plans of a client of any face."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Unpack

from txmq.client.protocol.awaited.core import AwaitedClient
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
from txmq.model.durations import Duration, seconds_of

POLL_S = 0.1


class ReplayPlan:
    """A replay plan at the broker, by its name; as that of the blocking client."""

    def __init__(self, client: AwaitedClient, name: str) -> None:
        self._core, self.name = client._core, name  # noqa: SLF001  # of its client

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
        """Make the plan of a selection of open letters, and wait until it is frozen.

        The letters have all properties in `selection`, or those of the selection that
        was `saved` by its name. Or they are those at these places: topic, partition,
        offset. A repetition with the same arguments does no harm.
        """
        args = create_args(
            self.name, group, saved, options, selection, letters, operator=operator, reason=reason
        )
        await self._core.call("plan.create", args)
        for call, its_args in add_calls(self.name, letters):
            await self._core.call(call, its_args)
        while (shown := await self.show()).state == "building":
            await self._core.sleep(POLL_S)
        return shown

    async def show(self) -> PlanStatus:
        """Return the plan as it stands."""
        return parse_status(await self._core.call("plan.show", {"name": self.name}))

    async def letters(self, outcome: str | None = None) -> AsyncIterator[PlannedLetter]:
        """Iterate over the plan's letters in the order of publication, page by page."""
        pages = PlanLetterPages(self.name, outcome)
        while (args := pages.next_args()) is not None:
            for letter in pages.read(await self._core.call("plan.letters", args)):
                yield letter

    async def wait(self, timeout: Duration | None = None) -> PlanStatus:  # noqa: ASYNC109  # as of the blocking face
        """Wait until the plan is paused or over, and return it. Raises RequestTimeout
        after `timeout`.
        """
        seconds = seconds_of(timeout, "timeout")
        until = None if seconds is None else self._core.seconds() + seconds
        while (shown := await self.show()).state not in RESTING:
            if until is not None and self._core.seconds() >= until:
                raise RequestTimeout(f"plan {self.name!r} is {shown.state} after {seconds} s")
            await self._core.sleep(POLL_S)
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
        await self._core.call(
            f"plan.{what}", {"name": self.name, "operator": operator, "reason": reason}
        )
