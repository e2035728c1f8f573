"""Whatever changes between two steps of a long read: it ends with an answer or a typed
refusal, never with an exception.

The reads of `changed_scene` are made one step at a time. A new function that makes
steps has to be among them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.broker.requests.changed_scene import LETTERS, TOPICS, WHO, ChangedScene
from txmq.core.state import visibility
from txmq.core.state.state import State
from txmq.core.transactions.decisions import DecideTransaction
from txmq.model.message import Decision, Message
from txmq.model.units import DAY, SECOND

PACKAGE = Path(__file__).parents[3] / "txmq"
FOLDERS = ("admin", "broker", "core")
STEP = re.compile(r"\w*PER_STEP|STEP_\w+|ENDS_\w+|READ_ROWS")
STEPS = (*range(1, 13), *range(15, 60, 5))  # of each read; the longest ones make 62


def functions_in_steps() -> Iterator[tuple[str, str]]:
    """Yield module and qualified name of each function that makes steps."""
    for folder in FOLDERS:
        for path in (PACKAGE / folder).rglob("*.py"):
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            for name in _in(ast.parse(path.read_text("utf-8")), ""):
                yield module, name


def _in(node: ast.AST, prefix: str) -> Iterator[str]:
    for one in ast.iter_child_nodes(node):
        if isinstance(one, ast.ClassDef):
            yield from _in(one, f"{prefix}{one.name}.")
        elif isinstance(one, ast.FunctionDef):
            makes = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(one))
            if makes and one.returns is not None and ast.unparse(one.returns).startswith("Steps["):
                yield prefix + one.name
            yield from _in(one, f"{prefix}{one.name}.<locals>.")


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step do as little as it may."""
    for module in {import_module(name) for name, _function in functions_in_steps()}:
        for constant in filter(STEP.fullmatch, vars(module)):
            monkeypatch.setattr(module, constant, 1)


def settle(scene: ChangedScene) -> None:
    """Let background work come to its end."""
    for _ in range(4):
        scene.broker.assembly.retention.tick()
        scene.broker.pass_time(1)


def delete_topics(scene: ChangedScene) -> None:
    for token in scene.tokens:
        scene.broker.do(DecideTransaction(bytes.fromhex(token), Decision.ROLLBACK, "test"))
    for name in TOPICS:
        assert "groups" in scene.ask("topic.delete", name=name, **WHO)
    settle(scene)


def make_topics_again(scene: ChangedScene) -> None:
    delete_topics(scene)
    for name in TOPICS:
        scene.ask("topic.create", name=name, partitions=1)
        scene.send(name, 0, Message(b"new", "k1"))
    settle(scene)


def delete_groups(scene: ChangedScene) -> None:
    for group in scene.generations:
        scene.client.call("consumer.leave", group=group, member="a", instance="a")
        assert scene.ask("group.delete", group=group, **WHO) == {}
    settle(scene)


def make_groups_again(scene: ChangedScene) -> None:
    delete_groups(scene)
    for group in scene.generations:
        member = {"member": "b", "instance": "b", "mode": "concurrent", "topics": ["n"]}
        scene.client.call("consumer.join", group=group, **member)
    settle(scene)


def abandon_letters(scene: ChangedScene) -> None:
    for group in ("g", "o"):
        scene.ask("dlq.abandon", group=group, letters=LETTERS, reason="no use")
    settle(scene)


def replay_letters(scene: ChangedScene) -> None:
    delete_plans(scene)
    for group in ("g", "o"):
        scene.ask("dlq.replay", group=group, letters=LETTERS)
        scene.fetch(group)
    settle(scene)


def delete_plans(scene: ChangedScene) -> None:
    for plan in scene.ask("plan.list")["plans"]:
        for order in ("cancel", "delete"):
            scene.ask(f"plan.{order}", name=plan["name"], **WHO)
    scene.ask("policy.set", group="g", select={}, **WHO)
    scene.ask("dlq.save", name="s", **WHO)
    settle(scene)


def run_plans(scene: ChangedScene) -> None:
    scene.ask("plan.freeze", name="p", **WHO)
    scene.broker.pass_time(1)
    scene.ask("plan.start", name="p", **WHO)
    settle(scene)


def retain(scene: ChangedScene) -> None:
    for name in TOPICS:
        scene.ask("topic.alter", name=name, retention_ms=1, letters_ms=1)
    for token in scene.tokens[:2]:
        scene.broker.do(DecideTransaction(bytes.fromhex(token), Decision.ROLLBACK, "test"))
    scene.broker.pass_time(60)
    settle(scene)
    scene.broker.clock.rightNow += 400 * DAY / SECOND
    settle(scene)


def reset_groups(scene: ChangedScene) -> None:
    for group in scene.generations:
        assert "error" not in scene.ask("group.reset", group=group, topic="m", to="first", **WHO)
    settle(scene)


def grow_and_restart(scene: ChangedScene) -> None:
    for token in scene.tokens[:2]:
        scene.broker.do(DecideTransaction(bytes.fromhex(token), Decision.COMMIT, "test"))
    for name in TOPICS:
        assert "partitions" in scene.ask("topic.grow", name=name, partitions=8)
    scene.ask("recover.adopt", group="g", store="5" * 32, force=True, **WHO)
    for group in scene.generations:
        scene.client.call("consumer.leave", group=group, member="a", instance="a")
    settle(scene)


CHANGES: list[Callable[[ChangedScene], None]] = [
    delete_topics,
    make_topics_again,
    delete_groups,
    make_groups_again,
    abandon_letters,
    replay_letters,
    delete_plans,
    run_plans,
    retain,
    reset_groups,
    grow_and_restart,
]


def test_every_function_that_makes_steps_is_among_the_reads() -> None:
    scene = ChangedScene()
    scene.begin_reads()
    while scene.make_steps(1):
        pass
    scene.end()
    assert scene.failures == []
    seen = {code.co_qualname for code in scene.seen}
    assert [one for one in functions_in_steps() if one[1] not in seen] == []


def failures_of(change: Callable[[ChangedScene], None], steps: int) -> list[str] | None:
    """Let something change when each read has made so many steps. None = none is
    left.
    """
    scene = ChangedScene()
    scene.begin_reads()
    if not scene.make_steps(steps):
        return None
    change(scene)
    scene.end()
    return scene.failures


@pytest.mark.parametrize("change", CHANGES)
def test_reads_end_whatever_changes(
    change: Callable[[ChangedScene], None],
) -> None:
    found = {steps: failures for steps in STEPS if (failures := failures_of(change, steps))}
    assert found == {}


def test_a_read_that_looks_up_what_is_gone_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(state: State, topic_id: int, partition: int, durable: int | None = None) -> int:
        del durable
        return state.topics_by_id[topic_id].end_offsets[partition]

    assert failures_of(delete_topics, 1) == []
    monkeypatch.setattr(visibility, "visible_end", end)
    assert failures_of(delete_topics, 1)
