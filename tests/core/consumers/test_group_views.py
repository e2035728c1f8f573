"""Views of groups and letters, and their survival as table rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.core.consumers.world import QUICK, ConsumersWorld, rows
from txmq.core import machine
from txmq.core.consumers import group_views, letter_stats, letter_views
from txmq.core.consumers.commands import AbandonLetters
from txmq.core.consumers.letter_selection import LetterSelection
from txmq.core.consumers.stall_reasons import StallContext
from txmq.core.steps import run_to_end
from txmq.errors import UnknownGroup, UnknownLetter, UnknownMember
from txmq.model.retry import FailureReport


@pytest.fixture
def world() -> ConsumersWorld:
    """Twelve messages: two acked, one leased, one retried, one dead with two parked
    behind it.

    The other five are not delivered.
    """
    world = ConsumersWorld(t=2)
    world.publish("t", 1, 2, 3, 4)
    world.join("a", mode="ordered", retry=QUICK)
    world.fetch("a")
    world.nack("a", 0, dead=True, failure=FailureReport("ValueError", "no such order", "f1"))
    world.nack("a", 1)
    world.ack("a", (2, 3))
    world.publish("t", 1, 5, 1)
    world.fetch("a")
    world.ack("a", (5, 6))
    world.publish("t", *range(5), partition=1)
    return world


def test_a_group_is_described_in_full(world: ConsumersWorld) -> None:
    shown = run_to_end(
        group_views.describe_group(world.state, "g", StallContext(world.end, world.now + 5_000_000))
    )
    json.dumps(shown)
    expected = {
        "unprocessed": 10,
        "unsettled": 6,
        "leased": 1,
        "retrying": 1,
        "parked": 2,
        "fences": 2,
        "letters": 1,
        "state": "active",
    }
    assert {name: shown[name] for name in expected} == expected
    (first, second) = shown["positions"]
    assert (first["age_ms"], second["age_ms"], shown["age_ms"]) == (5_000, 5_000, 5_000)
    assert (first["floor"], first["cursor"], first["end"], first["leased_to"]) == (3, 7, 7, ["a"])
    assert (first["unprocessed"], first["unsettled"]) == (5, 1)
    assert (second["unprocessed"], second["unsettled"], second["owners"]) == (5, 5, ["a"])
    assert shown["member_list"][0]["assignment"] == [("t", 0), ("t", 1)]
    assert {fence["state"] for fence in shown["fence_list"]} == {"dead", "retrying"}
    told = group_views.list_groups(world.state, world.now + 7_000_000)
    assert [(group["group"], group["age_ms"]) for group in told] == [("g", 7_000)]


def test_a_heartbeat_returns_generation_and_assignment(world: ConsumersWorld) -> None:
    told = {
        "generation": 1,
        "epoch": 1,
        "assignment": [("t", 0), ("t", 1)],
        "consume_timeout_ms": 900_000,
        "retry": QUICK.to_json(),
        "on_exhausted": "park",
        "topics": {"t": 1},
        "resets": (),
    }
    assert group_views.describe_membership(world.state, "g", "a") == told
    with pytest.raises(UnknownMember) as replaced:
        group_views.describe_membership(world.state, "g", "a", "an earlier process")
    assert replaced.value.detail == {"replaced": True}
    for group, member, error in (("g", "b", UnknownMember), ("x", "a", UnknownGroup)):
        with pytest.raises(error):
            group_views.describe_membership(world.state, group, member)


def test_letters_come_in_pages(world: ConsumersWorld) -> None:
    world.fetch("a")
    for offset in (0, 3, 4):
        world.nack("a", offset, partition=1, dead=True)
    world.do(AbandonLetters("g", (("t", 1, 3),), "enough"))
    pages: list[list[tuple[int, int, str]]] = []
    after: int | None = 0
    while after is not None:
        page = letter_views.list_letters(world.state, "g", after, 3)
        letters, after = page
        pages.append(
            [
                (one.fields["partition"], one.fields["offset"], one.fields["state"])
                for one in letters
            ]
        )
    assert pages == [[(0, 0, "dead"), (1, 0, "dead"), (1, 3, "abandoned")], [(1, 4, "dead")]]


def test_a_letter_is_described_with_its_history(world: ConsumersWorld) -> None:
    letter = letter_views.describe_letter(world.state, "g", "t", 0, 0)
    json.dumps(letter.fields)
    expected = {
        "topic": "t", "partition": 0, "offset": 0, "number": 1, "state": "dead",
        "attempts": 1, "replays": 0,
        "error_type": "ValueError", "error_text": "no such order", "fingerprint": "f1",
        "consumer": "a", "key_hash": 1,
        "parked_behind": 2, "dead_at": world.now, "first_failed_at": world.now, "reserved_by": None,
    }  # fmt: skip
    assert {name: letter.fields[name] for name in expected} == expected
    retried = letter_views.describe_letter(world.state, "g", "t", 0, 1)
    assert retried.fields["state"] == "retrying"
    for topic, offset in (("t", 99), ("x", 0), ("t", -1)):
        with pytest.raises(UnknownLetter):
            letter_views.describe_letter(world.state, "g", topic, 0, offset)


def stats_of(world: ConsumersWorld, **selection: Any) -> dict[str, Any]:
    chosen = LetterSelection(**selection)
    return run_to_end(letter_stats.count(world.state, world.group(), chosen, world.now, None))


def test_letters_are_counted_by_their_common_fields(world: ConsumersWorld) -> None:
    world.fetch("a")
    first = world.now
    world.now += 1_000
    world.nack("a", 3, partition=1, dead=True, failure=FailureReport("KeyError", "", "f2"))
    world.nack("a", 4, partition=1, dead=True, failure=FailureReport("ValueError", "", "f1"))
    stats = stats_of(world)
    print_1, print_2 = stats.pop("fingerprints")
    top = stats.pop("top_keys")
    assert [one["letters"] for one in top] == [1, 1, 1]
    keys = {world.keys[1, one["partition"], one["offset"]] for one in top}
    assert keys == {one["key_hash"] for one in top}
    ages = {"1h": 3, "1d": 0, "7d": 0, "30d": 0, "older": 0}
    assert print_1 == {
        "fingerprint": "f1", "error_type": "ValueError", "letters": 2, "first_at": first,
        "last_at": world.now, **ages, "1h": 2, "note": "",
    }  # fmt: skip
    assert (print_2["fingerprint"], print_2["letters"]) == ("f2", 1)
    assert stats == {
        "group": "g", "letters": 3, "complete": True, "scanned": 0, "ages": ages,
        "notes": [], "by_state": {"open": 3}, "other_fingerprints": 0, "counted": 3,
        "by_fingerprint": {"f1": 2, "f2": 1},
        "by_error_type": {"ValueError": 2, "KeyError": 1}, "by_topic": {"t": 3}, "keys": 3,
        "replayed": 0, "oldest": first, "newest": world.now,
    }  # fmt: skip
    json.dumps(stats)
    chosen, steps = LetterSelection(), letter_stats.count
    fewer = run_to_end(steps(world.state, world.group(), chosen, world.now, None, count_keys=False))
    assert (fewer["keys"], fewer["top_keys"], fewer["counted"]) == (None, [], 3)


def test_only_the_most_frequent_kinds_of_letters_are_named(
    world: ConsumersWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each letter may have an error type of its own, and there may be very many."""
    monkeypatch.setattr(letter_stats, "MAX_KINDS", 1)
    world.fetch("a")
    for offset, error in ((3, "ValueError"), (4, "KeyError")):
        failure = FailureReport(error, "", error)
        world.nack("a", offset, partition=1, dead=True, failure=failure)
    stats: Any = stats_of(world)
    assert (stats["counted"], stats["by_error_type"]) == (3, {"ValueError": 2})


