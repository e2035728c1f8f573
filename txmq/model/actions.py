"""Actions of a transaction besides its messages (docs/FORMATS.md 2.1).

An action is a tuple of a kind and its fields. It stands so on the wire, in the log and
in table rows, and takes effect when the transaction commits.
"""

from __future__ import annotations

from typing import NamedTuple, Self

from txmq.model.decider import KindTuple

RELAY = "relay"  # the service of relays: who may write it moves the watermarks


class _Ack(NamedTuple):
    kind: str
    group: str
    member: str
    generation: int
    topic: str
    partition: int
    start: int
    end: int


class AckAction(KindTuple, _Ack):
    """Acknowledge messages `start` to `end` - 1, which are leased to the member."""

    __slots__ = ()

    def __new__(
        cls,
        group: str,
        member: str,
        generation: int,
        topic: str,
        partition: int,
        start: int,
        end: int,
    ) -> Self:
        return super().__new__(cls, "ack", group, member, generation, topic, partition, start, end)


class _Replay(NamedTuple):
    kind: str
    group: str
    topic: str
    partition: int
    offset: int


class ReplayAction(KindTuple, _Replay):
    """Deliver a dead letter again."""

    __slots__ = ()

    def __new__(cls, group: str, topic: str, partition: int, offset: int) -> Self:
        return super().__new__(cls, "replay", group, topic, partition, offset)


class _Watermark(NamedTuple):
    kind: str
    name: str
    before: int
    to: int
    at: int


class WatermarkAction(KindTuple, _Watermark):
    """Move the watermark of a source from `before` to `to`.

    `at` is the time of the source's commit in microseconds, for information.
    """

    __slots__ = ()

    def __new__(cls, name: str, before: int, to: int, at: int) -> Self:
        return super().__new__(cls, "mark", name, before, to, at)


BundleAction = AckAction | ReplayAction | WatermarkAction


def read_action(row: tuple[object, ...]) -> BundleAction | None:
    """Return the action that a request or a row holds; None = it has no action's
    form.
    """
    match row:
        case (
            "ack",
            str(group),
            str(member),
            int(generation),
            str(topic),
            int(partition),
            int(start),
            int(end),
        ):
            return AckAction(group, member, generation, topic, partition, start, end)
        case ("replay", str(group), str(topic), int(partition), int(offset)):
            return ReplayAction(group, topic, partition, offset)
        case ("mark", str(name), int(before), int(to), int(at)):
            return WatermarkAction(name, before, to, at)
    return None
