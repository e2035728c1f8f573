"""Reports of consumers' local stores: verdicts, order, fences, and old copies."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.consumers.invariants import check, moved_rows
from tests.core.consumers.world import QUICK, ConsumersWorld, rows
from txmq.core.consumers import background_work
from txmq.core.consumers.authorization import find_group
from txmq.core.consumers.commands import (
    AdoptStore,
    AdvanceGroupWork,
    ChangeRetries,
    CloneGroup,
    DeleteGroup,
    ExpireLeases,
    LeaveGroup,
    ReportStored,
    ResetPosition,
    RetryChange,
    StoredEntry,
)
from txmq.core.consumers.stall_reasons import StallContext, stall_reason
from txmq.core.consumers.store_reports import MAX_STORES, _Report, key_source
from txmq.core.consumers.store_views import at_consumers, describe_store, list_messages
from txmq.core.events.base import LogRestored
from txmq.core.state.consumer_groups import FenceState
from txmq.core.state.failed_rows import FailedKind
from txmq.core.state.local_stores import StoreOrder
from txmq.core.topics.topics import CreateTopic, DeleteTopic
from txmq.errors import BadRequest, Conflict, RequestRejected, Throttled, UnknownMember
from txmq.model.retry import FailureReport
from txmq.model.topic_partition import TopicPartition
from txmq.model.units import SECOND
from txmq.store import tables as t
from txmq.store.tables import FAILED, FENCES, LOCAL, PARKED

STORE, OTHER = b"s" * 16, b"o" * 16
FAILURE = FailureReport("E", "text", "print")


class StoreWorld(ConsumersWorld):
    """A core with members that have local stores."""

    def report(  # noqa: PLR0913  # as many as an entry has fields
        self,
        member: str,
        *entries: tuple[int, str],
        store: bytes = STORE,
        attempt: int = 1,
        due: int = 0,
        failure: FailureReport | None = FAILURE,
        topic_id: int = 1,
        partition: int = 0,
        since: int = 0,
        force: bool = False,
        epoch: int = 0,
    ) -> Any:
        """Report offsets and their states, each entry in a command of its own."""
        replies = []
        for offset, state in entries:
            entry = StoredEntry(
                "t", topic_id, partition, offset, state, attempt, due, failure, since
            )._replace(epoch=epoch)
            source = key_source(self.state, "g", entry)
            if source is not None:
                key = self.keys[topic_id, partition, offset]
                entry = entry._replace(source=source, key_hash=key)
            command = ReportStored(
                "g", member, self.generation(), store, "host", (entry,), force=force
            )
            replies.append(self.do(command))
        return [
            reply if isinstance(reply, RequestRejected) else reply.verdicts[0] for reply in replies
        ]

    def ask(self, member: str, store: bytes = STORE) -> Any:
        """Report nothing, and return the orders as (offset, order)."""
        reply = self.do(ReportStored("g", member, self.generation(), store, "host"))
        return [(ref[2], order) for ref, order in reply.orders]

    def kinds(self) -> dict[int, FailedKind]:
        found = moved_rows(self.state, self.group())
        return {ref[2]: FailedKind(row.kind) for ref, row in found.items()}

    def enter(self, member: str, instance: str = "") -> None:
        """Join the group as it is."""
        mode = self.group().settings.mode
        self.join(member, mode=mode, retry=QUICK, instance=instance or member)

    def leave(self, member: str) -> None:
        self.do(LeaveGroup("g", member, self.group().members[member].instance))

    def adopt(self, store: bytes = STORE, **options: Any) -> Any:
        reply = self.do(AdoptStore("g", store, **options))
        while self.do(AdvanceGroupWork()).more:
            pass
        return reply

    def check(self, *ended: int) -> None:
        """Check that every message is in one place, and these have ended."""
        check(self.state, self.group(), self.keys, {(1, 0, offset) for offset in ended})


@pytest.fixture(params=["concurrent", "ordered"])
def world(request: pytest.FixtureRequest) -> StoreWorld:
    world = StoreWorld(t=1)
    world.publish("t", 7, 8, 9, 7, 7)
    world.join("a", mode=request.param, retry=QUICK)
    world.fetch("a")
    return world


def ordered() -> StoreWorld:
    world = StoreWorld(t=1)
    world.publish("t", 7, 8, 9, 7, 7)
    world.join("a", mode="ordered", retry=QUICK)
    world.fetch("a")
    return world


def test_a_stored_message_is_at_its_consumer_and_goes_to_nobody(world: StoreWorld) -> None:
    assert world.report("a", (1, "stored")) == ["kept"]
    world.ack("a", (0, 1), (2, 5))
    world.now += 60 * SECOND
    assert world.fetch("a") == []
    assert world.kinds() == {1: FailedKind.LOCAL}
    store = world.group().stores[STORE]
    assert (store.member, store.host, store.messages, store.attempts) == ("a", "host", 1, 1)
    world.check(0, 2, 3, 4)


def test_a_report_that_changes_nothing_writes_nothing(world: StoreWorld) -> None:
    world.report("a", (1, "stored"))
    records = len(world.log)
    assert world.report("a", (1, "stored"), (1, "stored")) == ["kept", "kept"]
    assert world.ask("a") == []
    assert len(world.log) == records
    assert world.report("a", (1, "stored"), attempt=2, due=5) == ["kept"]
    assert world.group().stores[STORE].attempts == 2


@pytest.mark.parametrize("state", ["acked", "dead", "returned"])
def test_an_outcome_ends_the_stay(world: StoreWorld, state: str) -> None:
    world.report("a", (1, "stored"))
    assert world.report("a", (1, state), (1, state)) == ["settled", "settled"]
    left = {"acked": {}, "dead": {1: FailedKind.LETTER}, "returned": {1: FailedKind.RETRY}}
    assert world.kinds() == left[state]
    assert world.group().stores == {}, "nothing is left to know of it"
    world.ack("a", (0, 1), (2, 5))
    world.check(0, 2, 3, 4, *[1] * (state == "acked"))


def test_what_somebody_else_has_is_elsewhere(world: StoreWorld) -> None:
    world.enter("b")
    assert world.report("b", (1, "stored"), (1, "acked"), store=OTHER) == ["elsewhere"] * 2
    world.report("a", (1, "stored"))
    assert world.report("b", (1, "stored"), (1, "acked"), store=OTHER) == ["elsewhere"] * 2
    assert world.report("a", (1, "dead"), store=OTHER) == ["elsewhere"]
    world.report("a", (1, "dead"))
    assert world.report("a", (1, "stored"), (1, "acked")) == ["elsewhere"] * 2


def test_settled_and_unknown_messages(world: StoreWorld) -> None:
    world.ack("a", (0, 1))
    assert world.report("a", (0, "stored"), (0, "acked")) == ["settled"] * 2
    assert world.report("a", (5, "stored")) == ["unknown"], "beyond the end"
    assert world.report("a", (1, "stored"), topic_id=9) == ["unknown"]
    world.do(DeleteTopic("t"))
    world.do(CreateTopic("t", 1))
    assert world.report("a", (1, "stored"), (1, "acked")) == ["unknown"] * 2
    refused: Any = world.do(ReportStored("g", "nobody", 1, STORE, ""))
    assert type(refused) is UnknownMember


def test_a_stored_message_of_the_lost_part_of_a_log_is_unknown(world: StoreWorld) -> None:
    """Another message has its offset since the restore."""
    at = 1_800_000_000 * SECOND
    world.record(LogRestored(b"i" * 16, at, world.now, at // SECOND))
    world.publish("t", 7, 8)
    world.fetch("a")
    for epoch, verdict in ((1, "unknown"), (0, "unknown"), (at, "kept")):
        assert world.report("a", (5, "stored"), epoch=epoch) == [verdict]
    assert world.report("a", (1, "stored"), epoch=1) == ["kept"], "the backup has it"
    assert world.report("a", (6, "acked"), epoch=1) == ["unknown"]


def test_messages_of_a_deleted_topic_leave_the_store(world: StoreWorld) -> None:
    world.report("a", (0, "stored"), (1, "stored"))
    world.do(ChangeRetries("g", RetryChange.NOW, (("t", 0, 0),)))
    world.delete_topic("t")
    assert (world.kinds(), world.group().stores) == ({}, {})
    assert world.report("a", (0, "stored"), (1, "acked")) == ["unknown"] * 2
    world.check(*range(5))


def test_a_deleted_group_takes_stores_and_orders_with_it(world: StoreWorld) -> None:
    world.report("a", (0, "stored"), (1, "stored"))
    world.do(ChangeRetries("g", RetryChange.NOW, (("t", 0, 0),)))
    world.do(ChangeRetries("g", RetryChange.SKIP, (("t", 0, 1),), "no use"))
    world.leave("a")
    world.do(DeleteGroup("g"))
    while world.do(AdvanceGroupWork()).more:
        pass
    left = {name: found for name, found in rows(world.state).items() if found}
    assert left.keys().isdisjoint({LOCAL, FAILED, FENCES, PARKED})


def test_a_clone_gets_what_is_at_consumers(world: StoreWorld) -> None:
    world.report("a", (1, "stored"))
    world.ack("a", (0, 1), (2, 5))
    world.do(CloneGroup("g", "c"))
    world.join("b", group="c", mode=world.group().settings.mode, retry=QUICK)
    assert [one.offset for one in world.fetch("b", group="c")] == [1]
    assert world.kinds() == {1: FailedKind.LOCAL}, "the source keeps it where it is"


def test_a_lapsed_session_does_not_double_an_effect(world: StoreWorld) -> None:
    world.report("a", (1, "stored"))
    world.leave("a")
    assert world.kinds() == {1: FailedKind.LOCAL}, "its leave does not free it"
    assert world.group().stores[STORE].lost_at == world.state.stored_at
    world.enter("a", "a2")
    assert world.report("a", (0, "acked"), (2, "acked"), (1, "acked")) == ["settled"] * 3
    assert [one.offset for one in world.fetch("a")] == [3, 4]
    world.ack("a", (3, 5))
    world.check(0, 1, 2, 3, 4)


def test_a_restarted_member_goes_on_with_what_nobody_has() -> None:
    world = StoreWorld(t=1)
    world.publish("t", 7, 8, 9)
    world.join("a", retry=QUICK)
    world.fetch("a")
    world.enter("a", "a2")
    assert world.report("a", (1, "stored"), attempt=2) == ["kept"]
    assert sorted(one.offset for one in world.fetch("a")) == [0, 2]
    world.boot()
    world.enter("a", "a3")
    assert world.kinds() == {1: FailedKind.LOCAL}
    assert world.report("a", (0, "acked"), (2, "stored")) == ["settled", "kept"]
    world.check(0)


def test_a_due_retry_is_taken_by_a_store_and_by_its_ack(world: StoreWorld) -> None:
    world.nack("a", 1)
    world.nack("a", 2)
    assert world.report("a", (1, "stored"), (2, "acked"), attempt=2) == ["kept", "settled"]
    assert world.kinds() == {1: FailedKind.LOCAL}
    world.check(2)


def test_later_messages_of_a_key_are_parked_behind_a_stored_one() -> None:
    world = ordered()
    assert world.report("a", (0, "stored"), (3, "stored"), (4, "stored")) == [
        "kept", "parked", "parked",
    ]  # fmt: skip
    fence = world.group().fence(1, 7)
    assert fence is not None
    assert (fence.state, fence.offset, fence.parked) == (FenceState.RETRYING, 0, 2)
    world.ack("a", (1, 3))
    assert world.fetch("a") == []
    world.publish("t", 7)
    assert world.fetch("a") == [], "the key is fenced"
    assert world.report("a", (0, "acked")) == ["settled"]
    assert world.offsets("a") == [3]
    world.check(0, 1, 2)


def test_the_reply_names_the_lease_below_which_messages_of_the_key_follow() -> None:
    world = ordered()
    entry = StoredEntry("t", 1, 0, 0, "stored", 1)
    source = key_source(world.state, "g", entry)
    entry = entry._replace(source=source, key_hash=7)
    reply: Any = world.do(ReportStored("g", "a", world.generation(), STORE, "", (entry,)))
    assert (reply.verdicts, reply.fences) == (("kept",), (2,))
    world.enter("b")
    reply = world.do(ReportStored("g", "b", world.generation(), OTHER, "", (entry,)))
    assert (reply.verdicts, reply.fences) == (("elsewhere",), (world.group().next_lease,))


def test_a_store_does_not_overtake_an_earlier_message_of_its_partition() -> None:
    world = ordered()
    world.leave("a")
    world.enter("b")
    assert world.report("b", (3, "stored")) == ["elsewhere"], "message 0 may have its key"
    assert world.report("b", (0, "acked"), (1, "acked"), (2, "acked"), (3, "stored")) == [
        "settled", "settled", "settled", "kept",
    ]  # fmt: skip
    assert world.report("b", (4, "acked")) == ["settled"], "the effect was made"
    world.check(0, 1, 2, 4)


def lose_the_lease_of_an_earlier_message(*, told_together: bool) -> None:
    world = StoreWorld(t=1)
    world.publish("t", 9, 7)
    world.join("a", mode="ordered", retry=QUICK, lease_us=10 * SECOND)
    world.fetch("a")
    world.now += 8 * SECOND
    world.publish("t", 7)
    world.fetch("a")
    world.now += 3 * SECOND
    world.do(ExpireLeases(world.now))
    for offset, behind in ((1, None), (2, (1, 0, 1) if told_together else None)):
        entry = StoredEntry("t", 1, 0, offset, "stored", 1, behind=behind)
        entry = entry._replace(source=key_source(world.state, "g", entry), key_hash=7)
        command = ReportStored("g", "a", world.generation(), STORE, "", (entry,))
        reply: Any = world.do(command)
        assert reply.verdicts == ("elsewhere",)
    redelivered = list(world.group().positions[TopicPartition(1, 0)].redeliver)
    assert [item[:2] for item in redelivered] == [(0, 2), (2, 3)]
    world.check()


def test_a_message_behind_a_refused_one_goes_back() -> None:
    lose_the_lease_of_an_earlier_message(told_together=True)


def test_a_message_that_is_told_after_a_refused_one_goes_back() -> None:
    lose_the_lease_of_an_earlier_message(told_together=False)


def test_a_message_goes_back_once_one_before_it_was_delivered_again() -> None:
    """It may be of its key, and would wait behind a later one."""
    world = StoreWorld(t=1)
    world.publish("t", 7, 8)
    world.join("a", mode="ordered", retry=QUICK)
    world.fetch("a", most=1)
    world.fetch("a")
    world.return_messages("a", (0, 1))
    assert [one.offset for one in world.fetch("a")] == [0]
    assert world.report("a", (1, "stored")) == ["elsewhere"]
    assert world.report("a", (0, "stored")) == ["kept"]
    assert [one.offset for one in world.fetch("a")] == [1]
    assert world.report("a", (1, "stored")) == ["kept"]
    world.check()


def test_a_message_that_a_store_in_adoption_may_not_keep_goes_back() -> None:
    """Later ones of its key do not overtake it."""
    world = StoreWorld(t=1)
    world.publish("t", 9, 7)
    world.join("a", mode="ordered", retry=QUICK, lease_us=10 * SECOND)
    world.fetch("a", most=1)
    assert world.report("a", (0, "stored")) == ["kept"]
    world.do(AdoptStore("g", STORE, force=True, by="ada"))
    world.fetch("a")
    assert world.report("a", (1, "stored")) == ["elsewhere"]
    world.publish("t", 7)
    assert [one.offset for one in world.fetch("a")] == [1, 2]
    world.check()


def test_one_command_judges_each_entry_on_what_those_before_it_leave() -> None:
    world = ordered()
    world.leave("a")
    world.enter("b")
    entries = [StoredEntry("t", 1, 0, offset, "acked", 1) for offset in range(3)]
    last = StoredEntry("t", 1, 0, 3, "stored", 1)
    last = last._replace(source=key_source(world.state, "g", last), key_hash=7)
    command = ReportStored("g", "b", world.generation(), STORE, "", (*entries, last))
    reply: Any = world.do(command)
    assert reply.verdicts == ("settled", "settled", "settled", "kept")


def test_an_ack_takes_a_parked_message_out_of_its_chain() -> None:
    world = ordered()
    world.report("a", (0, "stored"), (3, "stored"), (4, "stored"))
    assert world.report("a", (3, "acked"), (4, "dead"), (4, "returned")) == [
        "settled", "parked", "parked",
    ]  # fmt: skip
    world.check(3)


def test_a_dead_message_of_a_store_stops_its_key() -> None:
    world = ordered()
    assert world.report("a", (0, "dead"), (3, "dead")) == ["settled", "parked"]
    fence = world.group().fence(1, 7)
    assert fence is not None
    assert fence.state is FenceState.DEAD
    world.check()


def test_a_reset_takes_messages_back_and_the_store_hears_of_it(world: StoreWorld) -> None:
    since = world.generation()
    world.report("a", (0, "stored"), (1, "stored"), since=since)
    world.do(ResetPosition("g", "t", offsets=((0, 1),), reprocess=True))
    assert world.kinds() == {0: FailedKind.LOCAL}, "below it they stay"
    assert world.ask("a") == [(1, StoreOrder.DROP)]
    assert world.report("a", (1, "acked"), (1, "stored"), since=since) == ["elsewhere"] * 2
    assert world.ask("a") == [], "it has answered"
    assert [one.offset for one in world.fetch("a")] in ([1, 2, 3, 4], [1, 2])
    stale = world.report("a", (1, "acked"), (1, "stored"), since=since)
    assert stale == ["elsewhere"] * 2, "the copy is from before the reset"
    assert world.report("a", (1, "stored"), since=world.generation()) == ["kept"]
    world.report("a", (0, "acked"))
    world.check(0)


def test_a_store_without_what_it_shall_drop_ends_no_delivery(world: StoreWorld) -> None:
    world.report("a", (0, "stored"))
    world.do(ResetPosition("g", "t", to="first"))
    assert world.ask("a") == [(0, StoreOrder.DROP)]
    assert 0 in [one.offset for one in world.fetch("a")]
    assert world.report("a", (0, "returned"), attempt=0, failure=None) == ["elsewhere"]
    assert world.kinds() == {}, "its handler has it"
    assert world.ask("a") == []
    world.check()


def test_a_due_retry_of_an_old_copy_is_not_settled_by_it(world: StoreWorld) -> None:
    since = world.generation()
    world.report("a", (1, "stored"), since=since)
    world.do(ResetPosition("g", "t", "first", reprocess=True))
    world.fetch("a")
    world.nack("a", 1)
    assert world.report("a", (1, "acked"), since=since) == ["elsewhere"]


def test_a_retry_order_comes_until_the_store_obeys(world: StoreWorld) -> None:
    world.report("a", (1, "stored"), due=500)
    reply: Any = world.do(ChangeRetries("g", RetryChange.NOW, (("t", 0, 1), ("t", 0, 2))))
    assert (reply.done, [one[:3] for one in reply.refused]) == ((("t", 0, 1),), [("t", 0, 2)])
    for _ in range(2):
        assert world.ask("a") == [(1, StoreOrder.RETRY)]
    world.report("a", (1, "stored"), due=500)
    assert world.ask("a") == [(1, StoreOrder.RETRY)]
    world.report("a", (1, "stored"), due=100)
    assert world.ask("a") == []
    world.leave("a")
    late: Any = world.do(ChangeRetries("g", RetryChange.NOW, (("t", 0, 1),)))
    assert (late.done, "has no owner" in late.refused[0][3]) == ((), True)


def test_a_dropped_message_is_an_abandoned_letter_with_its_reason(world: StoreWorld) -> None:
    world.report("a", (0, "stored"), (3, "stored"))
    refused: Any = world.do(ChangeRetries("g", RetryChange.SKIP, (("t", 0, 0),), ""))
    assert type(refused) is BadRequest
    world.do(ChangeRetries("g", RetryChange.SKIP, (("t", 0, 0),), "a duplicate", "eve"))
    row = moved_rows(world.state, world.group())[1, 0, 0]
    assert (row.kind, row.reason, row.store) == (FailedKind.ABANDONED, "a duplicate", b"")
    assert world.ask("a") == [(0, StoreOrder.DROP)]
    assert world.report("a", (0, "stored")) == ["settled"]
    assert world.ask("a") == []
    world.ack("a", (1, 3), (4, 5))


def test_an_adopted_store_gives_its_messages_to_the_members(world: StoreWorld) -> None:
    world.report("a", (0, "stored"), (1, "stored"))
    world.enter("b")
    refused: Any = world.do(AdoptStore("g", STORE))
    assert type(refused) is Conflict
    assert refused.detail == {"member": "a", "host": "host"}
    world.leave("a")
    assert world.adopt().messages == 2
    assert world.kinds() == {0: FailedKind.RETRY, 1: FailedKind.RETRY}
    got = world.fetch("b")
    assert {(one.offset, one.attempt) for one in got} >= {(0, 2), (1, 2)}
    world.check()


def test_a_step_of_an_adoption_begins_where_the_one_before_has_ended(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted rows cost a look each until the index is written."""
    world.report("a", *[(offset, "stored") for offset in range(3)])
    world.leave("a")
    monkeypatch.setattr(background_work, "STEP_ROWS", 1)
    begins: list[int] = []
    kept = world.state.tables[t.LOCAL]

    class Seen:
        """The table, with the places at which messages are looked for."""

        def __getattr__(self, name: str) -> Any:
            return getattr(kept, name)

        def range(self, start: bytes, stop: bytes) -> Any:
            if len(start) == t.LOCAL_TIME_KEY.size:
                begins.append(t.LOCAL_TIME_KEY.unpack(start)[6])
            return kept.range(start, stop)

    seen: Any = Seen()
    monkeypatch.setitem(world.state.tables, t.LOCAL, seen)
    assert world.adopt().messages == 3
    assert begins == [0, 0, 1, 2]
    world.check()


