"""The bytes of the events of operators' changes, which logs hold for ever."""

from __future__ import annotations

from pathlib import Path

from txmq.core.events import base
from txmq.core.events.audit import AuditMoved, AuditStored, OperatorActed, parts_in
from txmq.core.events.base import RecordContext
from txmq.core.events.consumers import FingerprintNoted

GOLDEN = Path(__file__).parents[1] / "golden" / "audit-events-v1.bin"
NOTED = FingerprintNoted(7, "f-1", "see ticket 9: é", "ada")
STORED = AuditStored(2_147_482_624, 5, 321)
MOVED = AuditMoved(2_147_482_624, ((5, 4_096, 1_234_567), (6, 4_500, 1_234_888)))
ACTED = OperatorActed(((120, tuple(NOTED), 11), (151, tuple(STORED), 321)))


def test_the_events_are_those_in_the_golden_file() -> None:
    assert [base.KINDS[type(event)] for event in (ACTED, STORED, MOVED)] == [
        150,
        151,
        152,
    ]
    assert base.encode(ACTED) + base.encode(MOVED) == GOLDEN.read_bytes()
    again = base.decode(150, base.encode(ACTED))
    assert isinstance(again, OperatorActed)
    parts = list(parts_in(again, RecordContext(64, 500, 100, 1, 1)))
    assert [event for event, _context in parts] == [NOTED, STORED]
    assert [context.attachment_position for _event, context in parts] == [100, 111]
