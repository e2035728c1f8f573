"""The operator's treatment of letters, however many there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from examples.order_flow import operator_run
from txmq_spark.plan import LetterClass

LETTERS = 2 * operator_run.CALL_LETTERS + 18


class RecordingBroker:
    """A broker that records abandoned letters, up to the limit of a call."""

    def __init__(self) -> None:
        self.abandoned: list[tuple[str, int, int]] = []

    def call(self, name: str, *, letters: list[tuple[str, int, int]], **_args: object) -> None:
        assert name == "dlq.abandon"
        assert 0 < len(letters) <= operator_run.CALL_LETTERS
        self.abandoned += letters


def found(*classes: LetterClass) -> Any:
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
    broker: Any = RecordingBroker()
    operator_run.abandon(broker, found(*[LetterClass.POISON] * LETTERS, LetterClass.APPLIED))
    assert broker.abandoned == [("order-placed", 0, offset) for offset in range(LETTERS)]


def test_without_poison_letters_there_is_no_call() -> None:
    broker: Any = RecordingBroker()
    operator_run.abandon(broker, found(LetterClass.APPLIED))
    assert broker.abandoned == []
