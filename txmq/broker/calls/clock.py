"""Control calls of the broker's clock."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from txmq.broker.background.clock_service import contradicting
from txmq.broker.calls.operators import audited
from txmq.errors import BadRequest

if TYPE_CHECKING:
    from txmq.broker.background.clock_service import ClockService, ClockStatus
    from txmq.broker.calls.dispatcher import CallContext, Handler
    from txmq.wire.calls.arguments import ClockConfirm, NoArgs

LOOK = "look at the clocks: `txmq clock`; if this one is right all the same, --force"
log = structlog.get_logger()


class ClockCalls:
    """Calls about the broker's time."""

    def __init__(self, clock: ClockService) -> None:
        self._clock = clock
        self.handlers: dict[str, Handler] = {"clock.show": self.show, "clock.confirm": self.confirm}

    def show(self, call: CallContext, args: NoArgs) -> None:
        call.answer(_view(self._clock.status()))

    def confirm(self, call: CallContext, args: ClockConfirm) -> None:
        others = contradicting(self._clock.status())
        if others and not args.force:
            message = f"the clocks of {', '.join(others)} are not near this machine's"
            raise BadRequest(message, hint=LOOK)
        log.warning("clock.confirmed", operator=args.operator, reason=args.reason)
        self._clock.confirm(args.operator, partial(audited, "clock.confirm", "clock", args))
        call.answer(_view(self._clock.status()))


def _view(clock: ClockStatus) -> dict[str, Any]:
    return {
        "broker_at": clock.now,
        "machine_at": clock.wall,
        "believed": clock.is_believed,
        "certain_at": clock.certain,
        "certain_after_s": clock.certain_after_s,
        "databases": [{"name": name, "at": time} for name, time in clock.databases.items()],
        "not_compared": [
            {"name": name, "reason": reason} for name, reason in clock.not_compared.items()
        ],
    }
