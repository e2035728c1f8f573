"""The store of series for charts."""

from __future__ import annotations

from tests.broker.support import BrokerInMemory, send_payload
from txmq.broker.monitoring.series import COARSE, FINE, FINE_PER_COARSE, SeriesStore
from txmq.core.consumers.commands import JoinGroup
from txmq.core.topics.topics import CreateTopic
from txmq.wire.data_requests import Opcode


def test_the_last_hour_is_kept_by_samples_and_the_last_day_by_means() -> None:
    store = SeriesStore()
    for number in range(COARSE * FINE_PER_COARSE + 2 * FINE_PER_COARSE):
        store.sample({"a": float(number)})
    hour, day = store.points("a", "hour"), store.points("a", "day")
    assert len(hour) == FINE
    assert len(day) == COARSE
    assert hour[-1] == number
    assert hour[0] == number - FINE + 1
    assert day[-1] == number - (FINE_PER_COARSE - 1) / 2
    assert day[0] == 2 * FINE_PER_COARSE + (FINE_PER_COARSE - 1) / 2
    assert store.points("b", "hour") == []


def test_a_name_that_was_not_sampled_has_a_gap_and_a_new_one_begins_with_gaps() -> None:
    store = SeriesStore()
    store.sample({"a": 1.0})
    store.sample({"b": 2.0})
    assert store.points("a", "hour") == [1.0, None]
    assert store.points("b", "hour") == [None, 2.0]
    assert store.points("b", "day") == []


def test_the_number_of_series_is_bounded_and_the_gone_ones_make_room() -> None:
    store = SeriesStore(most=3)
    store.sample({"a": 1.0, "b": 1.0})
    store.sample({"b": 1.0, "c": 1.0})
    store.sample({"b": 1.0, "c": 1.0, "d": 1.0})
    assert store.names() == ["b", "c", "d"]
    store.sample({"b": 1.0, "c": 1.0, "d": 1.0, "e": 1.0})
    assert store.names() == ["b", "c", "d"], "those that live are not driven out"
    for _ in range((COARSE + 1) * FINE_PER_COARSE):
        store.sample({"b": 1.0})
    assert store.names() == ["b"], "what was gone for a day is forgotten"


def test_a_broker_samples_itself() -> None:
    broker = BrokerInMemory()
    broker.start()
    broker.do(CreateTopic("t", 1))
    broker.do(JoinGroup("g", "m", "i", "concurrent", ("t",)))
    client = broker.connect()
    broker.pass_time(10)
    for sequence in range(50):
        assert client.ask(Opcode.SEND, send_payload(sequence)).status == 0
    for _ in range(4):
        broker.pass_time(10)
    names = ["in_rate", "unprocessed", "flush_ms", "undecided", "group:g:unprocessed", "no-such"]
    reply = broker.ask("broker.series", names=names, span="hour")
    assert reply["step_s"] == 10
    assert reply["end"] <= broker.now()
    series = reply["series"]
    assert max(filter(None, series["in_rate"])) > 0
    assert series["unprocessed"][-1] == series["group:g:unprocessed"][-1] == 50
    assert series["undecided"][-1] == 0
    assert any(value is not None for value in series["flush_ms"])
    assert series["no-such"] == []
    assert set(names[:5]) <= set(broker.ask("broker.series")["names"])