def test_an_adopted_store_changes_nothing_when_it_comes_back(world: StoreWorld) -> None:
    world.report("a", (0, "stored"), (1, "stored"))
    world.leave("a")
    world.adopt()
    world.enter("a", "a2")
    for state in ("acked", "stored", "dead"):
        assert world.report("a", (0, state), (2, state)) == ["elsewhere"] * 2
    assert world.report("a", (0, "returned")) == ["elsewhere"]
    world.fetch("a")
    assert world.report("a", (0, "stored")) == ["kept"], "delivered after the adoption"
    world.check()


def test_a_copy_tells_first_what_was_acked(world: StoreWorld) -> None:
    world.report("a", (0, "stored"), (1, "stored"))
    refused = world.report("", (0, "acked"))
    assert type(refused[0]) is Conflict, "its owner is alive"
    world.leave("a")
    assert world.report("", (0, "acked"), (1, "stored"), attempt=2) == ["settled", "kept"]
    world.adopt()
    world.enter("b")
    assert (1, 3) in [(one.offset, one.attempt) for one in world.fetch("b")]
    world.check(0)


def test_of_two_copies_of_a_store_only_the_later_members_counts(world: StoreWorld) -> None:
    world.report("a", (0, "stored"))
    world.enter("b")
    assert world.report("b", (0, "stored")) == ["kept"]
    for state in ("stored", "acked", "dead", "returned"):
        [refused] = world.report("a", (0, state))
        assert type(refused) is Conflict
        assert refused.detail == {"member": "b", "host": "host"}
    assert world.kinds() == {0: FailedKind.LOCAL}
    world.leave("b")
    assert world.report("a", (0, "acked")) == ["settled"], "the other one is gone"
    world.check(0)


