"""What nodes say of themselves, and what the others make of it."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from tests.store.shared.histories import LOG_ID, OTHER_LOG, History, read
from txmq.store.shared.known_nodes import (
    ANSWERS_AFTER_S,
    FORGOTTEN_AFTER_S,
    SAYS_EVERY_S,
    SILENT_AFTER_S,
    KnownNodes,
)
from txmq.store.shared.records import NodeStatus
from txmq.store.shared.rules import Place, fold

OWN, SECOND, THIRD = b"1" * 16, b"2" * 16, b"3" * 16
PLACE = Place(50, 0, LOG_ID, 4, SECOND, 1_000, 1_000)
LATER = 1e5


def known() -> KnownNodes:
    return KnownNodes("n1", "h1:7650", "1.0", OWN)


def said(name: str = "n2", nonce: bytes = SECOND, end: int = 900) -> NodeStatus:
    return NodeStatus(LOG_ID, 4, nonce, end, 0, name, "1.0", f"{name}:7650")


def roles(found: KnownNodes, now: float, place: Place = PLACE) -> dict[str, str]:
    return {node.name: node.role for node in found.view(place, now).nodes}


def test_a_node_says_what_it_is_at_once_and_then_now_and_then() -> None:
    own = known()
    assert own.is_due(1.0)
    assert own.say(PLACE, 1.0) == NodeStatus(
        LOG_ID, 4, OWN, 1_000, 0, "n1", "1.0", "h1:7650", False
    )
    assert not own.is_due(SAYS_EVERY_S)
    assert own.is_due(1.0 + SAYS_EVERY_S)
    assert own.say(PLACE, 2.0, leaves=True).leaves


def test_a_node_that_begins_is_soon_answered_and_one_that_goes_on_is_not() -> None:
    own = known()
    for now, nonce, answers in ((10.0, SECOND, True), (20.0, SECOND, False), (30.0, THIRD, True)):
        own.say(PLACE, now)
        own.hear(said(nonce=nonce), PLACE, now, is_history=False)
        assert not own.is_due(now)
        assert own.is_due(now + ANSWERS_AFTER_S) is answers


def test_the_owner_of_the_claim_leads_and_who_is_not_heard_is_silent() -> None:
    own = known()
    own.hear(said(), PLACE, 0.0, is_history=False)
    own.hear(said("n3", THIRD), PLACE, 10.0, is_history=False)
    assert roles(own, 20.0) == {"n1": "follower", "n2": "leader", "n3": "follower"}
    third = PLACE._replace(nonce=THIRD, epoch=5)
    assert roles(own, SILENT_AFTER_S, third) == {"n1": "follower", "n2": "silent", "n3": "leader"}
    own.hear(said("n3", THIRD)._replace(leaves=True), third, 20.0, is_history=False)
    assert roles(own, 20.0, third)["n3"] == "left"


def test_who_is_not_heard_for_a_day_is_forgotten() -> None:
    own = known()
    own.hear(said(), PLACE, 0.0, is_history=False)
    own.say(PLACE, FORGOTTEN_AFTER_S - 1)
    assert "n2" in roles(own, FORGOTTEN_AFTER_S - 1)
    own.say(PLACE, FORGOTTEN_AFTER_S)
    assert roles(own, FORGOTTEN_AFTER_S) == {"n1": "follower"}


def test_what_was_said_before_this_node_began_is_no_sign_of_life() -> None:
    own = known()
    own.hear(said("n3", THIRD), PLACE, LATER, is_history=True)
    own.hear(said("n1", SECOND)._replace(address="h1:7650"), PLACE, LATER, is_history=True)
    assert roles(own, LATER) == {"n1": "follower", "n3": "silent"}
    own.hear(said("n3", THIRD), PLACE, LATER, is_history=False)
    assert roles(own, LATER)["n3"] == "follower"


def test_two_nodes_of_one_name_are_both_shown() -> None:
    own = known()
    own.hear(said("n1", THIRD), PLACE, 0.0, is_history=False)
    own.hear(said("n1", b"9" * 16)._replace(address="h1:7650"), PLACE, 0.0, is_history=False)
    found = own.view(PLACE, 1.0).nodes
    assert [(node.name, node.address) for node in found] == [
        ("n1", "h1:7650"),
        ("n1", "h1:7650"),
        ("n1", "n1:7650"),
    ]
    assert len(own.view(PLACE, SILENT_AFTER_S).nodes) == 2  # it was this one, before it began


def test_what_comes_late_is_not_what_a_node_says_now() -> None:
    own = known()
    own.hear(said(), PLACE, 0.0, is_history=False)
    own.hear(said(nonce=THIRD, end=800), PLACE, 1.0, is_history=False)
    own.hear(said(nonce=THIRD)._replace(epoch=3), PLACE, 1.0, is_history=False)
    assert roles(own, 1.0)["n2"] == "leader"
    own.hear(said()._replace(leaves=True), PLACE, 2.0, is_history=False)
    own.hear(said(), PLACE, 3.0, is_history=False)
    assert roles(own, 3.0)["n2"] == "left"
    own.hear(said(nonce=THIRD), PLACE, 4.0, is_history=False)  # it began again
    assert roles(own, 4.0)["n2"] == "follower"


def test_what_no_node_can_know_hides_none() -> None:
    own = known()
    for epoch, end in ((1 << 31, 0), (PLACE.epoch, PLACE.end + 1)):
        strange = said(nonce=THIRD)._replace(epoch=epoch, end=end)
        own.hear(strange, PLACE, 0.0, is_history=False)
        assert roles(own, 0.0) == {"n1": "follower"}
    own.hear(said(), PLACE, 1.0, is_history=False)
    assert roles(own, 1.0)["n2"] == "leader"


def test_who_has_not_read_the_newest_claim_yet_is_heard() -> None:
    own = known()  # the claim has cut the log, which was longer in the epoch before
    own.hear(said("n3", THIRD, end=PLACE.end + 1)._replace(epoch=3), PLACE, 0.0, is_history=False)
    assert roles(own, 0.0)["n3"] == "follower"


def test_nodes_of_another_log_are_none() -> None:
    own = known()
    own.hear(said()._replace(log_id=OTHER_LOG), PLACE, 0.0, is_history=False)
    assert roles(own, 0.0) == {"n1": "follower"}


def test_a_node_that_lags_is_behind_in_bytes_and_in_seconds() -> None:
    own = known()
    own.hear(said(end=900)._replace(lag_ms=1_500), PLACE, 10.0, is_history=False)
    second = own.view(PLACE, 12.0).nodes[1]
    assert (second.position, second.lag_bytes, second.lag_s, second.heard_s) == (900, 100, 1.5, 2.0)
    first = own.say(PLACE, 20.0)
    assert own.view(PLACE, 24.0).nodes[0].lag_s == 4.0  # and goes on
    own.hear(first, PLACE, 25.0, is_history=False)
    assert own.view(PLACE, 90.0).nodes[0].lag_s == 5.0
    own.say(PLACE, 100.0)
    own.note_lost()
    assert own.view(PLACE, 190.0).nodes[0].lag_s == 5.0


def test_clients_are_told_of_the_leader_first_and_of_nobody_who_is_away() -> None:
    own = known()
    own.hear(said("n0", b"0" * 16), PLACE, 0.0, is_history=False)
    own.hear(said(), PLACE, SILENT_AFTER_S, is_history=False)
    own.hear(said("n3", THIRD), PLACE, SILENT_AFTER_S, is_history=False)
    gone = said("n4", b"4" * 16)._replace(leaves=True)
    own.hear(gone, PLACE, SILENT_AFTER_S, is_history=False)
    assert own.addresses(PLACE, SILENT_AFTER_S) == ("n2:7650", "h1:7650", "n3:7650")


@given(rng=st.randoms(use_true_random=False))
def test_statuses_change_nothing_of_what_counts(rng: Random) -> None:
    partition = History(rng, fold).partition
    before = read(fold, partition)
    mixed = list(partition)
    for _ in range(5):
        mixed.insert(rng.randint(0, len(mixed)), said(nonce=rng.choice([OWN, SECOND])))
    after = read(fold, mixed)
    assert after.counted == before.counted
    assert after.place._replace(offset=0, checksum=0) == before.place._replace(offset=0, checksum=0)
