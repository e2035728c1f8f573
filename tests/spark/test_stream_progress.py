"""Progress of a stream: what Spark keeps, and how it follows the broker."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadAllAvailable

from txmq.errors import ConfigError
from txmq_spark.source.arrow_messages import OffsetRange
from txmq_spark.source.broker_link import BrokerLink
from txmq_spark.source.logs import LogPlace, Surveyed
from txmq_spark.source.message_stream import MessageStream, _uncounted
from txmq_spark.source.offset_ranges import (
    DataLoss,
    LogName,
    Loss,
    Survey,
    TopicBounds,
    report_losses,
)
from txmq_spark.source.options import parse_read_options
from txmq_spark.source.stream_progress import (
    Progress,
    TopicProgress,
    follow,
    limit_logs,
    limit_progress,
    logs_json,
    newest_progress,
    paired,
    parse_progress,
    restored_ends,
)

LOG = LogName("log", "")
ID = 7


def progress(*offsets: int, log: LogName = LOG, topic_id: int = ID) -> Progress:
    return Progress(log, {"orders": TopicProgress(topic_id, offsets)}, {})


def bounds(ends: list[int], firsts: list[int] | None = None) -> TopicBounds:
    return TopicBounds(ID, firsts or [0] * len(ends), ends)


def survey(ends: list[int], firsts: list[int] | None = None, log: LogName = LOG) -> Survey:
    return Survey(log, {"orders": bounds(ends, firsts)})


def every(_name: str) -> bool:
    return True


def test_progress_is_the_same_text_whenever_it_is_written() -> None:
    one = Progress(
        LOG, {"b": TopicProgress(1, (4, 0)), "a": TopicProgress(2, (9,))}, {"b/1": 3, "a/0": 1}
    )
    text = json.dumps(one.to_json())
    assert parse_progress(json.loads(text)) == (one,)
    assert json.dumps(logs_json(parse_progress(json.loads(text)))) == text
    assert list(json.loads(text)["topics"]) == ["a", "b"]


@pytest.mark.parametrize(
    "tree",
    [
        {},
        [],
        {"orders": {"0": 23}},  # Kafka's
        progress(1).to_json() | {"version": 2},
        progress(1).to_json() | {"more": 1},
        progress(1).to_json() | {"at": "b:7650"},  # of a log without an id
        progress(1).to_json() | {"others": [{}]},
        progress(1).to_json() | {"topics": {"orders": {"id": 1, "offsets": {"1": 0}}}},
        progress(1).to_json() | {"topics": {"orders": {"id": 1, "offsets": {"0": -1}}}},
        progress(1).to_json() | {"topics": {"orders": {"id": 1, "offsets": {"0": 1 << 70}}}},
    ],
)
def test_progress_of_another_source_is_refused(tree: Any) -> None:
    with pytest.raises(ConfigError, match="not those of a txmq stream"):
        parse_progress(tree)


def test_progress_in_several_logs_is_one_text_that_begins_with_the_first() -> None:
    one, other = progress(4), progress(9, log=LogName(str(UUID(int=1)), "c"))._replace(at="b:7650")
    text = json.dumps(logs_json([one, other]))
    assert parse_progress(json.loads(text)) == (one, other)
    assert parse_progress(logs_json([one])) == (one,)
    assert parse_progress(logs_json([one, other._replace(at="", left=True)]))[1].left
    assert one.to_json().items() <= json.loads(text).items()


def test_progress_goes_to_its_log_and_that_of_a_log_that_is_gone_is_lost() -> None:
    a, b, c = (LogName(name, "") for name in "abc")
    old, gone, left = progress(1, log=a), progress(2, log=b), progress(3, log=c, topic_id=8)
    left = left._replace(left=True)
    pairs = paired([old, gone, left], [a])
    assert pairs == ([old], [gone], [left])
    assert "log b" in str(pairs.lost(every)[0])
    assert not pairs.lost("other".__eq__)
    assert paired([old, gone], [a, c]).present == [old, gone], "c took the place of b"
    assert paired([old], [c, a]) == ([Progress(c, {}, {}), old], [], [])
    assert paired([old, left], [a, c]).present == [old, left], "it is listed again"


def test_messages_that_are_skipped_in_one_place_of_several_logs_are_counted_once_each() -> None:
    losses = [Loss("orders/0", "removed", 5), Loss("orders/0", "removed", 3), Loss("all", "gone")]
    planned = progress(9)._replace(skipped={"orders/0": 5})
    assert _uncounted(losses, [progress(0)], [planned]) == [Loss("orders/0", "removed", 3)]
    assert _uncounted(losses, [planned], [progress(9)]) == losses[:2], "as of a log that is gone"


def test_a_limit_is_shared_by_the_logs() -> None:
    start = [progress(0), progress(0, log=LogName("b", "")), progress(5)]
    end = [progress(90), progress(10, log=LogName("b", "")), progress(5)]
    assert limit_logs(start, end, 100) == end
    read = [one.topics["orders"].offsets for one in limit_logs(start, end, 10)]
    assert read == [(9,), (1,), (5,)]
    assert [one.topics["orders"].offsets for one in limit_logs(start, end, 1)] == [(1,), (1,), (5,)]


def test_new_partitions_and_topics_are_read_from_their_beginning() -> None:
    later = Survey(LOG, {"new": TopicBounds(9, [2], [5]), "orders": bounds([4, 3])})
    now, losses = follow(progress(4), later, every, {})
    end = newest_progress(now, later, None)
    assert not losses
    assert end.ranges_from(now) == [
        OffsetRange("new", 0, 2, 5),
        OffsetRange("orders", 1, 0, 3),
    ]


def test_a_topic_that_is_not_selected_for_a_while_is_read_on_where_it_was() -> None:
    others = Survey(LOG, {"new": TopicBounds(9, [0], [5])})
    now, losses = follow(progress(4), others, "new".__eq__, {})
    end = newest_progress(now, others, None)
    assert not losses
    assert limit_progress(now, end, 2).ranges_from(now) == [OffsetRange("new", 0, 0, 2)]
    both = Survey(LOG, {**others.topics, "orders": bounds([7])})
    [kept] = parse_progress(end.to_json())
    again, losses = follow(kept, both, every, {})
    assert not losses
    assert newest_progress(again, both, None).ranges_from(end) == [OffsetRange("orders", 0, 4, 7)]


def test_offsets_of_another_log_are_not_kept_for_topics_that_are_not_selected() -> None:
    now, losses = follow(progress(4), Survey(A, {}), lambda _name: False, {ID: [4]})
    assert (now.topics, losses) == ({}, [])


def test_a_planned_batch_of_a_topic_that_is_not_selected_any_more_is_not_skipped() -> None:
    class Refunds(MessageStream):
        def _surveys(self, progress: Sequence[Progress]) -> list[Surveyed]:
            survey = Survey(LOG, {"refunds": TopicBounds(9, [0], [5])})
            return [Surveyed(LogPlace(BrokerLink(self._options.url)), survey)]

    asked = {"url": "txmq://nowhere:1", "topic": "refunds"}
    stream = Refunds(parse_read_options(asked), ("body",))
    begun, planned = progress(4).to_json(), progress(7).to_json()
    with pytest.raises(ConfigError, match="has planned also reads orders"):
        stream.partitions(begun, planned)
    assert len(stream.partitions(planned, stream.latestOffset(planned, ReadAllAvailable()))) == 1
    # A watch selects the topics of its groups: nobody can have it select another one.
    stream = Refunds(parse_read_options(asked | {"failOnDataLoss": "false"}), ("body",))
    assert stream.partitions(begun, planned) == []
    end = stream.latestOffset(planned, ReadAllAvailable())
    assert end["skipped"] == {"orders/0": 3}
    assert len(stream.partitions(planned, end)) == 1


A = LogName("log", "A")
NONE: dict[int, list[int]] = {}


@pytest.mark.parametrize(
    ("before", "now", "restored", "says", "offsets"),
    [
        (progress(2), survey([9], [5]), NONE, "orders/0: retention has removed offsets 2 to 4", 5),
        (progress(2, topic_id=3), survey([9], [1]), NONE, "deleted and made again", 1),
        (progress(2), Survey(LOG, {}), NONE, "orders: it was deleted", None),
        (progress(7), survey([9], log=A), {ID: [4]}, "restored from a backup: it ended at", 4),
        (progress(7), survey([5]), NONE, "restored from a backup: it ended at offset 5", 5),
        (progress(2), survey([9], [1], LogName("other", "")), None, "the broker has log other", 1),
        (progress(2, log=A), survey([9]), None, "incarnation original, and the stream", 0),
    ],
)
def test_what_is_lost_is_an_error_or_said(
    before: Progress,
    now: Survey,
    restored: dict[int, list[int]] | None,
    says: str,
    offsets: int | None,
) -> None:
    found, losses = follow(before, now, every, restored)
    assert len(losses) == 1
    with pytest.raises(DataLoss, match=says):
        report_losses(losses, fail=True)
    report_losses(losses, fail=False)
    assert found.log == now.log
    assert {n for topic in found.topics.values() for n in topic.offsets} == {offsets} - {None}


def test_a_stream_behind_a_restore_has_lost_nothing() -> None:
    found, losses = follow(progress(3), survey([9], log=A), every, {ID: [4]})
    assert (found, losses) == (progress(3, log=A), [])


def test_a_partition_grown_and_passed_by_retention_before_it_was_seen_is_a_loss() -> None:
    found, losses = follow(progress(3), survey([3, 9], [0, 5]), every, {})
    assert found.topics["orders"].offsets == (3, 5)
    assert found.skipping(losses).skipped == {"orders/1": 5}


def test_the_lowest_end_counts_over_several_restores() -> None:
    reply = {
        "restores": [
            {"incarnation": name, "epoch": epoch} for name, epoch in (("A", 1), ("B", 2), ("C", 3))
        ],
        "topics": [{"topic_id": ID, "ends": [[1, [3]], [2, [9, 2]], [3, [8, 4, 1]]]}],
    }
    now = LogName("log", "C")
    assert restored_ends(reply, A, now) == {ID: [8, 2]}
    assert restored_ends(reply, LOG, now) == {ID: [3]}
    assert restored_ends(reply, now, now) == {}
    assert restored_ends(reply, LogName("log", "lost"), now) is None
    assert restored_ends(reply, LogName("other", ""), now) is None


def test_available_now_leaves_out_what_came_later() -> None:
    end = newest_progress(progress(1, 0), survey([9, 5]), {("orders", 0): 4})
    assert end.topics["orders"].offsets == (4, 0)
    skipped = newest_progress(progress(6), survey([9]), {("orders", 0): 4})
    assert skipped.topics["orders"].offsets == (6,)


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=6),
    st.integers(1, 300),
)
def test_a_limit_is_shared_in_proportion_and_starves_nobody(
    places: list[tuple[int, int]], most: int
) -> None:
    begun = progress(*(offset for offset, _lag in places))
    end = newest_progress(begun, survey([offset + lag for offset, lag in places]), None)
    found = limit_progress(begun, end, most).ranges_from(begun)
    waiting = Counter({n: lag for n, (_offset, lag) in enumerate(places) if lag})
    sizes = {offsets.partition: offsets.end - offsets.start for offsets in found}
    assert sizes.keys() == waiting.keys()
    assert all(0 < sizes[n] <= waiting[n] for n in sizes)
    assert sum(sizes.values()) <= max(most, len(waiting))
    assert sum(sizes.values()) >= min(most, waiting.total()) - len(waiting)
