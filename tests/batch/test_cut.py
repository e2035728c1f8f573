"""Neighbouring rows of a batch as a batch of their own."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests import strategies as our
from txmq.batch import BatchView, cut_rows, encode, verify


@given(st.data())
def test_rows_that_are_cut_out_are_the_rows_that_were_in(data: st.DataObject) -> None:
    rows = data.draw(our.message_lists)
    codec = data.draw(our.codecs)
    first = data.draw(st.integers(0, len(rows) - 1))
    count = data.draw(st.integers(1, len(rows) - first))
    born_at = list(range(7, 7 + len(rows)))
    whole = encode(rows, producer_id=b"p" * 16, epoch=3, sequence=5, born_at=born_at, codec=codec)
    cut = cut_rows(whole, first, count)
    verify(cut)
    there, wanted = BatchView(cut), BatchView(whole)
    for name in ("bodies", "keys", "tags", "headers", "born_at", "deliver_at", "expire_at"):
        assert getattr(there, name) == getattr(wanted, name)[first : first + count], name
    assert there.message_ids == wanted.message_ids[first : first + count]
    alone = encode(
        rows[first : first + count], producer_id=b"p" * 16, epoch=3, sequence=5 + first,
        born_at=born_at[first : first + count],
    )  # fmt: skip
    assert there.tag_filter == BatchView(alone).tag_filter
    assert cut == alone
