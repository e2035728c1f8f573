"""Assignment strategies: every partition is read, by one member or in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from txmq.core.consumers.assignment import STRATEGIES, Subscriber, assign
from txmq.model.topic_partition import TopicPartition

Shares = dict[str, tuple[TopicPartition, ...]]


def subscribers(*names: str, topics: tuple[int, ...] = (1,)) -> list[Subscriber]:
    return [Subscriber(name, topics) for name in names]


def test_average_gives_neighbours_to_one_member() -> None:
    shares = assign("average", subscribers("b", "a"), {1: 5}, share=False)
    assert shares == {"a": ((1, 0), (1, 1)), "b": ((1, 2), (1, 3), (1, 4))}


def test_circular_goes_round_over_all_topics() -> None:
    shares = assign("circular", subscribers("a", "b", topics=(1, 2)), {1: 3, 2: 1}, share=False)
    assert shares == {"a": ((1, 0), (1, 2)), "b": ((1, 1), (2, 0))}


def test_a_consistent_hash_moves_only_what_the_new_member_takes() -> None:
    before = assign("consistent", subscribers("a", "b", "c"), {1: 300}, share=False)
    after = assign("consistent", subscribers("a", "b", "c", "d"), {1: 300}, share=False)
    taken = set(after.pop("d"))
    assert 30 < len(taken) < 150
    assert {name: tuple(tp for tp in before[name] if tp not in taken) for name in before} == after


@pytest.mark.parametrize("seed", range(10))
def test_sticky_is_even_and_moves_no_more_than_it_must(seed: int) -> None:
    random = Random(seed)
    count = random.randint(1, 40)
    names = random.sample("abcdefgh", random.randint(1, 8))
    before = assign("sticky", subscribers(*names), {1: count}, share=False)
    later = random.sample("abcdefgh", random.randint(1, 8))
    members = [Subscriber(name, (1,), before.get(name, ())) for name in later]
    after = assign("sticky", members, {1: count}, share=False)
    sizes = [len(spots) for spots in after.values()]
    assert max(sizes) - min(sizes) <= 1
    for name in later:
        had = before.get(name, ())
        assert len(set(had) & set(after[name])) >= min(len(had), count // len(later))


def test_sticky_again_changes_nothing() -> None:
    first = assign("sticky", subscribers("a", "b", "c"), {1: 8, 2: 3}, share=False)
    members = [Subscriber(name, (1,), first[name]) for name in first]
    assert assign("sticky", members, {1: 8}, share=False) == {
        name: tuple(tp for tp in spots if tp[0] == 1) for name, spots in first.items()
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("share", [True, False])
def test_every_partition_is_read_by_a_member_that_wants_it(strategy: str, share: bool) -> None:  # noqa: FBT001
    members = [
        *subscribers("a", "b", "c", topics=(1, 2)),
        Subscriber("d", (2, 3)),
        Subscriber("e", (1,)),
    ]
    shares = assign(strategy, members, {1: 7, 2: 2, 3: 1}, share=share)
    readers = Counter(tp for spots in shares.values() for tp in spots)
    assert set(readers) == {(1, p) for p in range(7)} | {(2, 0), (2, 1), (3, 0)}
    assert share or max(readers.values()) == 1
    wanted = {member.name: member.topics for member in members}
    assert all(tp[0] in wanted[name] for name, spots in shares.items() for tp in spots)


def test_members_beyond_the_partitions_share_them() -> None:
    shares = assign("average", subscribers("a", "b", "c", "d", "e"), {1: 2}, share=True)
    assert all(len(spots) == 1 for spots in shares.values())
    assert Counter(tp for spots in shares.values() for tp in spots) == {(1, 0): 3, (1, 1): 2}


def test_in_an_ordered_group_members_beyond_the_partitions_wait() -> None:
    shares = assign("sticky", subscribers("a", "b", "c"), {1: 2}, share=False)
    assert sorted(map(len, shares.values())) == [0, 1, 1]


def test_without_members_nothing_is_assigned() -> None:
    assert assign("average", [], {1: 3}, share=True) == {}


NAMES = st.lists(st.text("abcdefgh", min_size=1, max_size=3), min_size=1, max_size=12, unique=True)
few = settings(max_examples=40)
TOPICS = st.dictionaries(st.integers(1, 4), st.integers(1, 40), min_size=1)


def shared(
    names: list[str], topics: dict[int, int], strategy: str, before: Shares | None = None
) -> Shares:
    had = before or {}
    members = [Subscriber(name, tuple(topics), had.get(name, ())) for name in names]
    return assign(strategy, members, topics, share=False)


def owners(shares: Shares) -> dict[TopicPartition, str]:
    return {tp: name for name, spots in shares.items() for tp in spots}


@few
@given(data=st.data(), strategy=st.sampled_from(list(STRATEGIES)), topics=TOPICS)
def test_every_partition_has_one_owner_that_wants_it(
    data: st.DataObject, strategy: str, topics: dict[int, int]
) -> None:
    wants = st.sets(st.sampled_from(sorted(topics)), min_size=1)
    members = [Subscriber(name, tuple(data.draw(wants))) for name in data.draw(NAMES)]
    wanted = {topic_id for member in members for topic_id in member.topics}
    shares = assign(strategy, members, topics, share=False)
    given_out = [tp for spots in shares.values() for tp in spots]
    assert sorted(given_out) == sorted((topic, p) for topic in wanted for p in range(topics[topic]))
    assert all(tp[0] in member.topics for member in members for tp in shares[member.name])
    shuffled = data.draw(st.permutations(members))
    assert assign(strategy, shuffled, topics, share=False) == shares, (
        "it depends on the order in which members joined"
    )


@few
@given(names=NAMES, topics=TOPICS, strategy=st.sampled_from(["average", "circular", "sticky"]))
def test_shares_of_each_topic_differ_by_one_at_most(
    names: list[str], topics: dict[int, int], strategy: str
) -> None:
    shares = shared(names, topics, strategy)
    for topic in topics:
        sizes = [sum(tp[0] == topic for tp in spots) for spots in shares.values()]
        assert max(sizes) - min(sizes) <= 1
    if strategy == "circular":
        assert max(map(len, shares.values())) - min(map(len, shares.values())) <= 1


@few
@given(names=NAMES, others=NAMES, topics=TOPICS)
def test_by_consistent_hash_only_members_that_come_or_go_move_partitions(
    names: list[str], others: list[str], topics: dict[int, int]
) -> None:
    before, after = (owners(shared(members, topics, "consistent")) for members in (names, others))
    moved = {tp for tp in before if before[tp] != after[tp]}
    assert all(before[tp] not in others or after[tp] not in names for tp in moved)


@few
@given(names=NAMES, others=NAMES, topics=TOPICS)
def test_sticky_moves_no_more_than_balance_asks_for(
    names: list[str], others: list[str], topics: dict[int, int]
) -> None:
    before = shared(names, topics, "sticky")
    after = shared(others, topics, "sticky", before)
    had, has = owners(before), owners(after)
    for topic, count in topics.items():
        kept = sum(
            had[TopicPartition(topic, p)] == has[TopicPartition(topic, p)] for p in range(count)
        )
        stay = sorted(
            (sum(had[TopicPartition(topic, p)] == name for p in range(count)) for name in others),
            reverse=True,
        )
        share, extra = divmod(count, len(others))
        assert kept == sum(min(size, share + (place < extra)) for place, size in enumerate(stay))


class Walked(tuple[Any, ...]):  # noqa: SLOT001  # it counts in an attribute
    """A tuple that counts how often it is walked through."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        self.walks += 1
        return super().__iter__()

    def __contains__(self, value: object) -> bool:
        self.walks += 1
        return super().__contains__(value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_assignment_walks_once_through_what_members_want_and_have(strategy: str) -> None:
    topics = dict.fromkeys(range(100), 8)
    before = assign(strategy, [Subscriber("a", tuple(topics))], topics, share=True)["a"]
    member = Subscriber("a", Walked(topics), Walked(before))
    assert assign(strategy, [member], topics, share=True)["a"] == before
    assert isinstance(member.topics, Walked)
    assert isinstance(member.before, Walked)
    assert (member.topics.walks, member.before.walks) == (1, 1)


@few
@given(names=NAMES, topics=TOPICS, share=st.booleans())
def test_sticky_assignment_is_idempotent(
    names: list[str],
    topics: dict[int, int],
    share: bool,  # noqa: FBT001
) -> None:
    members = [Subscriber(name, tuple(topics)) for name in names]
    once = assign("sticky", members, topics, share=share)
    again = assign(
        "sticky",
        [member._replace(before=once[member.name]) for member in members],
        topics,
        share=share,
    )
    assert again == once
