"""Pages in states that are rare, rendered from the replies of a broker: a template that
asks for a field which a reply lacks answers 500.
"""

from __future__ import annotations

from typing import Any

from tests.admin.console_support import ConsoleInMemory
from tests.broker.calls.test_letter_edits import exported
from tests.broker.calls.test_letter_redrives import GivingOffice
from tests.broker.support import BrokerInMemory
from txmq.core.topics import topics
from txmq.core.transactions.half_storage import StorePart
from txmq.model.actions import ReplayAction
from txmq.model.bundle import BundleReceipt
from txmq.model.decider import (
    ByPostgres,
    Decider,
)  # fmt: skip
from txmq.model.message import Message
from txmq.model.own_topics import AUDIT
from txmq.store.log.segment import segment_path

WHO = {"operator": "ada", "reason": "a test"}


class Letters(GivingOffice):
    """An office whose letters have all that a letter can have, and their console."""

    def __init__(self) -> None:
        super().__init__()
        self.broker.start()
        self.give(0)
        self.fetch("h", "b")
        self.nack_of_other(0)
        self.redrive(0)
        self.edit(1, body=b"mended")
        self.edit(1, edits=1, revert=True)
        exported(self, (2, 3, 0))
        self.call("dlq.abandon", group="g", letters=[["t", 0, 3]], **WHO)
        self.die(Message(b"\xff\x00", None), Message(b"", "k2"), Message(b'{"a": 1}', "k3"))
        self.die(Message(b"x", "k4"), Message(b"x" * 300_000, "k5"), Message(b"x", "k6"))
        self.die(Message(b"b", "k7", headers=EVENT))
        self.console = ConsoleInMemory(self.broker)

    def die(self, *messages: Message) -> None:
        for message in messages:
            self.send(message)
        self.fetch()
        for _ in messages:
            self.nack(self.number, {"type": "", "text": "", "fingerprint": ""})
            self.number += 1

    def reserve(self, offset: int) -> str:
        """Let an undecided transaction replay a letter."""
        token = self.broker.token(offset)
        action = ReplayAction("g", "t", 0, offset)
        _store(self.broker, token, ByPostgres(1, 1, 5, 7), actions=(action,))
        return token.hex()


EVENT = {"ce_specversion": "1.0", "ce_type": "made"}


def _store(broker: BrokerInMemory, token: bytes, decider: Decider, **options: Any) -> None:
    part = StorePart(
        token=token, part=0, sealed=True, commit=False, digest=b"d" * 32, epoch=0, batches=(),
        service="shop", check_after=0, decider=decider, actions=(),
    )  # fmt: skip
    reply = broker.do(part._replace(**options))
    assert isinstance(reply, BundleReceipt), reply


def _shown(console: ConsoleInMemory, path: str, *words: str, user: str = "") -> None:
    page = console.get(path, user)
    assert page.status == 200, (path, page.text)
    for each in words:
        assert each in page.text, (path, each, page.text)


def test_letters_with_all_that_happens_to_letters() -> None:
    office = Letters()
    console, token = office.console, office.reserve(4)
    office.call("plan.create", name="p", group="g", select={"key": "k3"}, settings={}, **WHO)
    office.broker.pass_time(1)
    office.call("dlq.try", group="g", topic="t", partition=0, offset=7, member="a", **WHO)
    for offset, words in (
        (0, ("Copies", "for h", "other", "to the other shop")),
        (1, ("version 2", "back to the original: a wrong amount")),
        (2, ("Exported",)),
        (3, ("State abandoned", "Reason a test")),
        (4, (f"A transaction replays it: {token}", "Key –", "hex")),
        (5, ("The body is empty.", "no type", "no text")),
        (6, ("A plan has it: p", "json")),
        (7, ("State replaying", "On trial with a")),
        (8, ("The rest is left out.", "Only the beginning of 300,000 bytes")),
        (10, ("cloudevent", "made", "Headers")),
    ):
        _shown(console, f"/letters/g/t/0/{offset}", *words)
    _shown(console, "/letters/h/t/0/0", "Given by g", "Error H")
    _shown(console, "/letters/g/t/0/1/edit", "Back to what was published")
    _shown(console, "/letters/g/t/0/4/edit", "txmq dlq edit g t/0/4 --file FILE")
    office.edit(9, body=b"mended")
    office.damage(9)
    _shown(console, "/letters/g/t/0/9", "damaged at position", "Edit")
    _shown(console, "/letters/g/t/0/9/edit", "Back to what was published")
    _shown(console, "/letters/g?filter=state:any", "abandoned", "edited", "damaged")
    _shown(console, "/letters/g?filter=text:nowhere", "No letter of this group matches")
    _shown(console, f"/transactions/{token}", "Action replay g t 0 4", "has no messages")
    for path in ("t/0/4", "t/0/5", "t/0/8", "t/0/10"):
        assert console.get(f"/topics/{path}").status == 200, path
    _shown(console, "/topics/t/messages")


def _damage(broker: BrokerInMemory, topic: str, offset: int) -> None:
    """Flip a bit of a message in the log."""
    state = broker.engine.state
    found = state.topics[topic]
    [(_base, entry)] = topics.entry_at(state, found.topic_id, 0, offset)
    file = broker.fs.open(segment_path("/data", 0), write=True)
    (byte,) = file.pread(1, entry.position + entry.length - 8)
    file.pwrite([bytes([byte ^ 16])], entry.position + entry.length - 8)


def test_an_entry_of_the_audit_topic_that_is_damaged_is_named() -> None:
    console = ConsoleInMemory()
    for name in ("one", "two"):
        console.broker.ask("topic.create", name=name, partitions=1)
        console.broker.ask("topic.alter", name=name, writable=False, **WHO)
    _damage(console.broker, AUDIT, 0)
    _shown(console, "/audit", "topic:two", "damaged at position")
