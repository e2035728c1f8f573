"""Bugs of the rules of a shared log, planted to prove that its simulation finds them.

A patch replaces what `txmq.store.shared.node` uses, by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any, NamedTuple
from unittest.mock import patch

from tests.simulation.shared_nodes import Cluster
from txmq.store.shared import node as nodes
from txmq.store.shared.known_nodes import KnownNodes
from txmq.store.shared.node import Node, State
from txmq.store.shared.records import Claim, NodeStatus, PartitionRecord, Slice
from txmq.store.shared.rules import Expectation, Place, fold

Patches = AbstractContextManager[Any]


class Bug(NamedTuple):
    """A bug, and the seed that soon finds it; see `planted_bugs.Bug`.

    Without one it is left to the exhaustive search: its scene is too rare.
    """

    name: str
    around: Callable[[], Patches] = nullcontext
    plant: Callable[[Cluster], None] | None = None
    first: int | None = 0


# originals, which patched functions call
_produce, _reported, _confirm, _answer = (
    Node._produce,
    Node._reported,
    Node._confirm,
    Node._answer,
)
_finish, _is_serving, _lead_on = Node._finish, Node.is_serving, Node._lead_on


def _of_node(name: str, replacement: object) -> Callable[[], Patches]:
    return lambda: patch.object(Node, name, replacement)


def _of_module(name: str, replacement: object) -> Callable[[], Patches]:
    return lambda: patch.object(nodes, name, replacement)


def _certain(replacement: object) -> Callable[[], Patches]:
    return lambda: patch.object(Expectation, "is_certain", replacement)


def _epoch_only(
    place: Place, offset: int, checksum: int, record: PartitionRecord | None
) -> tuple[Place, bool]:
    if isinstance(record, Slice) and place.is_owned_by(record.epoch, record.nonce):
        after = place._replace(offset=offset, checksum=checksum)
        return after._replace(end=place.end + len(record.data), whole=record.whole), True
    return fold(place, offset, checksum, record)


def _no_cut(
    place: Place, offset: int, checksum: int, record: PartitionRecord | None
) -> tuple[Place, bool]:
    after, counts = fold(place, offset, checksum, record)
    if isinstance(record, Claim) and counts:
        after = after._replace(end=place.end)
    return after, counts


def _from_the_report(self: Expectation, offset: int | None) -> bool:
    certain = offset == self._known + 1
    if offset is not None:
        self._known = offset
    return certain


def _unknown_is_success(self: Expectation, offset: int | None) -> bool:
    if offset is not None and offset != self._known + 1:
        return False
    self._known += 1
    return True


def _reported_is_certain(self: Expectation, offset: int | None) -> bool:
    return offset is not None


def _confirmed_at_once(self: Node, record: Claim | Slice) -> None:
    if isinstance(record, Slice):
        self._certain = record.whole
        self._tell()
    _produce(self, record)


def _confirmed_in_the_middle(self: Node) -> None:
    flight = self._in_flight
    assert flight is not None
    assert isinstance(flight.record, Slice)
    flight.record = flight.record._replace(whole=flight.record.end)
    _confirm(self)


def _leading_before_the_claim_is_read(
    self: Node, flight: Any, error: Exception | None, offset: int | None
) -> None:
    _reported(self, flight, error, offset)
    if error is None and self.state is State.CLAIMING:
        self.place = self.place._replace(
            epoch=flight.record.epoch, nonce=self._nonce, end=self.place.whole
        )
        self._lead()


def _beats_look_alike(self: Node) -> None:
    flight = self._in_flight
    if flight is None or not flight.is_reported or not isinstance(flight.record, Slice):
        return
    if not flight.record.data:
        self._confirm()
    else:
        _answer(self)


def _dated_at_the_report(self: Node, now: float) -> bool:
    """Date the last slice when it is first asked for after its report."""
    if self._confirmed_at not in self.__dict__.setdefault("dated", {}):
        self.__dict__["dated"] = {now: True}
        self._confirmed_at = now
    return _is_serving(self, now)


def _deaf_to_errors(self: Node, error: Exception) -> None:
    self._in_flight = None
    if self.state is State.LEADING:
        self._produce_next()
    else:
        self.state = State.FOLLOWING


def _resent_after_an_error(self: Node, error: Exception) -> None:
    """Take an error for certain: what was not delivered is left out."""
    flight, self._in_flight = self._in_flight, None
    if self.state is not State.LEADING:
        self.state = State.FOLLOWING
    elif flight is not None and isinstance(flight.record, Slice):
        self._queue.appendleft(flight.record)
        self._expectation.read(self._expectation._known + 1)
        self._produce_next()


def _serving_while_it_resigns(self: Node, now: float) -> bool:
    return (
        self.state is State.LEADING
        and self._free_at <= now < self._confirmed_at + self._timing.lease_s
    )


def _deaf_to_silence(self: Node) -> None:
    self._quiet_since = self._now
    _lead_on(self)


def _lost_hides(self: Node, first: int) -> None:
    """Go on behind what the partition forgot, as a reader that is reset does."""
    assert self._partition is not None
    self._partition.read_from(first, self._read, self._read_all, self._lost)


def _contested(cluster: Cluster) -> None:
    """Order claims often, with slow answers and slow readers."""
    cluster.order_s = 0.3
    cluster.topic.report_s, cluster.topic.read_s, cluster.topic.batch = 0.05, 0.05, 1


def _status_counts(
    place: Place, offset: int, checksum: int, record: PartitionRecord | None
) -> tuple[Place, bool]:
    after, counts = fold(place, offset, checksum, record)
    return after, counts or isinstance(record, NodeStatus)


def _says_it_once(self: KnownNodes, now: float) -> bool:
    return now >= self._says_at == 0.0


def _with_statuses(cluster: Cluster) -> None:
    cluster.says = True


def _unclean_election(cluster: Cluster) -> None:
    cluster.clock.callLater(10.0, lambda: cluster.topic.cut(12))


BUGS = (
    Bug("the epoch alone decides what counts", _of_module("fold", _epoch_only)),
    Bug("a claim does not cut the unfinished record", _of_module("fold", _no_cut), first=5),
    Bug("the expected offset comes from a report", _certain(_from_the_report), first=None),
    Bug("an unknown offset is taken for success", _certain(_unknown_is_success), first=4),
    Bug("each reported offset is certain", _certain(_reported_is_certain), first=1),
    Bug("confirmed before the report", _of_node("_produce", _confirmed_at_once)),
    Bug(
        "the middle of an append is confirmed",
        _of_node("_confirm", _confirmed_in_the_middle),
        first=5,
    ),
    Bug("no wait for the lease after a claim", _of_module("LEASE_MARGIN", -inf), first=30),
    Bug("clocks of one rate", _of_module("LEASE_MARGIN", 1.0), first=425),
    Bug(
        "a lease counts from the report",
        _of_node("is_serving", _dated_at_the_report),
        _contested,
        24,
    ),
    Bug(
        "a copy of an earlier beat renews the lease",
        _of_node("_answer", _beats_look_alike),
        first=205,
    ),
    Bug(
        "leading before the claim is read",
        _of_node("_reported", _leading_before_the_claim_is_read),
    ),
    Bug("a leader goes on after an error", _of_node("_fail", _deaf_to_errors), first=13),
    Bug("an error is taken for certain", _of_node("_fail", _resent_after_an_error), first=None),
    Bug(
        "a leader serves while it resigns",
        _of_node("is_serving", _serving_while_it_resigns),
        _contested,
        527,
    ),
    Bug(
        "a leader waits for what nothing confirms", _of_node("_lead_on", _deaf_to_silence), first=1
    ),
    Bug("a reader passes over what was forgotten", _of_node("_lost", _lost_hides)),
    Bug("an unclean election", plant=_unclean_election),
    Bug("what nodes say quiets followers", _of_module("fold", _status_counts), _with_statuses, 2),
    Bug(
        "a node says what it is once",
        lambda: patch.object(KnownNodes, "is_due", _says_it_once),
        _with_statuses,
    ),
)