def test_orders_and_reports_while_a_store_is_being_adopted(world: StoreWorld) -> None:
    world.report("a", (0, "stored"))
    world.do(ChangeRetries("g", RetryChange.NOW, (("t", 0, 0),)))
    world.do(AdoptStore("g", STORE, force=True))
    assert world.report("a", (0, "acked")) == ["elsewhere"]
    refused: Any = world.do(ChangeRetries("g", RetryChange.NOW, (("t", 0, 0),))).refused
    assert refused == (("t", 0, 0, "its store is being adopted"),)
    assert world.adopt().messages == 1
    assert world.group().stores[STORE].orders == 0


def test_many_failures_alike_open_the_circuit_breaker() -> None:
    world = StoreWorld(t=1)
    world.publish("t", *range(5))
    world.join("a", retry=QUICK, flood_keys=3)
    world.fetch("a")
    world.report("a", (0, "stored"), (1, "stored"))
    assert world.group().breaker is None
    world.report("a", (2, "stored"))
    assert world.group().breaker is not None
    world.report("a", (2, "acked"))
    assert world.group().breaker is not None, "that was no probe"


def test_a_breaker_tells_of_messages_that_cannot_be_its_probes() -> None:
    world = StoreWorld(t=1)
    world.publish("t", 1)
    world.join("a", mode="ordered", retry=QUICK, flood_keys=1)
    world.fetch("a")
    world.report("a", (0, "stored"), due=world.now)
    assert world.group().breaker is not None
    assert world.group().unreachable == 0
    world.do(LeaveGroup("g", "a", "a"))
    assert world.group().unreachable == 1
    world.join("b")
    reason = stall_reason(
        world.state, world.group(), TopicPartition(1, 0), StallContext(world.end, world.now)
    )
    assert reason is not None
    assert reason.text.endswith("; 1 message cannot be probes, in local stores without an owner")
    world.adopt()
    assert world.group().unreachable == 0


