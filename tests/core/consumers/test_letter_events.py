"""The bytes of the events about notes and selections, which logs hold for ever."""

from __future__ import annotations

from pathlib import Path

from txmq.core.events import base
from txmq.core.events.consumers import FingerprintNoted, SelectionSaved

GOLDEN = Path(__file__).parents[2] / "golden" / "letter-events-v1.bin"
EVENTS = (
    FingerprintNoted(7, "f-1", "see ticket 9: é", "ada"),
    SelectionSaved("bees", '{"error_type":"B"}', "ada: for Monday"),
)


def test_the_events_are_those_in_the_golden_file() -> None:
    assert [base.KINDS[type(event)] for event in EVENTS] == [120, 121]
    assert b"".join(map(base.encode, EVENTS)) == GOLDEN.read_bytes()
    for event in EVENTS:
        assert base.decode(base.KINDS[type(event)], base.encode(event)) == event
