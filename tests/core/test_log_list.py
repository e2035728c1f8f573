"""The list of logs: who may change it, and which topics have keys at which log."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from tests.core.test_users import Fold
from txmq.core import machine
from txmq.core.log_list import CopyList, DrainLog, ListLogs, RemoveLog
from txmq.core.topics.topics import CreateTopic, DeleteTopic
from txmq.errors import RequestRejected
from txmq.model.cluster import ListedLog, LogList

A, B, C, D = (UUID(int=number) for number in range(1, 5))


def listing(*logs: UUID, **how: bool) -> ListLogs:
    return ListLogs(A, tuple((log, f"{log.int}:1") for log in logs), **how)


def with_keys(fold: Fold, topic: str) -> list[UUID]:
    topic_id = fold.state.topics[topic].topic_id
    return [log.log_id for log in fold.state.logs.logs if log.has_keys_of(topic_id)]


@pytest.fixture
def fold() -> Fold:
    """The state of log A, which has a topic."""
    fold = Fold()
    fold.do(CreateTopic("old", 2))
    return fold


def refused(fold: Fold, command: object) -> str:
    before = fold.state.logs
    reply = fold.do(command)
    assert isinstance(reply, RequestRejected)
    assert fold.state.logs == before
    return reply.message


def test_a_topic_keeps_the_logs_that_were_listed_when_it_was_made(fold: Fold) -> None:
    fold.do(listing(A, B))
    fold.do(CreateTopic("newer", 2))
    fold.do(listing(C))
    fold.do(CreateTopic("newest", 2))
    fold.do(DrainLog(A, B))
    fold.do(CreateTopic("last", 2))
    expected = {"old": [A], "newer": [A, B], "newest": [A, B, C], "last": [A, C]}
    assert {topic: with_keys(fold, topic) for topic in expected} == expected


def test_logs_that_programs_named_together_have_keys_of_all_topics(fold: Fold) -> None:
    fold.do(listing(A, B, together=True))
    assert with_keys(fold, "old") == [A, B]
    assert "not spread anew" in refused(fold, listing(C, together=True))
    assert fold.do(listing(A, B, together=True)) == fold.state.logs


def test_what_was_done_is_not_done_again(fold: Fold) -> None:
    listed = fold.do(listing(A, B))
    events = list(fold.events)
    assert fold.do(listing(B)) == listed
    fold.do(DrainLog(A, B))
    drained = fold.do(DrainLog(A, B))
    assert len(fold.events) == len(events) + 1
    assert drained.version > listed.version


def test_both_of_two_operators_add_their_log(fold: Fold) -> None:
    fold.do(listing(A, B))
    fold.do(listing(C))
    fold.do(listing(D))
    assert [log.log_id for log in fold.state.logs.logs] == [A, B, C, D]


def test_a_log_is_listed_once_and_moves_only_if_that_was_said(fold: Fold) -> None:
    fold.do(listing(A, B))
    elsewhere = ((B, "elsewhere:1"),)
    assert "is listed already, at 2:1" in refused(fold, ListLogs(A, elsewhere))
    twice = ((C, "3:1"), (C, "3:2"))
    assert "is listed already" in refused(fold, ListLogs(A, twice))
    fold.do(ListLogs(A, elsewhere, moved=True))
    assert fold.state.logs.logs[1] == ListedLog(B, "elsewhere:1", fold.state.next_topic_id)


def test_only_the_first_log_changes_the_list_and_others_take_copies(fold: Fold) -> None:
    listed = fold.do(listing(A, B))
    other = Fold()
    assert other.do(CopyList(B, listed)) == listed
    assert "kept by its first log" in refused(other, ListLogs(B, ((C, "3:1"),)))
    assert "kept by its first log" in refused(other, DrainLog(B, A))
    later = fold.do(listing(C))
    other.do(CopyList(B, later))
    assert other.do(CopyList(B, listed)) == later  # an older one is left alone
    assert "no copy" in refused(fold, CopyList(A, later._replace(version=later.version + 1)))
    foreign = LogList(later.version + 1, (ListedLog(D, "4:1", 0), ListedLog(B, "2:1", 0)))
    assert "listed by another one" in refused(other, CopyList(B, foreign))
    assert "no copy" in refused(Fold(), CopyList(D, later))


def test_a_new_list_begins_with_its_own_log_and_has_others(fold: Fold) -> None:
    for logs in ((B, A), (A,), (B,)):
        assert "begins with this log" in refused(fold, listing(*logs))


def test_a_log_is_removed_once_it_is_drained_and_has_no_keys(fold: Fold) -> None:
    fold.do(listing(A, B))
    fold.do(CreateTopic("newer", 2))
    assert "is not drained" in refused(fold, RemoveLog(A, B))
    fold.do(DrainLog(A, B))
    assert "1 topics, such as 'newer'" in refused(fold, RemoveLog(A, B))
    assert "all other logs are drained" in refused(fold, DrainLog(A, A))
    fold.do(DeleteTopic("newer"))
    assert [log.log_id for log in fold.do(RemoveLog(A, B)).logs] == [A]
    assert "there is no log" in refused(fold, RemoveLog(A, B))
    assert "is the first one" in refused(fold, RemoveLog(A, A))


def test_a_list_has_an_end(fold: Fold) -> None:
    many = [UUID(int=number) for number in range(1, 18)]
    assert "too many" in refused(fold, listing(*many))
    long: Any = ((A, "a:1"), (B, "b" * 1_600))
    assert "too many" in refused(fold, ListLogs(A, long))


def test_a_restored_first_log_makes_later_versions_than_copies_have(fold: Fold) -> None:
    listed = fold.do(listing(A, B))
    fold.do(listing(C))
    restored = Fold()
    restored.state.logs = listed
    made = machine.decide(restored.state, listing(C), now=listed.version + 1_000_000)
    assert not isinstance(made, RequestRejected)
    assert made.reply.version > fold.state.logs.version  # type: ignore[attr-defined]  # a list


def test_snapshot_and_log_give_the_same_list(fold: Fold) -> None:
    fold.do(listing(A, B))
    fold.do(DrainLog(A, B))
    machine.save(fold.state)
    assert machine.load(fold.tables).logs == fold.state.logs
