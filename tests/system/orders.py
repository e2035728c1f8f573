"""Orders: each is a row in a database and a message in a topic, or neither. What must
hold of them at the end.

Knows nothing of brokers, clients or databases.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Self

Token = str  # 32 hex digits


class Order(NamedTuple):
    """An order; `version` counts the orders of its key, in the order of their commits,
    from 1.
    """

    token: Token
    key: str
    version: int

    def encode(self) -> bytes:
        """The body of its message."""
        return json.dumps(self).encode()

    @classmethod
    def decode(cls, body: bytes) -> Self:
        return cls(*json.loads(body))


class Outcome(StrEnum):
    """What a producer was told of its transaction; BEGAN = it did not live to hear."""

    BEGAN = "began"
    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


Told = Mapping[Token, Outcome]


def faults(told: Told, rows: Sequence[Order], messages: Sequence[Order]) -> list[str]:
    """What is wrong; nothing, if rows and messages are the same orders. `messages` as
    they stand in the topic.
    """
    return [
        *(f"{order} has a row and no message" for order in sorted({*rows} - {*messages})),
        *(f"{order} has a message and no row" for order in sorted({*messages} - {*rows})),
        *(
            f"{order} has {times} messages"
            for order, times in Counter(messages).items()
            if times > 1
        ),
        *_against_what_was_told(told, rows),
        *_disorder(rows, messages),
    ]


def _against_what_was_told(told: Told, rows: Sequence[Order]) -> Iterator[str]:
    there = {order.token for order in rows}
    for token, outcome in told.items():
        if outcome is Outcome.COMMITTED and token not in there:
            yield f"{token} was said to be committed, and has no row"
        if outcome is Outcome.ABORTED and token in there:
            yield f"{token} was said to be rolled back, and has a row"
    yield from (f"{token} was never begun" for token in sorted(there - told.keys()))


def _disorder(rows: Sequence[Order], messages: Sequence[Order]) -> Iterator[str]:
    """Per key the versions count up from 1, among the rows and, in this order, in the
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


def misjudged(hits: Mapping[Token, bool], rows: Sequence[Order]) -> list[str]:
    """Transactions that ended otherwise than the place of the kill says; `hits` maps
    each to whether it committed.
    """
    there = {order.token for order in rows}
    return [
        f"{token} {'has' if token in there else 'lacks'} a row"
        for token in hits
        if hits[token] != (token in there)
    ]


def wrong_effects(sent: Sequence[Order], effects: Sequence[Order], *, in_order: bool) -> list[str]:
    """What is wrong with the effects that orders had, in the order of their commits;
    each is to have one.
    """
    return [
        *(f"{order} had no effect" for order in sorted({*sent} - {*effects})),
        *(f"{order} had an effect and was not sent" for order in sorted({*effects} - {*sent})),
        *(f"{order} had {times} effects" for order, times in Counter(effects).items() if times > 1),
        *(_disorder(sent, effects) if in_order else ()),
    ]
