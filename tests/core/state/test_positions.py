"""Stored positions of a group: small, and read back unchanged."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from txmq.core.state import positions
from txmq.core.state.positions import Grant, GroupPosition, Redelivery


def scattered(messages: int, leases: int, left: set[int]) -> GroupPosition:
    """Messages leased under so many leases, of which only `left` are not settled."""
    position = GroupPosition()
    position.remove_ready(0, messages)
    for lease in range(leases):
        position.leased.put(
            lease * messages // leases,
            (lease + 1) * messages // leases,
            Grant(lease, lease % 3 + 1),
        )
    for offset in set(range(messages)) - left:
        position.leased.cut(offset, offset + 1)
        position.settle(offset, offset + 1)
    return position


@given(
    st.integers(1, 400),
    st.integers(1, 5),
    st.sets(st.integers(0, 399)),
    st.sets(st.integers(0, 399)),
)
def test_scattered_leases_and_redeliveries_are_read_back(
    messages: int, leases: int, left: set[int], back: set[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(positions, "SCATTERED", 3)
        position = scattered(messages, leases, left)
        for offset in back & left & set(range(messages)):
            [(_start, _end, grant)] = position.leased.cut(offset, offset + 1)
            position.redeliver_range(offset, offset + 1, Redelivery(grant.attempt + 1))
        row = position.to_row()
        again = GroupPosition.from_row(msgpack.unpackb(msgpack.packb(row), use_list=False))
    assert (again, again.to_row()[:3]) == (position, row[:3])


def test_a_thousand_gaps_take_less_than_a_kibibyte() -> None:
    position = scattered(6_000, 1, set(range(0, 6_000, 6)))
    assert len(position.leased) == 1_000
    assert len(msgpack.packb(position.to_row())) <= 1_024
    for item in list(position.leased):
        position.leased.cut(item.start, item.end)
        position.redeliver_range(item.start, item.end, Redelivery(1))
    assert len(msgpack.packb(position.to_row())) <= 1_024
