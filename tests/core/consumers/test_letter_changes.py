"""Letters that are edited, copied, exported and tried at random: what the tables keep
of them is there as long as their rows, and no longer.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.core.consumers.letters_world import TOPICS, LettersWorld, Place
from tests.core.consumers.world import rows
from txmq.batch import encode_one
from txmq.core.consumers.commands import LeaveGroup, ResetPosition
from txmq.core.consumers.letter_edits import EditLetter
from txmq.core.consumers.letter_exports import NoteExported
from txmq.core.consumers.letter_redrives import RedriveLetters, WantedCopy
from txmq.core.consumers.letter_trials import TryLetter
from txmq.core.retention.relocation import RepointMessages, is_stale_pin, message_of_pin
from txmq.core.state import letter_edits, log_pins
from txmq.core.state.failed_rows import FailedMessage
from txmq.core.topics.topics import CreateTopic
from txmq.errors import RequestRejected
from txmq.model.message import Message
from txmq.store import tables as t

TURNS = 120


class ChangedLetters(LettersWorld):
    """A world whose operator does with letters whatever there is."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.do(CreateTopic("copies", 2))
        self.join("other", *TOPICS)
        self.position = 1 << 40  # of the next batch that is stored
        self.counts = Counter[str]()

    def change(self) -> None:
        """Do something to some open letters."""
        self.random.choice((self.edit, self.copy, self.export, self.attempt, self.relocate))()

    def span(self) -> tuple[int, int]:
        self.position += 100
        return self.position, 100

    def edit(self) -> None:
        for place in self._some():
            row = self.row_at(place)
            reverts = row.edits > 0 and self.random.random() < 0.3
            again = reverts and self.is_reverted(place)
            original = None if row.edits else self.span()
            version = None if reverts else self.span()
            stale = self.random.random() < 0.1
            reply = self.do(
                EditLetter("g", place, row.edits + stale, version, original, "ada", "why")
            )
            refused = stale or again
            assert isinstance(reply, RequestRejected) is refused
            self.counts["edits"] += not refused

    def copy(self) -> None:
        batch = encode_one(
            Message(b"m", "k"), producer_id=b"p" * 16, epoch=0, sequence=0, born_at=1
        )
        copies = []
        for place in self._some():
            row = self.row_at(place)
            copies.append(WantedCopy(place, row.number, row.edits, self.random.randrange(2), batch))
        before = self.state.topics["copies"].end_offsets[:]
        abandon, again = (self.random.random() < 0.3 for _ in range(2))
        command = RedriveLetters(
            "g", "copies", 0, tuple(copies), self.position.to_bytes(16, "big"), abandon, again,
            "ada", "why",
        )  # fmt: skip
        self.span()
        reply = self.do(command)
        after = self.state.topics["copies"].end_offsets
        assert sum(after) - sum(before) == len(reply.done)
        assert len(reply.done) + len(reply.refused) == len(copies)
        assert not (again and reply.refused)
        self.counts["copies"] += len(reply.done)

    def export(self) -> None:
        rows = [(place, self.row_at(place)) for place in self._some()]
        letters = [(*place, row.number, row.edits) for place, row in rows]
        reply = self.do(NoteExported("g", tuple(letters), "ada"))
        assert len(reply.done) == len(letters)
        self.counts["exported"] += len(letters)

    def attempt(self) -> None:
        for place in self._some()[:1]:
            reply = self.do(TryLetter("g", place, self.random.choice(("m", "other")), "ada"))
            self.counts["trials"] += not isinstance(reply, RequestRejected)

    def relocate(self) -> None:
        """Copy what some pins keep, as retention does."""
        pins = [*log_pins.pins_below(self.state, t.SIGN)]
        for pin in self.random.sample(pins, min(len(pins), 3)):
            if not is_stale_pin(self.state, pin):
                message = message_of_pin(self.state, pin)
                assert message is not None
                assert message.position == pin.position
                self.do(RepointMessages(((message, *self.span()),)))
                self.counts["relocated"] += 1

    def leave(self) -> None:
        """End the trials of a member without their outcome."""
        self.do(LeaveGroup("g", "other", "other", lost=True))
        self.join("other", *TOPICS)

    def row_at(self, place: Place) -> FailedMessage:
        topic, partition, offset = place
        return self.rows()[self.state.topics[topic].topic_id, partition, offset]

    def is_reverted(self, place: Place) -> bool:
        topic, partition, offset = place
        ref = (self.group().group_id, self.state.topics[topic].topic_id, partition, offset)
        newest = letter_edits.version(self.state, ref, self.row_at(place).edits)
        return newest is not None and newest.reverts

    def check(self) -> None:
        """Check that rows, versions, copies and pins agree."""
        group_id, found = self.group().group_id, self.rows()
        pins = {pin.position: pin for pin in log_pins.pins_below(self.state, t.SIGN)}
        versions, copies = (Counter[tuple[int, ...]]() for _ in range(2))
        for table, counts in ((t.EDITS, versions), (t.COPIES, copies)):
            for key, _row in self.state.tables[table].range(b""):
                counts[t.EDIT_KEY.unpack(key)[:4]] += 1
        for key, raw in self.state.tables[t.EDITS].range(b""):
            pin = pins.pop(raw[0], None)
            at = t.EDIT_KEY.unpack(key)[:4]
            assert raw[5] or pin is not None, "a version of its own has a pin"
            assert pin is None or tuple(pin[1:]) == at
        assert versions == {
            (group_id, *ref): row.edits + 1 for ref, row in found.items() if row.edits
        }
        assert copies == {(group_id, *ref): row.copies for ref, row in found.items() if row.copies}
        for pin in pins.values():
            row = found.get((pin.topic_id, pin.partition, pin.offset))
            assert row is not None, "a pin of nothing"
            assert row.position == pin.position


@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_of_changed_letters_ends_with_their_rows(seed: int) -> None:
    world = ChangedLetters(seed)
    for _ in range(TURNS):
        world.random.choice((world.turn, world.change, world.change))()
        if world.random.random() < 0.05:
            world.leave()
        world.check()
    assert min(world.counts[name] for name in ("edits", "copies", "exported", "trials")) > 0
    assert rows(world.replayed()) == rows(world.state)
    for topic in TOPICS:
        world.do(ResetPosition("g", topic, "first", (), reprocess=False, dry_run=False))
    world.check()
    assert [*world.state.tables[t.EDITS].range(b"")] == []
    assert [*world.state.tables[t.COPIES].range(b"")] == []
    assert [*log_pins.pins_below(world.state, t.SIGN)] == []
