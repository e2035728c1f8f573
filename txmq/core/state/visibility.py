"""Gates: a large group is published piece by piece, and seen whole or not at all.

While it goes on, readers of its partitions stop at a gate: the first offset that
belongs to it. What others publish behind a gate has its place and is seen later. One
large group is published at a time, so all gates go up at once, with the record of its
last piece, and are out of the way when that record is durable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from txmq.store import tables as t

if TYPE_CHECKING:
    from collections.abc import Iterable

    from txmq.core.state.state import State

Spot = tuple[int, int]  # topic id, partition


class Gate(NamedTuple):
    """A row of table `gates`. `lifted` is the log position that must be durable before
    anybody may pass; 0 = shut.
    """

    offset: int
    token: bytes
    lifted: int = 0


def publisher(state: State) -> bytes | None:
    """The token of the large group that is being published."""
    return next((gate.token for gate in state.gates.values() if not gate.lifted), None)


def end(state: State, topic_id: int, partition: int, durable: int | None = None) -> int:
    """The offset at which readers have to stop; `durable` None = as of this moment in
    the log, durable or not.
    """
    gate = state.gates.get((topic_id, partition))
    if gate is None or (gate.lifted and (durable is None or gate.lifted <= durable)):
        return state.topics_by_id[topic_id].ends[partition]
    return gate.offset


def is_shut(state: State, spot: Spot) -> bool:
    """Whether something of this partition is yet to be seen, durable or not."""
    gate = state.gates.get(spot)
    return gate is not None and not gate.lifted


def all_out_of_the_way(state: State, durable: int) -> bool:
    """Whether the next large group may be published: its gates must not replace one
    that still stops somebody.
    """
    return all(gate.lifted and gate.lifted <= durable for gate in state.gates.values())


def shut(state: State, token: bytes, places: Iterable[tuple[Spot, int]]) -> None:
    """Apply: readers stop here, unless they have to stop earlier already. Gates that
    were lifted are gone for good.
    """
    for spot in [spot for spot, gate in state.gates.items() if gate.lifted]:
        _drop(state, spot)
    for spot, offset in places:
        if spot not in state.gates:
            _put(state, spot, Gate(offset, token))


def spread(state: State, places: Iterable[tuple[Spot, int]]) -> None:
    """Apply: a group published across a gate is seen when that goes up, and not before:
    in no partition of it.
    """
    token = publisher(state)
    found = list(places)
    if token is None or not any(spot in state.gates for spot, _offset in found):
        return
    for spot, offset in found:
        if spot not in state.gates:
            _put(state, spot, Gate(offset, token))


def lift(state: State, position: int) -> None:
    """Apply: readers may pass once the log is durable up to `position`."""
    for spot, gate in state.gates.items():
        _put(state, spot, gate._replace(lifted=position))
        state.published.add(spot[0])


def forget_lifted(state: State) -> None:
    """Apply: everything before this record is durable."""
    for spot in [spot for spot, gate in state.gates.items() if gate.lifted]:
        _drop(state, spot)


def _put(state: State, spot: Spot, gate: Gate) -> None:
    state.gates[spot] = gate
    state.tables[t.GATES].put(t.PARTITION_KEY.pack(*spot), gate)


def _drop(state: State, spot: Spot) -> None:
    del state.gates[spot]
    state.tables[t.GATES].delete(t.PARTITION_KEY.pack(*spot))
