"""The operator's treatment of letters, however many there are."""

from __future__ import annotations

from typing import Any

from examples.order_flow import operator_run

LETTERS = 2 * operator_run.CALL_LETTERS + 18


class RecordingBroker:
    """A broker that records abandoned letters, up to the limit of a call."""

    def __init__(self) -> None:
        self.abandoned: list[tuple[str, int, int]] = []

    def call(self, name: str, *, letters: list[tuple[str, int, int]], **_args: object) -> None:
        assert name == "dlq.abandon"
        assert 0 < len(letters) <= operator_run.CALL_LETTERS
        self.abandoned += letters


def places(count: int) -> list[tuple[str, int, int]]:
    return [("order-placed", 0, offset) for offset in range(count)]


def test_more_letters_than_a_call_takes_are_abandoned() -> None:
    broker: Any = RecordingBroker()
    operator_run.abandon(broker, "payment", places(LETTERS))
    assert broker.abandoned == places(LETTERS)


def test_without_letters_there_is_no_call() -> None:
    broker: Any = RecordingBroker()
    operator_run.abandon(broker, "payment", [])
    assert broker.abandoned == []
