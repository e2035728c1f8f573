"""The relay against a real database and a real broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import RFC_4122

import pytest
from structlog.testing import capture_logs

from tests.client.blocking.test_restored_log import Site
from tests.client.real import Found, RealBroker
from tests.system.emit_worker import POLICY, SLOT, running_relay
from tests.tx.postgres.support import poor_role, producer, rows
from txmq import emit
from txmq.client.blocking.client import Client
from txmq.client.protocol import conversation
from txmq.client.protocol.alarm_reports import MIN_DURATION_S, lasting_source, report_alarms
from txmq.client.protocol.sender.rows import micros_now
from txmq.errors import SlotMissing
from txmq.model import limits
from txmq.model.decider import ByChecker
from txmq.model.message import Message
from txmq.relay import slot
from txmq.relay.bundles import (
    CHECKER,
    RelayedTransaction,
    build_parts,
    derive_token,
    first_attempt,
    store_in_parts,
    token_time,
)
from txmq.relay.missed import find_gap, find_lost_commits
from txmq.relay.pgoutput import CommittedTransaction
from txmq.relay.relay_session import StartPosition, read_start
from txmq.relay.slot_stream import SlotSource, SlotStream, TimelineEnd, parse_history
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.session import connect as connect_database
from txmq.wire.bundle import NO_DIGEST, pack_part
from txmq.wire.data_requests import Opcode
from txmq.wire.logical_message import PREFIX, EmittedMessage

WEEKS_US = 30 * 24 * 3600 * 1_000_000
NOW_US = 1_795_255_200_000_000
SOURCE = SlotSource(7, 1, SLOT, 1 << 40)
UNCONFIRMED = replace(POLICY, confirm_every_s=3_600.0)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    running = RealBroker(tmp_path_factory.mktemp("relay"))
    yield running
    running.stop()


@pytest.fixture
def other_broker(tmp_path: Path) -> Iterator[RealBroker]:
    """A broker on which a test may set any watermark."""
    running = RealBroker(tmp_path / "other")
    yield running
    running.stop()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """The test's own topic."""
    name: str = request.node.name
    return name.partition("[")[0][:100]


@pytest.fixture
def dsn(logical_database: str) -> str:
    """A database with a slot."""
    with closing(connect_database(logical_database, application_name="test")) as connection:
        slot.create(connection, SLOT)
    return logical_database


def emitted(dsn: str, topic: str, *bodies: str, key: str | None = "k", **fields: Any) -> None:
    """Commit a transaction with these messages."""
    with closing(producer(dsn)) as connection:
        for body in bodies:
            emit(connection, topic, body.encode(), key=key, **fields)
        connection.commit()


def arrived(broker: RealBroker, topic: str, count: int) -> list[Found]:
    """Return the topic's messages once there are so many."""
    found: list[Found] = []

    def look() -> bool:
        with closing(broker.connection()) as connection:
            topics = connection.call("topic.list", timeout=PATIENCE_S)["topics"]
        if any(row["name"] == topic and row["messages"] >= count for row in topics):
            found.extend(broker.read(topic))
        return bool(found)

    wait_until(look, what=f"{count} messages in {topic}")
    return found


def drop_slot(dsn: str) -> None:
    """Drop the relay's slot once PostgreSQL has let go of it.

    It does so a moment after the relay has closed its connection.
    """
    drop = """SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
        WHERE slot_name = %s AND NOT active"""
    wait_until(lambda: rows(dsn, drop, SLOT), what="a slot that nobody reads")


def bodies(found: list[Found]) -> list[str]:
    return [message.body.decode() for message in found]


