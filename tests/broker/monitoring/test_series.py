"""The store of series for charts."""

from __future__ import annotations

from pathlib import Path

import pytest

import txmq
from tests.broker.support import BrokerInMemory, send_payload, writes
from txmq.broker.monitoring.series import FINE, SeriesStore
from txmq.broker.monitoring.statistics import Statistics
from txmq.core.consumers.commands import JoinGroup
from txmq.core.events.base import KINDS, RecordContext, decode, encode
from txmq.core.series import (
    DAY_STEPS,
    HOUR_STEPS,
    POINTS,
    SAMPLE_S,
    NoteSeries,
    SeriesNoted,
    apply_noted,
    number_at,
    stored,
)
from txmq.core.state.state import State
from txmq.core.topics.topics import CreateTopic
from txmq.store import tables as t
from txmq.store.tables import MemoryTables
from txmq.testing.broker_thread import BrokerThread
from txmq.testing.wait import wait_until
from txmq.wire.data_requests import Opcode


def test_the_last_hour_is_kept_by_samples_and_the_last_day_by_means() -> None:
    store = SeriesStore()
    last = (DAY_STEPS + 2) * POINTS  # the first of a step: the one before has ended
    for number in range(last + 1):
        store.sample(number, {"a": float(number)})
    hour, day = store.points("a", "hour"), store.points("a", "day")
    assert (len(hour), len(day)) == (FINE, DAY_STEPS)
    assert (hour[0], hour[-1]) == (last - FINE + 1, last)
    middle = (POINTS - 1) / 2
    assert (day[0], day[-1]) == (2 * POINTS + middle, last - POINTS + middle)
    assert store.points("b", "hour") == []
    assert (store.end_s("hour"), store.end_s("day")) == (last * SAMPLE_S, last * SAMPLE_S)


def test_a_name_that_was_not_sampled_has_a_gap_and_a_new_one_begins_with_gaps() -> None:
    store = SeriesStore()
    store.sample(70, {"a": 1.0})
    store.sample(71, {"b": 2.0})
    store.sample(74, {"b": 3.0})
    assert store.points("a", "hour") == [1.0, None, None, None, None]
    assert store.points("b", "hour") == [None, 2.0, None, None, 3.0]
    assert store.points("b", "day") == []


def test_a_time_without_samples_is_a_gap_and_shows_nothing_of_an_hour_before() -> None:
    store = SeriesStore()
    for number in range(FINE):
        store.sample(number, {"a": 1.0})
    store.sample(FINE + 100, {"a": 2.0})
    points = store.points("a", "hour")
    assert points == [1.0] * (FINE - 101) + [None] * 100 + [2.0]


def test_the_number_of_series_is_bounded_and_the_gone_ones_make_room() -> None:
    store = SeriesStore(most=3)
    store.sample(0, {"a": 1.0, "b": 1.0})
    store.sample(1, {"b": 1.0, "c": 1.0})
    store.sample(2, {"b": 1.0, "c": 1.0, "d": 1.0})
    assert store.names() == ["b", "c", "d"]
    store.sample(3, {"b": 1.0, "c": 1.0, "d": 1.0, "e": 1.0})
    assert store.names() == ["b", "c", "d"], "those that live are not driven out"
    for number in range(4, (DAY_STEPS + 2) * POINTS):
        store.sample(number, {"b": 1.0})
    assert store.names() == ["b"], "what was gone for a day is forgotten"


def replayed(notes: list[NoteSeries]) -> State:
    """Return the state with these steps."""
    state = State(MemoryTables())
    for note in notes:
        event = decode(KINDS[SeriesNoted], encode(SeriesNoted(*note)))
        assert isinstance(event, SeriesNoted)
        apply_noted(state, event, RecordContext(0, 0, 0, 0, 0))
    return state


