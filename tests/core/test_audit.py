"""The audit topic: a change of an operator and its message are one record."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld
from txmq.batch import BatchView
from txmq.core import audit, machine
from txmq.core.audit import Audited, AuditEntry
from txmq.core.consumers.commands import AbandonLetters, PauseGroup, ReplayLetters, ResetPosition
from txmq.core.events.audit import OperatorActed
from txmq.core.events.outcome import Outcome
from txmq.core.topics.topics import AlterTopic, CreateTopic, DeleteTopic, GrowTopic
from txmq.errors import BadRequest, RequestRejected
from txmq.model.decider import ByBroker
from txmq.model.own_topics import AUDIT

HOSTILE = 'o\x1b[31m"</script>\u202e\ud800'


@pytest.fixture
def world() -> ConsumersWorld:
    """Three dead letters of an ordered group."""
    world = ConsumersWorld(t=1)
    world.publish("t", 1, 2, 3)
    world.join("a", mode="ordered", retry=QUICK)
    world.fetch("a")
    for offset in range(3):
        world.nack("a", offset, dead=True)
    return world


def acted(command: object, *, about: str = "group:g", reason: str = "why not") -> Audited:
    return Audited(command, AuditEntry("kim", "some.call", about, reason, {"n": 1}))


def entries(world: ConsumersWorld) -> list[dict[str, Any]]:
    if AUDIT not in world.state.topics:
        return []
    return [json.loads(body) for body in world.bodies(AUDIT)]


def changes(world: ConsumersWorld) -> list[str]:
    """Return the commands whose changes have no audit message, by a look at the log."""
    audited = [event for _at, event in world.log if isinstance(event, OperatorActed)]
    without = [e for _at, e in world.log if type(e).__name__ in {"Replayed", "Abandoned"}]
    broken = [e for e in audited if e.parts[-1][0] != 151 or len(e.parts) < 2]
    return [type(event).__name__ for event in (*without, *broken)]


def test_a_change_and_its_message_are_one_record(world: ConsumersWorld) -> None:
    records = len(world.log)
    reply = world.do(acted(ReplayLetters("g", (("t", 0, 0), ("t", 0, 7)))))
    assert (len(reply.done), len(reply.refused)) == (1, 1)
    assert len(world.log) == records + 1
    [entry] = entries(world)
    assert entry == {
        "at": world.now,
        "operator": "kim",
        "call": "some.call",
        "about": "group:g",
        "reason": "why not",
        "arguments": {"n": 1},
        "result": {"done": 1, "refused": 1},
        "messages": [["t", 0, 0]],
    }
    world.do(acted(AbandonLetters("g", (("t", 0, 1),), "no use")))
    assert [entry["result"]["done"] for entry in entries(world)] == [1, 1]
    assert not changes(world)
    # a recovery of the log has the same letters and the same messages
    again = world.replayed()
    assert again.topics[AUDIT].end_offsets == [2]
    assert again.groups.by_name["g"].letters == world.group().letters == 1


def test_a_change_without_its_message_is_found(
    world: ConsumersWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(state: Any, audited: Audited, now: int, deciders: Any) -> Outcome:
        made: Outcome = deciders[type(audited.command)](state, audited.command, now)
        return made

    monkeypatch.setattr(machine, "decide_audited", forget)
    world.do(acted(ReplayLetters("g", (("t", 0, 0),))))
    assert changes(world) == ["Replayed"]


def test_what_changes_nothing_leaves_no_message(world: ConsumersWorld) -> None:
    assert isinstance(world.do(acted(ReplayLetters("unknown", (("t", 0, 0),)))), RequestRejected)
    assert not world.do(acted(ReplayLetters("g", (("t", 0, 9),)))).done
    world.do(acted(ResetPosition("g", "t", "first", dry_run=True)))
    assert entries(world) == []


def test_the_message_has_its_key_and_an_id_of_its_own(world: ConsumersWorld) -> None:
    for paused in (True, False):
        world.do(acted(PauseGroup("g", paused=paused)))
    topic_id, rows = world.state.topics[AUDIT].topic_id, list(world.state.entries.range(b""))
    views = [
        BatchView(world.read(row[0], row[1]))
        for key, row in rows
        if int.from_bytes(key[:4], "big") == topic_id
    ]
    assert [view.keys for view in views] == [["group:g"], ["group:g"]]
    assert len({view.message_ids[0] for view in views}) == 2


def test_hostile_text_is_kept_as_text(world: ConsumersWorld) -> None:
    world.do(acted(PauseGroup("g", paused=True), about=HOSTILE, reason=HOSTILE))
    [entry] = entries(world)
    assert (entry["reason"], entry["about"]) == (HOSTILE, HOSTILE)


def test_very_many_arguments_are_left_out(world: ConsumersWorld) -> None:
    entry = AuditEntry("kim", "c", "x", "", {"text": "x" * audit.MAX_BODY})
    world.do(Audited(PauseGroup("g", paused=True), entry))
    assert entries(world)[0]["arguments"] == {"left_out": "they are too large"}


def test_an_entry_has_a_bound_and_says_what_it_left_out(world: ConsumersWorld) -> None:
    smile = "\U0001f600"
    place = ("t" * 127, 0, 1 << 62)
    body = {"reason": smile * 4_096, "arguments": {"text": smile * audit.MAX_BODY}}
    for count in (900, 0):
        data = audit._fitting(body, [place] * count)
        entry = json.loads(data)
        assert len(data) <= audit.MAX_BODY
        assert entry["arguments"] == {"left_out": "they are too large"}
    assert len(entry["reason"]) == 4_096, "it has room"
    long = audit._fitting(body | {"reason": smile * 20_000}, [place] * 900)
    entry = json.loads(long)
    assert len(long) <= audit.MAX_BODY
    assert (entry["reason_cut"], smile * 1_000 in entry["reason"]) == (True, True)
    assert len(entry["messages"]) + entry["messages_left_out"] == 900
    assert entry["messages"]


@pytest.mark.parametrize("name", [AUDIT, "_txmq.other"])
def test_nobody_else_changes_or_writes_what_is_the_brokers(
    world: ConsumersWorld, name: str
) -> None:
    world.do(acted(PauseGroup("g", paused=True)))
    for command in (
        CreateTopic(name, 1),
        AlterTopic(name, {"writable": True}),
        GrowTopic(name, 4),
        DeleteTopic(name),
    ):
        refused = world.do(command)
        assert type(refused) is BadRequest
        assert "_txmq." in refused.message
    assert isinstance(world.send(name, "forged"), RequestRejected)
    assert isinstance(
        world.store(b"t" * 16, [(name, 0, None, "forged")], ByBroker()), RequestRejected
    )
    assert len(entries(world)) == 1
