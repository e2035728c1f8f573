"""The messages of a plan's letters, in bulk."""

from __future__ import annotations

from typing import Any

import pytest

from tests.broker.access.support import BrokerWithUsers
from tests.broker.calls.test_letter_edits import EditOffice
from txmq import errors
from txmq.batch import BatchView, encode, verify
from txmq.broker.requests import letters as requests
from txmq.core.topics.sends import StoreBatch
from txmq.model.message import Message
from txmq.wire.chunks import Chunks, unpack_chunks
from txmq.wire.data_requests import Opcode, ReadLetters, pack_read_letters
from txmq.wire.status import to_error

ROWS = 12


class PlanOffice(EditOffice):
    """An office with letters 0 to 3 in batches of their own, and a batch of 12 more."""

    def __init__(self) -> None:
        super().__init__()
        messages = [
            Message(b"m%d" % n, f"k{n}", headers={"n": str(n)} if n % 2 else None)
            for n in range(4, 4 + ROWS)
        ]
        data = encode(messages, producer_id=b"q" * 16, epoch=0, sequence=0, born_at=1)
        self.broker.do(StoreBatch("t", 0, 0, data, verify(data)))
        self.fetch()
        for offset in range(4, 4 + ROWS):
            self.nack(offset, {"type": "A", "text": "no", "bases": [], "fingerprint": "f"})

    def plan(self, *offsets: int, name: str = "p") -> None:
        self.call("plan.create", name=name, group="g", settings={"rate": 0})
        self.call("plan.add", name=name, letters=[("t", 0, offset) for offset in offsets])

    def read(self, plan: str = "p", start: int = 0, end: int = 99, size: int = 1 << 20) -> Chunks:
        frame = self.ask(ReadLetters(0, start, end, size, plan, "t"))
        assert not frame.status, frame.payload
        return unpack_chunks(frame.payload)

    def ask(self, request: ReadLetters) -> Any:
        return self.client.ask(Opcode.LETTERS, pack_read_letters(request))

    def found(self, plan: str = "p") -> dict[int, tuple[Any, ...]]:
        return rows_of(self.read(plan))


def rows_of(reply: Chunks) -> dict[int, tuple[Any, ...]]:
    found = {}
    for chunk in reply.chunks:
        view = BatchView(bytes(chunk.batch))
        for row in range(chunk.first_row, chunk.first_row + chunk.rows):
            columns = (view.message_ids, view.keys, view.headers, view.bodies)
            found[chunk.base_offset + row] = tuple(column[row] for column in columns)
    return found


@pytest.mark.parametrize(
    "held", [range(4 + ROWS), (0, 2, 5, 6, 8, 15), range(4, 14), (3, *range(4, 10), 12)]
)
def test_letters_that_a_plan_holds_come_as_they_were_sent(held: Any) -> None:
    """Whole batches, parts of them, and single rows."""
    office = PlanOffice()
    office.plan(*range(4 + ROWS), name="all")
    everything = office.found("all")
    assert [everything[4 + n][3] for n in range(ROWS)] == [b"m%d" % (4 + n) for n in range(ROWS)]
    office.call("plan.cancel", name="all", operator="ada", reason="r")
    office.plan(*held)
    reply = office.read()
    assert reply.next_offset == 99
    assert rows_of(reply) == {offset: everything[offset] for offset in held}
    # page by page, the same: each has a letter at least
    at, paged = 0, dict[int, Any]()
    while at < 99:
        page = office.read(start=at, size=1)
        assert page.next_offset > at
        at = page.next_offset
        paged |= rows_of(page)
    assert paged == rows_of(reply)
    assert rows_of(office.read(start=2, end=6)).keys() == set(held) & {2, 3, 4, 5}


@pytest.mark.parametrize(("rows", "most"), [(1, 2), (2, 3), (3, 5), (4, 100), (16, 100)])
def test_letters_come_once_however_few_are_read_in_a_step(
    monkeypatch: pytest.MonkeyPatch, rows: int, most: int
) -> None:
    monkeypatch.setattr(requests, "STEP_ROWS", rows)
    monkeypatch.setattr(requests, "MOST_ROWS", most)
    office = PlanOffice()
    office.plan(*range(4 + ROWS))
    chunks = office.read().chunks
    offsets = [
        chunk.base_offset + chunk.first_row + n for chunk in chunks for n in range(chunk.rows)
    ]
    assert offsets == list(range(4 + ROWS))


def test_a_batch_that_a_step_has_begun_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "STEP_ROWS", 4 + ROWS // 2)
    office = PlanOffice()
    office.plan(*range(4 + ROWS))
    assert [chunk.rows for chunk in office.read().chunks] == [1, 1, 1, 1, ROWS]


def test_letters_that_the_plan_does_not_hold_are_left_out() -> None:
    office = PlanOffice()
    office.edit(1, body=b"mended", headers={"by": "ada"})
    office.plan(0, 1, 2, 3, 4)
    office.plan(5, name="other")
    office.call("dlq.abandon", group="g", letters=[["t", 0, 0]], operator="ada", reason="r")
    office.damage(2)
    found = office.found()
    assert found.keys() == {1, 3, 4}, "0 is abandoned, 2 is damaged"
    assert found[1][2:] == ({"by": "ada"}, b"mended"), "as it was edited"
    assert office.found("other").keys() == {5}
    office.call("plan.cancel", name="other", operator="ada", reason="r")
    assert office.found("other") == {}, "anybody may replay it now"
    for request, error in (
        (ReadLetters(0, 0, 9, 1, "none", "t"), errors.UnknownPlan),
        (ReadLetters(0, 0, 9, 1, "p", "none"), errors.UnknownTopic),
        (ReadLetters(7, 0, 9, 1, "p", "t"), errors.UnknownPartition),
        (ReadLetters(0, 9, 9, 1, "p", "t"), errors.BadRequest),
    ):
        refused = office.ask(request)
        assert isinstance(to_error(refused.status, refused.payload), error)


def test_bodies_of_letters_are_for_readers_of_the_group() -> None:
    broker = BrokerWithUsers()
    broker.grant("nobody", "describe", "group:*")
    broker.grant("nobody", "operate", "group:*")
    request = pack_read_letters(ReadLetters(0, 0, 9, 1, "p", "t"))
    for granted, error in ((False, errors.AccessDenied), (True, errors.UnknownTopic)):
        if granted:
            broker.grant("nobody", "read", "group:*")
        refused = broker.log_in("nobody").ask(Opcode.LETTERS, request)
        assert isinstance(to_error(refused.status, refused.payload), error)