def test_steps_bring_all_series_back_and_take_a_bounded_room() -> None:
    store, notes = SeriesStore(), list[NoteSeries]()
    last = 2 * DAY_STEPS * POINTS + 7
    for number in range(last + 1):
        values = {"level": 5.0} | ({"jumps": number % 3 / 3} if number % 4 else {})
        if (note := store.sample(number, values)) is not None:
            notes.append(note)
    unfinished = store.unfinished()
    assert unfinished is not None
    state = replayed([*notes, unfinished])
    assert len(list(state.tables[t.SERIES].range(b""))) == HOUR_STEPS + DAY_STEPS
    again = SeriesStore(stored=stored(state))
    for name in ("level", "jumps"):
        newest = store.points(name, "hour")[-FINE + POINTS :]
        assert again.points(name, "hour")[-len(newest) :] == newest
        assert again.points(name, "day")[:-1] == store.points(name, "day")[1:]
    again.sample(last + 1, {"level": 6.0})
    assert again.points("level", "hour")[-2:] == [5.0, 6.0], "the step goes on"
    assert len(encode(SeriesNoted(*notes[0]))) < 400, "a level takes one value"


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


def test_the_series_of_a_broker_survive_a_restart_without_a_write_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = BrokerInMemory()
    broker.start()
    broker.do(CreateTopic("t", 1))
    written = writes(broker, monkeypatch)
    for _ in range(3 * POINTS):
        broker.pass_time(SAMPLE_S)
    assert written == [], "an idle broker writes nothing"
    assert broker.engine.store.end > broker.engine.store.durable
    before = broker.ask("broker.series", names=["undecided"], span="hour")
    broker.assembly.stop()
    broker.engine.try_drain()
    broker.pass_time(0)
    assert broker.engine.try_drain()
    assert len(written) == 1
    again = Statistics(
        broker.engine, broker.clock, broker.assembly.retention, broker.assembly.catalogues
    )
    again.start()
    found = again.series(["undecided"], "hour")
    assert found["end"] == before["end"]
    assert found["series"] == before["series"]
    assert len(found["series"]["undecided"]) > 2 * POINTS
    day = again.series(["undecided"], "day")["series"]["undecided"]
    assert day[:2] == [0.0, 0.0]


def test_a_stopped_broker_goes_on_with_its_charts(tmp_path: Path) -> None:
    def points() -> list[float | None]:
        reply = client.call("broker.series", names=["letters"], span="hour")
        found: list[float | None] = reply["series"].get("letters", [])
        return found

    with BrokerThread(tmp_path) as broker, txmq.connect(broker.url) as client:
        for number in range(POINTS + 5):
            broker.clock.advance(SAMPLE_S)
            wait_until(lambda: len(points()) > number)  # noqa: B023  # called within the turn
        before = points()
    with BrokerThread(tmp_path) as broker, txmq.connect(broker.url) as client:
        assert points()[: len(before)] == before
        day = client.call("broker.series", names=["letters"], span="day")["series"]["letters"]
        assert day[0] == 0.0


def test_a_clock_that_is_set_back_begins_new_series() -> None:
    broker = BrokerInMemory()
    broker.start()
    for _ in range(3):
        broker.pass_time(SAMPLE_S)
    statistics = broker.assembly.statistics
    statistics._sample_series(number_at(broker.now()) - 60)
    [point] = statistics.series(["letters"], "hour")["series"]["letters"]
    assert point == 0.0


def test_a_restart_behind_a_clock_that_was_set_back_keeps_what_has_a_time() -> None:
    broker = BrokerInMemory()
    broker.start()
    now = number_at(broker.now())
    for step, letters in ((now // POINTS - 1, 7), (now // POINTS + 1_000, 8)):
        broker.do(NoteSeries(step, (("letters", (letters,)),)))
    again = Statistics(
        broker.engine, broker.clock, broker.assembly.retention, broker.assembly.catalogues
    )
    again.start()
    again._sample_series(now + 1)
    kept = again.series(["letters"], "hour")["series"]["letters"]
    assert kept[0] == 7.0
    assert 8.0 not in kept
