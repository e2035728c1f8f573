"""Assignment of partitions to members: strategies, as pure functions.

A strategy gives every partition of a topic to one of the members that want the topic.
All strategies are functions of the members' names, so every broker and every replay
comes to the same result. Only `sticky` also depends on the previous assignment.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from txmq.model.topic_partition import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence


RING_POINTS = 64  # of each member on the hash ring: shares then differ by about an eighth


class Subscriber(NamedTuple):
    """A member with the topics it wants; `before` are its partitions so far."""

    name: str
    topics: Collection[int]
    before: Collection[TopicPartition] = ()


class Reader(NamedTuple):
    """A member that wants a topic, and its partitions of that topic so far."""

    name: str
    before: Sequence[int]


Load = dict[str, int]  # the partitions that each member was given of other topics


def average(readers: Sequence[Reader], _topic_id: int, count: int, _load: Load) -> list[str]:
    """Assign neighbouring partitions to one member, as evenly as possible."""
    bounds = [number * count // len(readers) for number in range(len(readers) + 1)]
    shares = zip(readers, pairwise(bounds), strict=True)
    return [reader.name for reader, (low, high) in shares for _ in range(low, high)]


def circular(readers: Sequence[Reader], _topic_id: int, count: int, load: Load) -> list[str]:
    """Assign partitions in turn, beginning after the last member of the topic
    before.
    """
    first = sum(load.values())
    return [readers[(first + partition) % len(readers)].name for partition in range(count)]


def consistent_hash(readers: Sequence[Reader], topic_id: int, count: int, _load: Load) -> list[str]:
    """Assign by a ring of hashes: a member that comes or goes moves few partitions."""
    points, names = _ring(tuple(reader.name for reader in readers))
    hashes = (_hash(f"{topic_id}/{partition}") for partition in range(count))
    return [names[bisect_right(points, hash_) % len(names)] for hash_ in hashes]


@lru_cache(maxsize=1)  # topics that the same members want follow one another
def _ring(names: tuple[str, ...]) -> tuple[list[int], list[str]]:
    ring = sorted(
        (_hash(f"{name}#{point}"), name) for name in names for point in range(RING_POINTS)
    )
    return [point for point, _name in ring], [name for _point, name in ring]


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def sticky(readers: Sequence[Reader], _topic_id: int, count: int, load: Load) -> list[str]:
    """Assign as evenly as possible, and keep previous owners where that allows."""
    share, extra = divmod(count, len(readers))
    before: dict[int, str] = {}
    for reader in readers:
        for partition in reader.before:
            before.setdefault(partition, reader.name)
    owners: list[str | None] = [None] * count
    held = dict.fromkeys((reader.name for reader in readers), 0)
    for partition in range(count):
        name = before.get(partition)
        if name is not None and (held[name] < share or (held[name] == share and extra > 0)):
            extra -= held[name] == share
            held[name] += 1
            owners[partition] = name
    for partition in range(count):
        if owners[partition] is None:
            name = min(held, key=lambda member: (held[member], load[member], member))
            held[name] += 1
            owners[partition] = name
    return [owner for owner in owners if owner is not None]


STRATEGIES: dict[str, Callable[[Sequence[Reader], int, int, Load], list[str]]] = {
    "average": average,
    "circular": circular,
    "consistent": consistent_hash,
    "sticky": sticky,
}


def assign(
    strategy: str, members: Sequence[Subscriber], topics: Mapping[int, int], *, share: bool
) -> dict[str, tuple[TopicPartition, ...]]:
    """Return the partitions of each member. `topics` maps ids to numbers of partitions.

    `share`: members beyond the number of partitions read along with others, member i
    with partition i mod n. Without it they wait for a partition to come free. Members
    may want different topics: each partition goes to a member that wants its topic.
    """
    wanting = _readers(members)
    load: Load = {member.name: 0 for member in members}
    assigned: dict[str, list[TopicPartition]] = {member.name: [] for member in sorted(members)}
    for topic_id, count in sorted(topics.items()):
        readers = wanting.get(topic_id)
        if not readers:
            continue
        names = STRATEGIES[strategy](readers, topic_id, count, load)
        for partition, name in enumerate(names):
            load[name] += 1
            assigned[name].append(TopicPartition(topic_id, partition))
        if share:
            taken = set(names)
            idle = [reader for reader in readers if reader.name not in taken]
            for name, partition in _shared_partitions(
                idle, count, keep=strategy == "sticky"
            ).items():
                assigned[name].append(TopicPartition(topic_id, partition))
    return {name: tuple(sorted(own)) for name, own in assigned.items()}


def _readers(members: Sequence[Subscriber]) -> dict[int, list[Reader]]:
    """Return the members that want each topic, in the order of their names."""
    readers: dict[int, list[Reader]] = {}
    for member in sorted(members):
        before: dict[int, list[int]] = {}
        for topic_id, partition in member.before:
            before.setdefault(topic_id, []).append(partition)
        for topic_id in member.topics:
            readers.setdefault(topic_id, []).append(Reader(member.name, before.get(topic_id, ())))
    return readers


def _shared_partitions(idle: Sequence[Reader], count: int, *, keep: bool) -> dict[str, int]:
    """Return a partition for each member beyond the number of partitions, evenly.

    `keep`: a member keeps its previous partition where that allows.
    """
    share, extra = divmod(len(idle), count)
    readers = [0] * count
    found: dict[str, int] = {}
    for reader in idle if keep else ():
        for partition in reader.before[:1]:
            if readers[partition] < share or (readers[partition] == share and extra > 0):
                extra -= readers[partition] == share
                readers[partition] += 1
                found[reader.name] = partition
    for reader in idle:
        if reader.name not in found:
            found[reader.name] = partition = readers.index(min(readers))
            readers[partition] += 1
    return found
