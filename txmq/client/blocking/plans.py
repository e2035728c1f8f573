"""Replay plans of the blocking client."""

from __future__ import annotations

from txmq.client.protocol.awaited.plans import ReplayPlan as Plan
from txmq.faces import blocking, iterating


class ReplayPlan:
    """A replay plan at the broker, by its name. Made by `client.plan`.

    The broker carries it out: this object may go. Methods raise UnknownPlan where there
    is no such plan, Conflict where its state does not allow the order.
    """

    def __init__(self, plan: Plan) -> None:
        self._awaited, self.name = plan, plan.name

    create = blocking(Plan.create)
    show = blocking(Plan.show)
    letters = iterating(Plan.letters)
    wait = blocking(Plan.wait)
    approve = blocking(Plan.approve)
    start = blocking(Plan.start)
    pause = blocking(Plan.pause)
    resume = blocking(Plan.resume)
    cancel = blocking(Plan.cancel)
    abandon = blocking(Plan.abandon)
    delete = blocking(Plan.delete)