def test_a_group_has_a_maximum_of_stores(
    world: StoreWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_STORES >= 1_000
    monkeypatch.setattr("txmq.core.consumers.store_reports.MAX_STORES", 1)
    world.report("a", (0, "stored"))
    assert type(world.report("a", (1, "stored"), store=OTHER)[0]) is Throttled
    assert world.report("a", (1, "stored")) == ["kept"]


def test_views_of_a_store(world: StoreWorld) -> None:
    world.report("a", (0, "stored"), (1, "stored"))
    group = find_group(world.state, "g")
    view = describe_store(world.state, group, STORE)
    assert (view["state"], view["messages"], view["oldest"]) == ("owned", 2, world.now)
    page: Any = list_messages(world.state, "g", STORE, None, 1)
    assert ([one.fields["offset"] for one in page[0]], page[1]) == ([0], (1, 0, 0))
    page = list_messages(world.state, "g", STORE, page[1], 10)
    assert ([one.fields["offset"] for one in page[0]], page[1]) == ([1], None)
    assert at_consumers(world.state, group, 1, 0) == {STORE: 2}
    with pytest.raises(Conflict):
        list_messages(world.state, "g", OTHER, None, 1)


@pytest.mark.parametrize(
    ("rule", "bug", "scene"),
    [
        ("_has_earlier", False, test_a_store_does_not_overtake_an_earlier_message_of_its_partition),
        ("_goes_back", False, test_a_message_behind_a_refused_one_goes_back),
        ("_is_overtaken", False, test_a_message_that_is_told_after_a_refused_one_goes_back),
        ("_is_overtaken", False, test_a_message_goes_back_once_one_before_it_was_delivered_again),
        ("_is_given_up", False, test_a_message_that_a_store_in_adoption_may_not_keep_goes_back),
        (
            "_is_from_before_a_reset",
            False,
            test_a_reset_takes_messages_back_and_the_store_hears_of_it,
        ),
        ("_is_old", False, test_an_adopted_store_changes_nothing_when_it_comes_back),
        ("_is_of_lease", True, test_what_somebody_else_has_is_elsewhere),
        ("_obeys", False, test_a_retry_order_comes_until_the_store_obeys),
    ],
)
def test_a_planted_bug_of_a_rule_is_noticed(
    rule: str, bug: object, scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Report, rule, lambda *_: bug)
    worlds = (ordered(),) if scene.__code__.co_argcount else ()
    with pytest.raises(AssertionError):
        scene(*worlds)
