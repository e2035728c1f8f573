"""The operator's treatment of letters, whose cause is removed meanwhile."""

from __future__ import annotations

from collections import Counter
from typing import Any

from examples.order_flow import careful_replay
from tests.broker.calls.test_plan_calls import Desk
from txmq.client.protocol.calls import calls_by
from txmq.client.protocol.letter_changes import change_letters
from txmq.client.protocol.plans import PlanLetterPages, PlannedLetter, PlanStatus, parse_status
from txmq.faces import run


class DeskPlan:
    """A plan of a desk whose group works while somebody waits for it."""

    def __init__(self, shop: Shop, name: str) -> None:
        self._shop, self._name = shop, name

    def wait(self, _timeout: float) -> PlanStatus:
        for _ in range(400):
            shown = parse_status(self._shop.ask("plan.show", name=self._name))
            if shown.state in ("planned", "paused", "done", "cancelled"):
                return shown
            self._shop.work()
        raise AssertionError("the plan does not end")

    def resume(self, **by: Any) -> None:
        self._shop.seen["resumed"] += 1
        self._shop.ask("plan.resume", name=self._name, **by)

    def letters(self, outcome: str) -> list[PlannedLetter]:
        pages = PlanLetterPages(self._name, outcome)
        args = pages.next_args()
        assert args is not None
        return list(pages.read(self._shop.ask("plan.letters", **args)))


class Shop:
    """A client of a desk; the letters of its group fail until the cause is removed."""

    def __init__(self) -> None:
        self.desk, self.broken, self.seen = Desk(), True, Counter[str]()

    def ask(self, call: str, /, **args: Any) -> Any:
        return self.desk.broker.ask(call, **args)

    call = ask

    def plan(self, name: str) -> DeskPlan:
        return DeskPlan(self, name)

    def replay_letters(self, group: str, letters: Any, **by: Any) -> Any:
        return run(change_letters(calls_by(self.ask), "dlq.replay", group, letters, None, {}, **by))

    def work(self) -> None:
        self.desk.work(lambda _offset: self.broken)
        self.desk.broker.pass_time(1)

    def mend(self) -> str:
        self.broken = False
        self.seen["mended"] += 1
        return "the cause"


def test_a_careful_replay_stops_is_mended_goes_on_and_leaves_nothing(capsys: Any) -> None:
    shop = Shop()
    settings = careful_replay.SETTINGS | {"start": True}
    shop.desk.plan("p", select={}, settings=settings)
    client: Any = shop
    shown = careful_replay.follow(client, "p", shop.mend)
    assert (shop.seen["mended"], shop.seen["resumed"]) == (1, 1)
    assert (shown.state, shown.processed, shown.died_again) == ("done", 35, 5)
    shop.work()
    assert shop.ask("dlq.list", group="g", select={})["letters"] == []
    told = capsys.readouterr().out
    assert "stopped: p: 5 of the last 5 failed again: poison" in told
    assert "replayed again: 5 letters of g" in told
    assert careful_replay.report(shown) == "p is done: 35 processed, 5 died again"


def test_a_replay_that_does_not_stop_is_mended_at_its_end() -> None:
    shop = Shop()
    shop.broken = False
    shop.desk.plan("p", select={}, settings=careful_replay.SETTINGS | {"start": True})
    client: Any = shop
    assert careful_replay.follow(client, "p", shop.mend).processed == 40
    assert (shop.seen["mended"], shop.seen["resumed"]) == (1, 0)