def test_a_transaction_is_one_bundle_whose_token_is_derived_from_it(
    broker: RealBroker, dsn: str, topic: str
) -> None:
    emitted(dsn, topic, "one", "two")
    with running_relay(broker.url, dsn):
        found = arrived(broker, topic, 2)
    assert bodies(found) == ["one", "two"]
    token = found[0].message_id.partition("-")[0]
    assert [message.message_id for message in found] == [f"{token}-0", f"{token}-1"]
    with closing(broker.connection()) as connection:
        shown = connection.call("tx.show", {"token": token}, timeout=PATIENCE_S)
    assert (shown["state"], shown["decider"], shown["service"]) == ("PUBLISHED", ["local"], "relay")


def test_a_message_keeps_what_it_was_given(
    broker: RealBroker, dsn: str, topic: str, connect: Callable[..., Client]
) -> None:
    emitted(dsn, topic, "x", key=None, partition=5, tag="t", headers={"h": "v"})
    with (
        running_relay(broker.url, dsn),
        connect(broker.url).consumer("g", [topic], start="first") as consumer,
    ):
        message = consumer.receive(PATIENCE_S)
    assert message is not None
    assert (message.partition, message.key, message.tag, dict(message.headers)) == (
        5,
        None,
        "t",
        {"h": "v"},
    )


def test_what_a_relay_has_stored_its_successor_does_not_store_again(
    broker: RealBroker, dsn: str, topic: str
) -> None:
    """The first relay ends before it confirms anything."""
    emitted(dsn, topic, "one")
    with running_relay(broker.url, dsn, UNCONFIRMED):
        arrived(broker, topic, 1)
    emitted(dsn, topic, "two")
    with running_relay(broker.url, dsn):
        assert bodies(arrived(broker, topic, 2)) == ["one", "two"]


