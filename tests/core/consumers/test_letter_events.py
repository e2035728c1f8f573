"""The bytes of the events about notes and selections, which logs hold for ever."""

from __future__ import annotations

from pathlib import Path

from txmq.core.events import base
from txmq.core.events.consumers import FenceChange, FingerprintNoted, SelectionSaved
from txmq.core.events.letters import LettersGiven
from txmq.core.state import failed_rows
from txmq.core.state.failed_rows import FailedMessage, Move

GOLDEN = Path(__file__).parents[2] / "golden" / "letter-events-v1.bin"
GIVEN = Path(__file__).parents[2] / "golden" / "given-events-v1.bin"
EVENTS = (
    FingerprintNoted(7, "f-1", "see ticket 9: é", "ada"),
    SelectionSaved("bees", '{"error_type":"B"}', "ada: for Monday"),
)
ROW = FailedMessage(1, 0, 0, -5, 4_096, 300, 2, 1_000, 900, given_by="billing", accepted=True)
NOTHING: tuple[tuple[Move, ...], tuple[FenceChange, ...]] = ((), ())
GIVEN_EVENT = LettersGiven(
    7,
    8,
    ((1, 0, 17, True),),
    ((Move(1, 0, 17, ROW),), (FenceChange(1, -5, 1, 0, 17, 9),)),
    NOTHING,
    "ada",
    "theirs",
)


def test_the_events_are_those_in_the_golden_file() -> None:
    assert [base.KINDS[type(event)] for event in EVENTS] == [120, 121]
    assert b"".join(map(base.encode, EVENTS)) == GOLDEN.read_bytes()
    for event in EVENTS:
        assert base.decode(base.KINDS[type(event)], base.encode(event)) == event


def test_letters_that_were_given_are_those_in_the_golden_file() -> None:
    assert base.KINDS[LettersGiven] == 144
    assert base.encode(GIVEN_EVENT) == GIVEN.read_bytes()
    again = base.decode(144, base.encode(GIVEN_EVENT))
    assert isinstance(again, LettersGiven)
    assert failed_rows.decode_move(again.theirs[0][0]).row == ROW
