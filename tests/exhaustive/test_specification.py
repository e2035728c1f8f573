"""The specifications in docs/specification have the steps of the searched worlds.

Each step has the same name there, and in every state that a search meets its guard says
the same as the guard in Python. What a step does, and the invariants, are not compared:
Quint checks the ones, the search the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest

from tests.exhaustive import half_messages, shared_log
from tests.exhaustive.half_messages import HalfWorld, Producer
from tests.exhaustive.search import Search
from tests.exhaustive.shared_log import LogWorld, Writer
from txmq.model.bundle import BundleState
from txmq.store.shared.node import State

FOLDER = Path(__file__).parents[2] / "docs" / "specification"
GUARD = re.compile(
    r"pure def may_(\w+)\(me: \w+, [^)]*\): bool =((?:(?!\n\n|\n  pure).)*)", re.DOTALL
)
NO_STEPS = {"answer", "serve"}  # of a shared log: properties
# Of beats, dates and resignation, which the specification leaves out.
LEFT_OUT = {"tick", "resign"}


def guards(name: str) -> dict[str, CodeType]:
    """Return the guards of a specification, as Python."""
    text = (FOLDER / name).read_text("utf-8")
    return {
        step: compile(f"({_in_python(expression)})", name, "eval")
        for step, expression in GUARD.findall(text)
    }


def _in_python(expression: str) -> str:
    return re.sub(r"([\w.]+)\.length\(\)", r"len(\1)", expression)


LOG_GUARDS = {step: code for step, code in guards("shared_log.qnt").items() if step not in NO_STEPS}
HALF_GUARDS = guards("half_messages.qnt")


def test_the_specifications_have_the_steps_of_the_worlds() -> None:
    assert set(LOG_GUARDS) == set(shared_log.STEPS) - LEFT_OUT
    assert set(HALF_GUARDS) == set(half_messages.STEPS)
    text = (FOLDER / "half_messages.qnt").read_text("utf-8")
    assert all(f"action {step}: bool" in text for step in half_messages.BROKER_STEPS)


@pytest.mark.parametrize("name", ["shared_log.qnt", "half_messages.qnt"])
def test_each_guard_is_part_of_a_step(name: str) -> None:
    steps = (FOLDER / name).read_text("utf-8").split("// Steps.")[1]
    for step in LOG_GUARDS if name == "shared_log.qnt" else HALF_GUARDS:
        assert f"may_{step}(me," in steps, step


def _flight(writer: Writer) -> str:
    if writer.transit is not None:
        return "under way" if writer.transit.at is None else "arrived"
    return "asked" if writer.end is None and writer.node._in_flight is not None else "none"


def _compare_log(guards: Mapping[str, CodeType], world: LogWorld) -> None:
    for writer in world.writers:
        me = SimpleNamespace(
            name=writer.name,
            state=writer.node.state.value,
            caught_up=writer.node._is_caught_up,
            flight=_flight(writer),
            late=writer.late,
            read=writer.read - 1,
        )
        names = {"me": me, "left": world.left, "total": len(world.records) - 1}  # no genesis
        for step, code in guards.items():
            guard = shared_log.STEPS[step][0]
            assert eval(code, names) == guard(world, writer), f"{step} of {me}"


def _compare_half(guards: Mapping[str, CodeType], world: HalfWorld) -> None:
    for producer in world.producers:
        other = world.producers[1 - producer.number]
        at = SimpleNamespace(
            state=_word(world.state(producer)), durable=_word(world.durable_state(producer))
        )
        names = {"me": _view(producer), "other": other, "at": at, "left": world.left}
        for step, code in guards.items():
            guard = half_messages.STEPS[step][0]
            assert eval(code, names) == guard(world, producer), f"{step} of {producer}"


def _word(state: BundleState | None) -> str:
    if state is None:
        return "none"
    return "undecided" if state is BundleState.UNDECIDED else "decided"


def _view(producer: Producer) -> SimpleNamespace:
    words = {
        "row": producer.row or "none",
        "told": producer.told.name if producer.told is not None else "none",
        "verdict": producer.verdict.name if producer.verdict is not None else "none",
    }
    return SimpleNamespace(**{**producer._asdict(), **words})


LOG_BOUNDS = [
    shared_log.Bounds(writes=1, copies=1),
    shared_log.Bounds(writes=1, unknown=1, errors=1, restarts=1),
]
HALF_BOUNDS = [
    half_messages.Bounds(copies=1),
    half_messages.Bounds(deaths=1, refusals=1),
    half_messages.Bounds(restarts=1),
]


@pytest.mark.parametrize("bounds", LOG_BOUNDS, ids=str)
def test_guards_of_a_shared_log_say_the_same_in_every_state(bounds: shared_log.Bounds) -> None:
    Search(LogWorld(bounds), {}, partial(_compare_log, LOG_GUARDS)).run(40_000)


@pytest.mark.parametrize("bounds", HALF_BOUNDS, ids=str)
def test_guards_of_half_messages_say_the_same_in_every_state(
    bounds: half_messages.Bounds,
) -> None:
    Search(HalfWorld(bounds), {}, partial(_compare_half, HALF_GUARDS)).run(40_000)


def _with(guards: Mapping[str, CodeType], step: str, expression: str) -> dict[str, CodeType]:
    return {**guards, step: compile(expression, step, "eval")}


@pytest.mark.parametrize(
    ("step", "expression"),
    [("write", "left.writes > 0 and me.state == 'leading'"), ("read", "me.read < total")],
)
def test_another_guard_of_a_shared_log_is_found(step: str, expression: str) -> None:
    compare: Callable[[LogWorld], Any] = partial(_compare_log, _with(LOG_GUARDS, step, expression))
    with pytest.raises(AssertionError, match=f"^{step} of"):
        Search(LogWorld(LOG_BOUNDS[1]), {}, compare).run(40_000)


def test_another_guard_of_half_messages_is_found() -> None:
    wrong = _with(HALF_GUARDS, "commit", "me.alive and me.tx == 'inserted'")
    with pytest.raises(AssertionError, match=r"^commit of"):
        Search(HalfWorld(HALF_BOUNDS[0]), {}, partial(_compare_half, wrong)).run(40_000)


def test_states_have_the_words_of_the_code() -> None:
    text = (FOLDER / "shared_log.qnt").read_text("utf-8")
    assert f"// {', '.join(state.value for state in State)}" in text
