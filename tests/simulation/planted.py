"""Bugs planted on purpose: a checker that stays green with one of them is broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

from txmq.broker.core import decisions, holds, machine, sends, transactions
from txmq.broker.core.state import Outcome, Rejected

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from txmq.broker.engine import Engine


class Bug(NamedTuple):
    """`plant` changes one engine, `around` the whole process for the time of a seed."""

    name: str
    plant: Callable[[Engine], None] = lambda _engine: None
    around: Callable[[], AbstractContextManager[Any]] = lambda: patch.dict({})


def _reply_before_flush(engine: Engine) -> None:
    def answer_now(deliver: Callable[[Any], None], reply: object) -> None:
        deliver(reply)
        engine._tick_soon()  # noqa: SLF001

    engine._answer_later = answer_now  # type: ignore[method-assign]  # noqa: SLF001


def _no_sync(engine: Engine) -> None:
    write = engine.store.write

    def write_only(flush: Any, *, sync: bool = True) -> None:  # noqa: ANN401
        del sync
        write(flush, sync=False)
        engine.store._writer._synced = flush.end  # type: ignore[attr-defined]  # noqa: SLF001

    engine.store.write = write_only  # type: ignore[method-assign]


def _readers_see_everything(engine: Engine) -> None:
    type(engine.store).durable.fget  # noqa: B018  # the property the bug stands in for

    class Ahead(type(engine.store)):  # type: ignore[misc]
        @property
        def durable(self) -> int:
            return int(self.end)

    del Ahead


def _last_decision_wins() -> AbstractContextManager[Any]:
    real = decisions.decide_decide

    def decide(state: Any, command: Any, now: int) -> Outcome | Rejected:  # noqa: ANN401
        row = transactions.get(state, command.token)
        if row is not None and row.state is transactions.GroupState.ROLLED_BACK:
            return decisions.decide_now(state, row._replace(state=transactions.GroupState.UNDECIDED), command)
        return real(state, command, now)

    return patch.dict(machine.DECIDERS, {decisions.Decide: decide})


BUGS = (
    Bug("replies before the flush", _reply_before_flush),
    Bug("a flush that does not sync", _no_sync),
    Bug("no order tickets", around=lambda: patch.object(holds.Release, "_free", lambda _self, _waiting: True)),
    Bug("plain sends pass held keys", around=lambda: patch.object(holds, "any_held", lambda *_args: False)),
    Bug("repeated sends are stored again", around=lambda: patch.object(sends, "_seen_before", lambda *_args: None)),
)
