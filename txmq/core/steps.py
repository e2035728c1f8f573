"""Reads in steps: generators that yield often, so that long ones need not be done in
one turn of the reactor. The state may change between two steps.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]


def run_to_end(steps: Steps[T]) -> T:
    """Return the result of all steps, in one go."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
