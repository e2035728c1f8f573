"""`group.show`: the keys of fences, and the window of each partition."""

from __future__ import annotations

import json
from typing import Any

from tests.broker.calls.test_letter_calls import Office
from txmq.broker.calls import groups
from txmq.cli.group_view import readable_group
from txmq.model.message import Message
from txmq.wire.data_requests import Fetch, Opcode, pack_fetch

HOSTILE = "\x1b[2J<script>\u202e"


def ordered(monkeypatch: Any = None) -> tuple[Office, dict[str, Any]]:
    """Two keys of an ordered group have failed; twenty others were processed."""
    office = Office(0)
    for key in (HOSTILE, "b", *(f"k{number}" for number in range(20))):
        office.send(Message(b"x", key))
    group = {"group": "o", "member": "a"}
    joined: Any = office.client.call(
        "consumer.join", instance="a", mode="ordered", topics=["t"], **group
    )
    wanted = Fetch(joined["generation"], 0, 1 << 22, 10_000, "o", "a")
    assert office.client.ask(Opcode.FETCH, pack_fetch(wanted)).status == 0
    for offset in (0, 1):
        office.client.call(
            "consumer.nack",
            generation=joined["generation"],
            topic="t",
            partition=0,
            offset=offset,
            dead=not offset,
            delay_ms=3_600_000 if offset else None,
            **group,
        )
    if monkeypatch is not None:
        monkeypatch.setattr(groups, "KEYS_READ_BYTES", 0)
    return office, office.broker.ask("group.show", group="o")


def test_fences_have_the_keys_of_their_messages() -> None:
    _office, shown = ordered()
    assert [fence["key"] for fence in shown["fence_list"]] == [HOSTILE, "b"]
    [first, second] = readable_group(shown)["fences"]
    assert (first["key"], second["key"]) == (HOSTILE, "b")
    assert "key_hash" not in first


def test_messages_are_read_for_keys_up_to_a_bound(monkeypatch: Any) -> None:
    _office, shown = ordered(monkeypatch)
    assert [fence["key"] for fence in shown["fence_list"]] == [None, None]
    assert "key_hash" in readable_group(shown)["fences"][0]


def test_the_window_of_a_partition_has_two_numbers_and_a_word() -> None:
    office, shown = ordered()
    office.broker.pass_time(20)
    shown = office.broker.ask("group.show", group="o")
    [position] = shown["positions"]
    json.dumps(shown)
    fields = ("window", "unprocessed_share", "processed_share", "head")
    # message 0 is dead, 1 waits for an hour, the rest is leased
    assert [position[field] for field in fields] == [21, 1.0, 0.0, "outage"]
    [row] = readable_group(shown)["windows"]
    assert row["partition"] == "t/0"
