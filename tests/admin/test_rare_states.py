"""Pages in states that are rare, rendered from the replies of a broker: a template that
asks for a field which a reply lacks answers 500.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.admin.console_support import ConsoleInMemory, Reply
from tests.broker.access.support import BrokerWithUsers
from tests.broker.access.test_quotas import Limited
from tests.broker.calls.test_letter_edits import exported
from tests.broker.calls.test_letter_redrives import GivingOffice
from tests.broker.calls.test_policy_calls import PolicyDesk
from tests.broker.support import BrokerInMemory
from txmq.batch import encode, verify
from txmq.broker.calls import plan_checks
from txmq.core.consumers import group_views
from txmq.core.consumers.circuit_breaker import open_breaker
from txmq.core.consumers.commands import JoinGroup
from txmq.core.replay import orders
from txmq.core.topics import topics
from txmq.core.topics.sends import StoreBatch
from txmq.core.topics.topics import CreateTopic
from txmq.core.transactions.decisions import DecideTransaction
from txmq.core.transactions.half_storage import StorePart
from txmq.core.transactions.model import get
from txmq.model.actions import ReplayAction
from txmq.model.bundle import BundleReceipt
from txmq.model.decider import (
    BrokerBranch,
    ByForeign,
    ByHome,
    ByPostgres,
    Decider,
    PostgresBranch,
)
from txmq.model.message import Decision, Message
from txmq.model.own_topics import AUDIT
from txmq.model.units import SECOND
from txmq.store.log.segment import segment_path
from txmq.wire.calls.encoding import encode_call
from txmq.wire.data_requests import Opcode

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
        _store(self.broker, token, ByPostgres(1, 1, 5, 7, 1), actions=(action,))
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
    _shown_of(console.get(path, user), *words)


def _shown_of(page: Reply, *words: str) -> None:
    assert page.status == 200, page.text
    for each in words:
        assert each in page.text, (each, page.text)


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
    _flip(broker, entry.position + entry.length - 8)


def _flip(broker: BrokerInMemory, position: int) -> None:
    file = broker.fs.open(segment_path("/data", 0), write=True)
    (byte,) = file.pread(1, position)
    file.pwrite([bytes([byte ^ 16])], position)


def test_an_entry_of_the_audit_topic_that_is_damaged_is_named() -> None:
    console = ConsoleInMemory()
    for name in ("one", "two"):
        console.broker.ask("topic.create", name=name, partitions=1)
        console.broker.ask("topic.alter", name=name, writable=False, **WHO)
    _damage(console.broker, AUDIT, 0)
    _shown(console, "/audit", "topic two", "damaged at position")


def test_a_transaction_whose_messages_are_damaged_can_be_decided() -> None:
    broker = BrokerInMemory()
    token = broker.half(1, Message(b"rotten" * 9))
    row = get(broker.engine.state, bytes.fromhex(token))
    assert row is not None
    _flip(broker, row.batches[0].position + 84)
    console = ConsoleInMemory(broker)
    _shown(console, f"/transactions/{token}", "damaged at position", "Roll back by hand")


def test_transactions_in_states_that_are_rare() -> None:
    broker = BrokerInMemory()
    broker.start()
    console, log_id = ConsoleInMemory(broker), broker.log.log_id.bytes
    first = broker.half(1, Message(b"1", "a", "tag"), Message(b"1", "b"))
    data = encode([Message(b"x", "a")], producer_id=b"p" * 16, epoch=0, sequence=0, born_at=1)
    broker.do(StoreBatch("t", 0, 0, data, verify(data)))
    second = broker.half(2, Message(b"2", "b"), Message(b"2", "a"))
    broker.ask("tx.decide", token=second, outcome="COMMIT", force=True, **WHO)
    _shown(console, f"/transactions/{first}", "Holds up", "a plain send queued", second, "tag")
    _shown(console, f"/transactions/{second}", "Waits for", first, "What operators did")
    _shown(console, "/transactions?state=waiting", second)
    broker.do(DecideTransaction(bytes.fromhex(second), Decision.ROLLBACK, "producer shop"))
    _shown(console, f"/transactions/{second}", "Decisions that were refused")
    _shown(console, "/transactions?state=conflicts", "producer shop")
    branches = (BrokerBranch(log_id), PostgresBranch(1, 5, "shop", "ada", "gid-7", 7, 1, 1))
    xa: dict[int, tuple[Decider, str]] = {
        3: (ByHome(b"l" * 16, broker.token(3)), "Recovery decides it by itself"),
        4: (ByForeign(7, b"gtrid", b"bqual"), "Another transaction manager decides"),
    }
    for number, (decider, advice) in xa.items():
        token = broker.token(number)
        _store(broker, token, decider, participants=branches, check_after=6 * SECOND)
        who = "home broker" if decider.kind == "home" else "another XA transaction manager"
        words = ("gid-7 in PostgreSQL database shop, prepared by ada", advice, who)
        _shown(console, f"/transactions/{token.hex()}", *words)
        _shown(console, "/transactions/xa", token.hex(), advice)
    by_hand = broker.token(4).hex()
    broker.ask("tx.decide", token=by_hand, outcome="ROLLBACK", force=True, **WHO)
    _shown(console, f"/transactions/{by_hand}", "Heuristic decisions", "Data differ", "Forget them")
    _shown(console, "/transactions/xa?heuristic=yes", by_hand, "Data differ")
    unfinished = broker.half(5, Message(b"5"), sealed=False)
    _shown(console, "/transactions?state=open", unfinished)
    _shown(console, "/transactions?limit=1", "The oldest 1.")
    broker.pass_time(7_200)
    _shown(console, "/transactions?state=in-doubt", first, unfinished)
    _shown(console, "/transactions/xa", "No answer came", "in doubt")
    _shown(console, f"/transactions/{first}", "State in doubt", "no resolver is configured")


def test_a_group_in_states_that_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_views, "MAX_FENCES_LISTED", 1)
    office = GivingOffice()
    office.broker.start()
    console = ConsoleInMemory(office.broker)
    for number in range(6):
        office.broker.do(CreateTopic(f"t-{number}", 4))
    topics = ["t", *(f"t-{number}" for number in range(6))]
    joined: Any = office.client.call(
        "consumer.join", group="h", mode="ordered", member="b", instance="b", topics=topics
    )
    office.other = joined
    known = {"group": "h", "member": "b", "generation": joined["generation"]}
    office.client.call("consumer.heartbeat", **known, paused=["t-3"])
    retry = {"delays_us": [1_000], "retries": 3}
    office.call("group.alter", group="h", lease_ms=9_000, retry=retry, **WHO)
    office.call("group.pause", group="h", topic="t-1", **WHO)
    office.give(0, 1)
    office.fetch("h", "b")
    for offset in (0, 1):
        office.nack_of_other(offset)
    words = (
        "Resume t-1",
        "Pause t-2",
        "by an operator",
        "delays: 1 ms; retries: 3",
        "lease 9 s",
        "and 5 more",
        "pauses t-3",
    )
    _shown(console, "/groups/h", *words, "Fenced keys", "The first 1 of 2.")
    _shown(console, "/groups", "and 2 more")
    office.call("group.pause", group="h", **WHO)
    _shown(console, "/groups/h", "State paused", "Resume")
    office.call("group.resume", group="h", **WHO)
    open_breaker(office.broker.engine.state.groups.by_name["h"], "f", "E", office.broker.now())
    _shown(console, "/groups/h", "Guarded", "State guarded")
    _damage(office.broker, "t", 0)
    _shown(console, "/groups/h", "hash")
    _shown(console, "/groups/h/reset?topic=t&to=first&reprocess=yes", "What it would do")
    assert "The group is there already" not in console.get("/groups/h/reset?topic=t&to=first").text
    office.call("topic.delete", name="t", **WHO)
    for path in ("groups/g", "groups/h", "groups", "letters/g", "topics", "letters/g/t/0/1"):
        assert console.get(f"/{path}").status in (200, 404), path


def test_plans_and_policies_in_states_that_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = PolicyDesk()
    console = ConsoleInMemory(desk.broker)
    slow = {"rate": 1, "ramp_s": 0, "start": True}
    desk.plan("run", select={"key": "k1"}, settings=slow)
    _shown(console, "/plans/run", "Time left", "delivered 1")
    _shown(console, "/plans/run?outcome=died_again", "No letter has this outcome")
    desk.ask("plan.pause", name="run", **WHO)
    _shown(console, "/plans/run", "State paused", "by an operator")
    _shown(console, "/plans", "paused")
    desk.plan("two", select={"key": "k2"}, settings={"second_approver": True})
    _shown(console, "/plans/two", "nobody yet", "Approve")
    desk.ask("plan.approve", name="two", operator="bob", reason="")
    _shown(console, "/plans/two", "Approved by bob")
    desk.plan("built", select=None, settings={})
    _shown(console, "/plans/built", "State building", "This plan has no letters", "Complete")
    desk.plan("gone", select={"key": "k3"}, settings={})
    desk.ask("dlq.abandon", group="g", letters=[["t", 0, 3]], **WHO)
    _shown(console, "/plans/gone/check", "Would be skipped", "abandoned 1")
    monkeypatch.setattr("txmq.admin.console.plans.MAX_CHECKS", 1)
    monkeypatch.setattr(plan_checks, "CHECKED", 1)
    _shown(console, "/plans/gone/check", "txmq plan check gone judges all")
    desk.ask("plan.abandon", name="gone", **WHO)
    desk.broker.pass_time(1)
    _shown(console, "/plans/gone", "skipped 1", "ended")
    open_breaker(desk.group(), "f", "E", desk.broker.engine.now())
    desk.plan("held", select={"key": "k4"})
    _shown(console, "/plans/held", "whose circuit breaker is open")
    desk.ask("group.resume", group="g", **WHO)
    _shown(console, "/plan/new?filter=errr:x", "errr")
    _shown(console, "/plan/new", "Name a group")
    monkeypatch.setattr(orders, "MAX_UNFINISHED", 1)
    desk.policy(after_s=1, on_version=True, select={"error_type": "B"})
    desk.broker.pass_time(20)
    _shown(
        console, "/policies", "a new version joins", "no limit", "waits for", "room for its plan"
    )
    monkeypatch.setattr(orders, "MAX_UNFINISHED", 9)
    desk.broker.pass_time(20)
    _shown(console, "/policies", "g-auto-", "the end of its last plan")
    desk.ask("group.delete", group="g", **WHO)
    for path in ("/plans", "/plans/run", "/plans/two/check", "/policies"):
        assert console.get(path).status == 200, path


def test_users_with_tokens_quotas_and_refusals() -> None:
    broker = Limited(requests_per_s=1, topics=3)
    broker.root.call(
        "token.add", name="shop", token="ci", digest="0" * 64, expire_s=3_600, reason="ci"
    )
    for _ in range(40):
        broker.shop.ask(Opcode.CALL, encode_call("topic.list", {}))
    console = ConsoleInMemory(broker)
    words = ("ci", "Revoke the token", "Throttled Requests per second:", "the last time")
    _shown(console, "/users/shop", *words, user="root")
    _shown(console, "/users", "throttled", user="root")
    _shown(console, "/me", "none", "✗", user="nobody")


def test_users_see_what_they_may_not_do() -> None:
    broker = BrokerWithUsers()
    broker.do(CreateTopic("orders", 1))
    data = encode([Message(b"secret", "k")], producer_id=b"p" * 16, epoch=0, sequence=0, born_at=1)
    broker.do(StoreBatch("orders", 0, 0, data, verify(data)))
    broker.do(JoinGroup("billing", "m", "i", "concurrent", ("orders",)))
    for verb, resource in (("describe", "topic:orders"), ("describe", "group:billing")):
        broker.grant("nobody", verb, resource)
    console = ConsoleInMemory(broker)
    _shown(console, "/me", "describe topic:orders", "✗", user="nobody")
    for path, word in (
        ("topics/orders", "alter topic:orders"),
        ("topics/orders/messages", "Bodies are hidden"),
        ("topics/orders/0/0", "The body is hidden"),
        ("groups/billing", "txmq acl grant nobody"),
        ("groups/billing/reset", "txmq acl grant nobody"),
        ("letters/billing", "txmq acl grant nobody"),
    ):
        _shown(console, f"/{path}", word, user="nobody")
        assert "secret" not in console.get(f"/{path}", "nobody").text
    _shown(console, "/users/nobody", "describe", "topic:orders", "Revoke", "no roles", user="root")


def test_lists_and_searches_that_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    console = ConsoleInMemory()
    broker = console.broker
    schema = '{"type": "object", "title": "Order"}'
    broker.ask("topic.create", name="t", partitions=1)
    broker.ask("topic.schema", name="t", json_schema=schema, **WHO)
    broker.ask("topic.alter", name="t", note="of the shop", readable=False, **WHO)
    _shown(console, "/topics/t", "of the shop", '"title": "Order"', "Readable no")
    _shown(console, "/topics?own=yes", AUDIT, "Hide the broker's own topics")
    _shown(console, "/audit?call=dlq.&operator=bob", "No entry matches these fields")
    _shown(console, "/audit?limit=1", "Next page")
    broker.do(CreateTopic("x", 1))
    for member in ("m", "n"):
        broker.do(JoinGroup("g", member, "i", "ordered", ("x",)))
    _shown(console, "/groups/g", "x/0", "none")
    broker.ask("topic.delete", name="x", **WHO)
    _shown(console, "/groups/g", "x/0", "the topic was deleted")
    broker.do(JoinGroup("h", "m", "i", "concurrent", ("t",)))
    _shown(console, "/groups/h/reset?topic=t&to=first", "The group is there already")
    places = [f"t/0/{number}" for number in range(130)]
    _shown_of(console.act("dlq.abandon", group="g", letters=places), "t/0/9 and 120 more")
    refused = console.act("dlq.abandon", group="g", letters=places, reason="old")
    _shown_of(refused, "130 refused, of which the first 100 are shown")
    open_ = broker.half(1, Message(b"1", "k-open"))
    _shown(console, "/trace?key=k-open", "Time line", open_)
    for number in range(2, 5):
        token = broker.half(number, Message(b"1", "k-many"))
        broker.do(DecideTransaction(bytes.fromhex(token), Decision.COMMIT, "producer shop"))
    _shown(console, "/trace?key=k-many&limit=2", "There are more: txmq trace --key 'k-many'")
    broker.ask("topic.alter", name="t", readable=True, **WHO)
    monkeypatch.setattr("txmq.admin.console.topics.MAX_SCANS", 1)
    monkeypatch.setattr("txmq.admin.console.topics.MESSAGES", 1)
    _shown(console, "/topics/t/messages?tag=none", "The search goes on behind it")
    _shown(console, "/topics/t/messages", "Next page")