def test_views_of_an_unknown_group_are_refused(world: ConsumersWorld) -> None:
    with pytest.raises(UnknownGroup):
        run_to_end(group_views.describe_group(world.state, "x", StallContext(0, 0)))
    with pytest.raises(UnknownGroup):
        letter_views.list_letters(world.state, "x", 0, 1)
    with pytest.raises(UnknownGroup):
        letter_views.describe_letter(world.state, "x", "t", 0, 0)


def test_the_tables_alone_are_the_whole_state(world: ConsumersWorld) -> None:
    world.fetch("a")
    machine.save(world.state)
    loaded = machine.load(world.state.tables)
    assert loaded.groups == world.state.groups
    world.state = loaded
    world.now += 1_000_000
    assert 1 in world.offsets("a")


def test_only_changed_rows_are_saved_again(world: ConsumersWorld) -> None:
    machine.save(world.state)
    before = rows(world.state)
    world.ack("a", (3, 4))
    machine.save(world.state)
    changed = [name for name, items in rows(world.state).items() if items != before[name]]
    assert changed == ["groups", "positions"]


def test_recovery_makes_the_same_state_of_the_log(world: ConsumersWorld) -> None:
    again = world.replayed()
    assert again.groups == world.state.groups
    assert rows(again) == rows(world.state)