def test_a_backlog_older_than_what_the_broker_remembers_comes_once_and_in_order(
    broker: RealBroker, dsn: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SlotStream.read

    def aged(stream: SlotStream, *, all_stored: bool) -> CommittedTransaction | None:
        committed = read(stream, all_stored=all_stored)
        return (
            None
            if committed is None
            else committed._replace(committed_at=committed.committed_at - WEEKS_US)
        )

    monkeypatch.setattr(SlotStream, "read", aged)
    for number in range(20):
        emitted(dsn, topic, str(number))
    with running_relay(broker.url, dsn, UNCONFIRMED):
        arrived(broker, topic, 20)
    emitted(dsn, topic, "20")
    with running_relay(broker.url, dsn):
        assert bodies(arrived(broker, topic, 21)) == list(map(str, range(21)))


def test_a_transaction_too_large_for_a_frame_comes_whole(
    broker: RealBroker, dsn: str, topic: str
) -> None:
    emitted(dsn, topic, "before")
    with closing(producer(dsn)) as connection:
        for _ in range(5):
            emit(connection, topic, bytes(limits.MESSAGE), key="k")
        connection.commit()
    emitted(dsn, topic, "after")
    with running_relay(broker.url, dsn):
        found = arrived(broker, topic, 7)
    assert [len(message.body) for message in found] == [6, *[limits.MESSAGE] * 5, 5]
    assert len({message.message_id.partition("-")[0] for message in found}) == 3


def order(
    source: SlotSource, place: int, topic: str, *sent: str, at: int | None = None
) -> RelayedTransaction:
    """Return a transaction at that LSN, the first of its source."""
    messages = tuple(
        EmittedMessage(topic, Message(body.encode(), "k"), None, NOW_US) for body in sent
    )
    committed = CommittedTransaction(
        place, place + 1, micros_now() if at is None else at, 5, (b"",) * len(sent)
    )
    return RelayedTransaction(source, committed, messages, 0)


def deadline() -> float:
    return time.monotonic() + PATIENCE_S


@pytest.mark.parametrize("left", ["open", "undecided", "rolled-back"])
def test_what_a_relay_left_half_stored_is_finished(
    broker: RealBroker, topic: str, left: str, connect: Callable[..., Client]
) -> None:
    client = connect(broker.url)
    mine = order(SOURCE._replace(slot=left), 100, f"{topic}-{left}", "one", "two")
    token = derive_token(mine.source, mine.committed, 0)
    [part] = build_parts(client._core, mine, token, ByChecker(CHECKER))
    if left == "open":
        part = part._replace(sealed=False, digest=NO_DIGEST)
    client._core.request(Opcode.GROUP, pack_part(part))
    if left == "rolled-back":
        client.call(
            "tx.decide", token=token.hex, outcome="ROLLBACK", operator="ada", reason="a try"
        )
    for _ in range(2):
        store_in_parts(client._core, mine, deadline())
    assert bodies(broker.read(f"{topic}-{left}")) == ["one", "two"]
    assert client.call("mark.show", name=mine.source.watermark_name(1))["place"] == 100
    assert client.call("tx.list", state="undecided")["transactions"] == []


def test_a_refused_transaction_holds_up_later_ones_until_an_operator_skips_it(
    broker: RealBroker, dsn: str, topic: str
) -> None:
    emitted(dsn, topic, "before")
    rows(dsn, "SELECT pg_logical_emit_message(true, %s, 'no payload of ours')", PREFIX)
    emitted(dsn, topic, "after")
    with capture_logs() as logs:
        with running_relay(broker.url, dsn):
            assert bodies(arrived(broker, topic, 1)) == ["before"]
            wait_until(lambda: refusals(logs), what="a refusal")
        [lsn] = {int(entry["lsn"]) for entry in refusals(logs)}
        with running_relay(broker.url, dsn, replace(POLICY, skip={lsn})):
            assert bodies(arrived(broker, topic, 2)) == ["before", "after"]
    assert [entry["lsn"] for entry in logs if entry["event"] == "relay.skipped"] == [lsn]


def refusals(logs: Sequence[Any]) -> list[Any]:
    return [entry for entry in logs if entry["event"] == "relay.refused"]


def test_alarms_are_logged_when_they_come_and_are_at_the_broker(
    other_broker: RealBroker, dsn: str, topic: str, connect: Callable[..., Client]
) -> None:
    emitted(dsn, topic, "x")
    client = connect(other_broker.url)
    # What the slot retains goes up and down with the server's own writes: the alarm
    # may end and come again while one looks, so each look is kept.
    listed: list[dict[str, Any]] = []

    def look() -> bool:
        alarms = client.call("broker.alarms")["alarms"]
        listed.extend(alarm for alarm in alarms if alarm["name"] == "relay.retained")
        return bool(listed)

    with (
        capture_logs() as logs,
        running_relay(other_broker.url, dsn, replace(POLICY, look_every_s=0.05, retained=1)),
    ):
        wait_until(look, what="the broker's list")
    assert listed[0]["severity"] == "warning"
    logged = next(entry for entry in logs if entry["event"] == "relay.alarm")
    assert (logged["kind"], logged["log_level"]) == ("retained", "error")


def test_a_relay_without_its_slot_waits_with_an_alarm_until_there_is_one(
    other_broker: RealBroker, dsn: str, topic: str, connect: Callable[..., Client]
) -> None:
    client = connect(other_broker.url)
    drop_slot(dsn)
    with running_relay(other_broker.url, dsn):
        wait_until(lambda: alarms(client) == {"relay.missing": "critical"}, what="the alarm")
        with closing(connect_database(dsn, application_name="test")) as connection:
            slot.create(connection, SLOT)
        wait_until(lambda: alarms(client) == {}, what="the end of the alarm")
        emitted(dsn, topic, "x")
        arrived(other_broker, topic, 1)


def test_a_relay_whose_slot_nobody_has_made_ends_and_leaves_an_alarm(
    other_broker: RealBroker, logical_database: str, connect: Callable[..., Client]
) -> None:
    with (
        pytest.raises(SlotMissing, match="txmq relay create"),
        running_relay(other_broker.url, logical_database) as relay,
    ):
        assert relay.ended.wait(PATIENCE_S)
    assert alarms(connect(other_broker.url)) == {"relay.stopped": "critical"}


def test_a_relay_knows_its_slot_by_the_watermark_alone(
    other_broker: RealBroker, dsn: str, topic: str, connect: Callable[..., Client]
) -> None:
    """As after a restore to a time before the slot was made."""
    client = connect(other_broker.url)
    emitted(dsn, topic, "one")
    with running_relay(other_broker.url, dsn):
        arrived(other_broker, topic, 1)
    with closing(connect_database(dsn, application_name="test")) as connection:
        slot.drop(connection, SLOT)
    with running_relay(other_broker.url, dsn):
        wait_until(lambda: alarms(client) == {"relay.missing": "critical"}, what="the alarm")


def test_what_a_new_slot_has_missed_is_an_alarm_until_it_is_accepted(
    other_broker: RealBroker, dsn: str, topic: str, connect: Callable[..., Client]
) -> None:
    client = connect(other_broker.url)
    emitted(dsn, topic, "one")
    with running_relay(other_broker.url, dsn):
        arrived(other_broker, topic, 1)
    drop_slot(dsn)
    with running_relay(other_broker.url, dsn):
        emitted(dsn, topic, "missed")
        wait_until(lambda: alarms(client) == {"relay.missing": "critical"}, what="the alarm")
        with closing(connect_database(dsn, application_name="test")) as connection:
            slot.create(connection, SLOT)
        emitted(dsn, topic, "two")
        assert bodies(arrived(other_broker, topic, 2)) == ["one", "two"]
    for number in range(2):  # the next relay knows it, too
        forget_alarms(client)
        with running_relay(other_broker.url, dsn):
            wait_until(lambda: alarms(client) == {"relay.missed": "critical"}, what="the alarm")
            if number:
                with closing(connect_database(dsn, application_name="test")) as connection:
                    slot.accept_missed(connection, SLOT)
                wait_until(lambda: alarms(client) == {}, what="the end of the alarm")


def test_what_a_restored_broker_may_lack_is_an_alarm_until_the_restore_is_accepted(
    tmp_path: Path,
    dsn: str,
    topic: str,
    connect: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(tmp_path)
    for bodies_ in (("one",), ("two", "three")):
        if bodies_ != ("one",):
            site.back_up()
        emitted(dsn, topic, *bodies_)
        with running_relay(site.broker.url, dsn):
            arrived(site.broker, topic, len(bodies_))
    site.restore()
    for name in ("_newest_epochs", "_incarnations"):
        monkeypatch.setattr(conversation, name, {})
    client = connect(site.broker.url)
    for number in range(2):  # the next relay knows it, too
        forget_alarms(client)
        with running_relay(site.broker.url, dsn):
            wait_until(lambda: alarms(client) == {"relay.restored": "critical"}, what="the alarm")
            emitted(dsn, topic, f"later {number}")
            arrived(site.broker, topic, number + 2)
            if number:
                client.call("log.accept", operator="ada", reason="sent again")
                wait_until(lambda: alarms(client) == {}, what="the end of the alarm")
    site.broker.stop()


def test_a_slot_of_another_name_knows_the_one_that_is_gone(
    other_broker: RealBroker, dsn: str, topic: str, connect: Callable[..., Client]
) -> None:
    """The publication is left of a slot in a database that was restored."""
    emitted(dsn, topic, "one")
    with running_relay(other_broker.url, dsn):
        arrived(other_broker, topic, 1)
    drop_slot(dsn)
    with closing(connect_database(dsn, application_name="test")) as connection:
        made = slot.create(connection, "another", replaces=["older"])
    assert made.origin is not None
    assert made.origin.replaces == ("older", SLOT)
    core = connect(other_broker.url)._core
    with closing(SlotStream(dsn, "another")) as stream:
        for _ in range(2):
            gap = find_gap(core, stream.source, made.origin)
            assert gap is not None
            assert gap.end == made.origin.made_at
            assert abs(gap.at - micros_now()) < 3_600_000_000


def test_the_first_slot_has_missed_nothing(
    other_broker: RealBroker, dsn: str, topic: str, connect: Callable[..., Client]
) -> None:
    core = connect(other_broker.url)._core
    for number in range(2):
        emitted(dsn, topic, str(number))
        with closing(SlotStream(dsn, SLOT)) as stream:
            assert stream.origin is not None
            assert find_gap(core, stream.source, stream.origin) is None
        with running_relay(other_broker.url, dsn):
            arrived(other_broker, topic, number + 1)


def alarms(client: Client) -> dict[str, str]:
    """Return the severities of the relay's alarms, by name."""
    listed = client.call("broker.alarms")["alarms"]
    return {row["name"]: row["severity"] for row in listed if row["name"].startswith("relay.")}


def forget_alarms(client: Client) -> None:
    """Forget what relays have reported so far."""
    report_alarms(client.call, lasting_source(f"relay-{SLOT}"), [], MIN_DURATION_S)


def texts(client: Client) -> str:
    """Return the texts of all alarms."""
    return "\n".join(row["text"] for row in client.call("broker.alarms")["alarms"])


def test_a_relay_that_cannot_reach_its_database_has_an_alarm(
    other_broker: RealBroker, dsn: str, connect: Callable[..., Client]
) -> None:
    client = connect(other_broker.url)
    with running_relay(other_broker.url, f"{dsn} password=wrong user=nobody"):
        wait_until(lambda: alarms(client) == {"relay.unreachable": "critical"}, what="the alarm")


def test_a_relay_that_cannot_read_its_slot_has_an_alarm(
    other_broker: RealBroker, dsn: str, connect: Callable[..., Client]
) -> None:
    client = connect(other_broker.url)
    with poor_role(dsn) as (_role, poor), running_relay(other_broker.url, poor):
        wait_until(lambda: alarms(client) == {"relay.stopped": "critical"}, what="the alarm")


def test_a_database_whose_log_ends_before_what_the_broker_has_is_refused(
    other_broker: RealBroker, dsn: str, topic: str, connect: Callable[..., Client]
) -> None:
    source = source_of(dsn)
    store_in_parts(
        connect(other_broker.url)._core,
        order(source, source.end_lsn << 1, topic, "x"),
        deadline(),
    )
    require_rewound(other_broker, dsn, connect, "log ends at")


def require_rewound(
    broker: RealBroker, dsn: str, connect: Callable[..., Client], text: str
) -> None:
    """Require that a relay says so with an alarm, and sends nothing."""
    client = connect(broker.url)
    with running_relay(broker.url, dsn):
        wait_until(lambda: alarms(client) == {"relay.rewound": "critical"}, what="the alarm")
        wait_until(lambda: text in texts(client), what="the alarm says why")


def source_of(dsn: str) -> SlotSource:
    with closing(SlotStream(dsn, SLOT)) as stream:
        return stream.source


def test_a_new_timeline_goes_on_where_it_parted_from_the_old_one(
    broker: RealBroker, topic: str, connect: Callable[..., Client]
) -> None:
    core = connect(broker.url)._core
    store_in_parts(
        core,
        order(SOURCE._replace(slot=topic), 500, topic, "x", at=NOW_US + micros_now()),
        deadline(),
    )
    history = parse_history(
        "1\t0/190\tno recovery target specified\n\n# a comment\n2\t0/300\tbefore\n"
    )
    assert history == (TimelineEnd(1, 400), TimelineEnd(2, 768))
    later = SOURCE._replace(slot=topic, timeline=3)
    assert read_start(core, later._replace(history=history))[:2] == (0, 400)
    assert read_start(core, later._replace(history=(TimelineEnd(1, 900),)))[:2] == (0, 500)
    assert read_start(core, later) == StartPosition(0, 0, 0)


def test_what_a_failover_has_lost_hides_nothing_that_a_new_slot_has_missed(
    broker: RealBroker, topic: str, connect: Callable[..., Client]
) -> None:
    """The relay had read further than where the standby was promoted."""
    core, first = connect(broker.url)._core, SOURCE._replace(slot=topic)
    store_in_parts(core, order(first, 500, topic, "x"), deadline())
    later, origin = first._replace(timeline=2, history=(TimelineEnd(1, 400),)), slot.SlotOrigin(450)
    gap = find_gap(core, later, origin)
    assert gap is not None
    assert gap.end == 450
    [lost] = find_lost_commits(core, later, origin)
    assert lost[:3] == (1, 400, 500)
    assert find_lost_commits(
        core, later._replace(slot="new"), origin._replace(replaces=(topic,))
    ) == (lost,)
    assert find_lost_commits(core, later, origin._replace(timeline=2)) == ()
    assert find_lost_commits(core, later._replace(history=(TimelineEnd(1, 500),)), None) == ()


def test_messages_whose_rows_a_failover_has_lost_are_an_alarm_until_they_are_accepted(
    other_broker: RealBroker,
    dsn: str,
    topic: str,
    connect: Callable[..., Client],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, start = connect(other_broker.url), SlotStream._start
    earlier = source_of(dsn)._replace(timeline=0)
    store_in_parts(client._core, order(earlier, 500, topic, "lost"), deadline())
    history = (TimelineEnd(0, 400),)
    monkeypatch.setattr(SlotStream, "_start", lambda one: start(one)._replace(history=history))
    with running_relay(other_broker.url, dsn):
        wait_until(lambda: alarms(client) == {"relay.missed": "critical"}, what="the alarm")
        assert "a failover has lost rows of messages that were sent" in texts(client)
        assert "behind LSN 0/190 up to 0/1F4" in texts(client)
        with closing(connect_database(dsn, application_name="test")) as connection:
            accepted = slot.accept_missed(connection, SLOT)
        assert accepted.origin is not None
        assert accepted.origin.timeline == 1
        wait_until(lambda: alarms(client) == {}, what="the end of the alarm")


def test_a_primary_that_a_failover_has_left_behind_is_not_relayed(
    other_broker: RealBroker, dsn: str, topic: str, connect: Callable[..., Client]
) -> None:
    emitted(dsn, topic, "to a primary that came back")
    source = source_of(dsn)
    after = order(source._replace(timeline=source.timeline + 1), 500, topic, "new")
    store_in_parts(connect(other_broker.url)._core, after, deadline())
    require_rewound(other_broker, dsn, connect, "has left the database behind")
    assert bodies(other_broker.read(topic)) == ["new"]


def test_names_are_those_of_a_transaction_and_never_of_another() -> None:
    committed = CommittedTransaction(100, 101, NOW_US, 5, ())
    names = [
        derive_token(SOURCE, committed, 0),
        derive_token(SOURCE, committed, 1),
        derive_token(SOURCE._replace(slot="other"), committed, 0),
        derive_token(SOURCE, committed._replace(lsn=101), 0),
        derive_token(SOURCE, committed._replace(committed_at=NOW_US + 1), 0),
    ]
    assert len(set(names)) == len(names)
    assert {(name.version, name.variant) for name in names} == {(7, RFC_4122)}
    assert derive_token(SOURCE._replace(timeline=2), committed, 0) == names[0]
    assert names[0].int >> 80 == NOW_US // 1_000


def test_the_first_name_to_try_is_younger_than_what_was_refused() -> None:
    committed = CommittedTransaction(100, 101, NOW_US, 5, ())
    for refused in (0, NOW_US // 1_000 - 1):
        assert first_attempt(committed, refused) == 0
    for step in (0, 1, 5):
        assert first_attempt(committed, token_time(committed, step)) == step + 1
