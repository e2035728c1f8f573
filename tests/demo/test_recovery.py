"""What the operator of the demonstration does with letters, however many there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from examples.order_flow import recovery
from txmq_spark.plan import Class

LETTERS = 2 * recovery.AT_ONCE + 18


class Broker:
    """Takes what it is told to abandon, as many at once as a broker does."""

    def __init__(self) -> None:
        self.abandoned: list[tuple[str, int, int]] = []

    def call(self, name: str, *, letters: list[tuple[str, int, int]], **_args: object) -> None:
        assert name == "dlq.abandon"
        assert 0 < len(letters) <= recovery.AT_ONCE
        self.abandoned += letters


def found(*classes: Class) -> Any:
    letters = [
        SimpleNamespace(topic="order-placed", partition=0, offset=offset)
        for offset in range(len(classes))
    ]
    planned = [
        SimpleNamespace(letter=letter, cls=cls)
        for letter, cls in zip(letters, classes, strict=True)
    ]
    facts = SimpleNamespace(group="payment")
    return SimpleNamespace(
        planned=planned, manifest=SimpleNamespace(header=SimpleNamespace(facts=facts))
    )


def test_more_letters_than_a_call_takes_are_abandoned() -> None:
    broker: Any = Broker()
    recovery.abandon(broker, found(*[Class.POISON] * LETTERS, Class.APPLIED))
    assert broker.abandoned == [("order-placed", 0, offset) for offset in range(LETTERS)]


def test_where_nothing_is_poison_the_broker_hears_nothing() -> None:
    broker: Any = Broker()
    recovery.abandon(broker, found(Class.APPLIED))
    assert broker.abandoned == []
