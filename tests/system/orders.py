"""Orders, each a row of a database and a message of a topic, and the faults between
both.

The module knows nothing of brokers, clients or databases.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Self

Token = str  # 32 hex digits


class PlacedOrder(NamedTuple):
    """An order. `version` counts the orders of its key from 1, in the order of their
    commits.
    """

    token: Token
    key: str
    version: int

    def encode(self) -> bytes:
        """Return the body of its message."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, body: bytes) -> Self:
        return cls(*json.loads(body))


class ReportedOutcome(StrEnum):
    """The outcome that txmq reported to a producer. BEGAN: the producer died before."""

    BEGAN = "began"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


ReportedOutcomes = Mapping[Token, ReportedOutcome]


def find_faults(
    reported: ReportedOutcomes, rows: Sequence[PlacedOrder], messages: Sequence[PlacedOrder]
) -> list[str]:
    """Return the differences between rows, messages and reported outcomes.

    `messages` are in the order of the topic.
    """
    return [
        *(f"{order} has a row and no message" for order in sorted({*rows} - {*messages})),
        *(f"{order} has a message and no row" for order in sorted({*messages} - {*rows})),
        *(
            f"{order} has {times} messages"
            for order, times in Counter(messages).items()
            if times > 1
        ),
        *_reported_otherwise(reported, rows),
        *_disorder(rows, messages),
    ]


def _reported_otherwise(reported: ReportedOutcomes, rows: Sequence[PlacedOrder]) -> Iterator[str]:
    there = {order.token for order in rows}
    for token, outcome in reported.items():
        if outcome is ReportedOutcome.COMMITTED and token not in there:
            yield f"{token} was reported as committed, and has no row"
        if outcome is ReportedOutcome.ABORTED and token in there:
            yield f"{token} was reported as rolled back, and has a row"
    yield from (f"{token} was never begun" for token in sorted(there - reported.keys()))


def _disorder(rows: Sequence[PlacedOrder], messages: Sequence[PlacedOrder]) -> Iterator[str]:
    """Yield the keys whose versions do not count up from 1, in the rows or in the
    topic.
    """
    for name, orders in (
        ("rows", sorted(rows, key=lambda order: order.version)),
        ("messages", messages),
    ):
        by_key: dict[str, list[int]] = {}
        for order in orders:
            by_key.setdefault(order.key, []).append(order.version)
        for key, versions in by_key.items():
            if versions != list(range(1, len(versions) + 1)):
                yield f"the {name} of {key} are {versions}"


def wrongly_ended(expected: Mapping[Token, bool], rows: Sequence[PlacedOrder]) -> list[str]:
    """Return the transactions that did not end as `expected` says: True = committed."""
    there = {order.token for order in rows}
    return [
        f"{token} {'has' if token in there else 'lacks'} a row"
        for token in expected
        if expected[token] != (token in there)
    ]


def wrong_effects(
    sent: Sequence[PlacedOrder], effects: Sequence[PlacedOrder], *, in_order: bool
) -> list[str]:
    """Return the orders without exactly one effect, and perhaps those out of order.

    `effects` are in the order of their commits.
    """
    return [
        *(f"{order} had no effect" for order in sorted({*sent} - {*effects})),
        *(f"{order} had an effect and was not sent" for order in sorted({*effects} - {*sent})),
        *(f"{order} had {times} effects" for order, times in Counter(effects).items() if times > 1),
        *(_disorder(sent, effects) if in_order else ()),
    ]
