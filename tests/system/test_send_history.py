"""The checks of a send history find each kind of damage in a sound one."""

from __future__ import annotations

import pytest

from tests.system.send_history import SendHistory, TopicRow, find_faults


def sound_history() -> tuple[SendHistory, list[TopicRow]]:
    """Return the history of two keys in two partitions, with a bundle over both.

    Two sends had no answer: one arrived, the other did not.
    """
    history = SendHistory()
    topic = [
        TopicRow(0, 0, "a", "a/0"),
        TopicRow(0, 1, "a", "a/1"),
        TopicRow(0, 2, "a", "a/3"),
        TopicRow(1, 0, "b", "b/0"),
    ]
    for row in topic:
        history.attempted.add(row.body)
        history.acknowledged[row.body] = row.place
        history.observe(row)
    del history.acknowledged["a/3"]
    history.acknowledged["b/0"] = None
    history.attempted |= {"a/2", "b/1", "b/2", "b/3"}
    history.unknown |= {"a/3", "a/2"}
    history.refused.add("b/1")
    history.bundles += [("a/1", "b/0"), ("b/2", "b/3")]
    return history, topic


def without(place: tuple[int, int], topic: list[TopicRow]) -> list[TopicRow]:
    """Return the topic without the row at `place`, whose followers move up."""
    partition, offset = place
    moved = [
        row._replace(offset=row.offset - (row.partition == partition and row.offset > offset))
        for row in topic
    ]
    return [new for new, old in zip(moved, topic, strict=True) if old.place != place]


def test_a_history_without_damage_has_no_faults() -> None:
    assert find_faults(*sound_history()) == []


def test_an_acknowledged_message_that_is_lost_is_found() -> None:
    history, topic = sound_history()
    history.observed.clear()
    found = find_faults(history, without((0, 1), topic))
    assert "a/1 was acknowledged and is lost" in found
    assert "of the bundle ('a/1', 'b/0') only 1 are there" in found


def test_a_doubled_message_is_found() -> None:
    history, topic = sound_history()
    assert find_faults(history, [*topic, TopicRow(1, 1, "b", "b/0")]) == ["b/0 is there 2 times"]


def test_a_message_at_another_offset_than_its_receipt_says_is_found() -> None:
    history, topic = sound_history()
    history.acknowledged["a/1"] = (0, 2)
    assert find_faults(history, topic) == [
        "a/1 is not at (0, 2), where its receipt says: there is a/3"
    ]


def test_two_receipts_for_one_offset_are_found() -> None:
    history, topic = sound_history()
    history.acknowledged["a/3"] = (0, 1)
    assert find_faults(history, topic) == [
        "a/3 is not at (0, 1), where its receipt says: there is a/1"
    ]


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("b/9", "b/9 was never sent"),
        ("b/1", "b/1 is there, though it was reported as not stored"),
        ("b/2", "of the bundle ('b/2', 'b/3') only 1 are there"),
    ],
)
def test_a_message_that_must_not_be_there_is_found(body: str, fault: str) -> None:
    history, topic = sound_history()
    assert find_faults(history, [*topic, TopicRow(1, 1, "b", body)]) == [fault]


def test_messages_of_a_key_in_another_order_are_found() -> None:
    history, topic = sound_history()
    history.attempted.add("b/4")
    topic[3:] = [TopicRow(1, 0, "b", "b/4"), TopicRow(1, 1, "b", "b/0")]
    history.observed.clear()
    assert find_faults(history, topic) == ["b/0 is behind b/4"]


def test_a_key_in_two_partitions_is_found() -> None:
    history, topic = sound_history()
    history.attempted.add("a/4")
    assert find_faults(history, [*topic, TopicRow(1, 1, "a", "a/4")]) == [
        "the messages of a are in several partitions"
    ]


def test_an_offset_that_was_used_again_is_found() -> None:
    history, topic = sound_history()
    history.observe(TopicRow(0, 2, "a", "a/2"))
    assert find_faults(history, topic) == ["(0, 2) was a/3 and became a/2"]


def test_an_offset_that_readers_saw_otherwise_is_found() -> None:
    history, topic = sound_history()
    topic[2] = TopicRow(0, 2, "a", "a/2")
    assert find_faults(history, topic) == ["readers saw a/3 at (0, 2), where now a/2 is"]


def test_an_offset_that_is_missing_is_found() -> None:
    history, topic = sound_history()
    topic.append(TopicRow(1, 2, "b", "b/2"))
    topic.append(TopicRow(1, 3, "b", "b/3"))
    assert find_faults(history, topic) == [
        "b/2 is at offset 2 of partition 1, not next to its neighbour"
    ]
