"""Clients, inboxes and operators of a log that was restored from a backup."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import txmq
from tests.cli.peer import peer
from tests.cli.support import run as txmq_command
from tests.client.blocking.test_copied_broker import refusals, reported
from tests.client.blocking.test_inbox_identity import Connect, make
from tests.client.blocking.test_inbox_resets import run, send
from tests.client.effects import effects, with_effects
from tests.client.kept_sessions import asked
from tests.client.real import ROOT, RealBroker, bodies
from tests.client.real_consumers import run_until, shown
from tests.client.scripted_member import fresh
from tests.client.world import World, make_tables
from tests.tx.postgres.support import identity_of
from tests.tx.postgres.support import producer as connection_of
from txmq.cli.output import format_time
from txmq.client.blocking.client import Client
from txmq.client.protocol import conversation
from txmq.client.protocol.offsets import FileOffsets
from txmq.errors import LogChanged
from txmq.model.decider import ByPostgres
from txmq.model.message import ReceivedMessage
from txmq.model.retry import RetryPolicy
from txmq.model.units import HOUR
from txmq.recover import lost_messages
from txmq.testing.processes import Running
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.brokers import take_over

ConnectClient = Callable[[], Client]


def command(*arguments: str, status: int = 0) -> Any:
    result = txmq_command(*arguments, "--json")
    assert result.exit_code == status, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def connect(database: str) -> Connect:
    return with_effects(database)


class Site:
    """A broker, its backup, and what an operator does with them."""

    def __init__(self, directory: Path, *dsns: str) -> None:
        self.broker = RealBroker(directory / "broker", dsns)
        self.backup, self.data = directory / "backup", directory / "broker" / "data"

    def back_up(self) -> Any:
        return command(
            "log", "backup", str(self.backup), "--broker", self.broker.url, "--rate", "0"
        )

    def restore(self, *more: str) -> Any:
        """Lose the data directory, and restore the backup in its place."""
        self.broker.kill()
        shutil.rmtree(self.data)
        report = command("log", "restore", str(self.backup), "--data", str(self.data), *more)
        self.broker.start()
        return report


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.broker.stop()


@pytest.fixture
def new_process(site: Site, monkeypatch: pytest.MonkeyPatch) -> ConnectClient:
    """Connect as a process does that has met no broker before."""

    def connect() -> Client:
        monkeypatch.setattr(conversation, "_newest_epochs", {})
        monkeypatch.setattr(conversation, "_incarnations", {})
        return txmq.connect(site.broker.url, service="tests", timeout=PATIENCE_S)

    return connect


def test_new_messages_at_offsets_of_lost_ones_take_effect(
    site: Site, new_process: ConnectClient, connect: Connect, database: str
) -> None:
    """The inbox has messages of the lost part at the offsets that new ones get, in a
    topic that the backup has, and in one that it has not.
    """
    topic, later, group = fresh("t"), fresh("t"), fresh("g")
    with new_process() as client:
        make(client, topic)
        send(client, topic, "a", "b")
        run(client, connect, group, topic, count=2)
        site.back_up()
        send(client, topic, "lost1", "lost2")
        run(client, connect, group, topic, count=4)
        make(client, later)
        send(client, later, "lost3")
        run(client, connect, group, later, count=5)
    site.restore()
    with new_process() as client:
        send(client, topic, "c", "d", "e")
        run(client, connect, group, topic, count=8)
        make(client, later)
        send(client, later, "f")
        run(client, connect, group, later, count=9)
        client.call("group.reset", group=group, topic=topic, to="first", reprocess=True)
        run(client, connect, group, topic, count=14)
    assert effects(connect) == sorted(
        ["a", "b", "lost1", "lost2", "lost3", "c", "d", "e", "f", "a", "b", "c", "d", "e"]
    )
    shown = command("log", "lost", database, "--broker", site.broker.url, status=1)
    found = [(row["topic"], row["start"], row["end"]) for row in shown["effects"]]
    assert found == [(topic, 2, 4), (None, 0, 1)]


def test_messages_of_the_backup_take_effect_once(
    site: Site, new_process: ConnectClient, connect: Connect
) -> None:
    """The log forgets acks, also of a group that the backup has not."""
    topic, group, later = fresh("t"), fresh("g"), fresh("g")
    with new_process() as client:
        make(client, topic)
        send(client, topic, "a", "b")
        site.back_up()
        run(client, connect, group, topic, count=2)
        run(client, connect, later, topic, count=4)
    site.restore()
    with new_process() as client:
        run(client, connect, group, topic, count=4)
        run(client, connect, later, topic, count=4)
    assert effects(connect) == ["a", "a", "b", "b"]


def test_a_log_that_is_restored_twice_from_one_backup_gives_offsets_of_both(
    site: Site, new_process: ConnectClient, connect: Connect
) -> None:
    topic, group = fresh("t"), fresh("g")
    with new_process() as client:
        make(client, topic)
        send(client, topic, "a")
        site.back_up()
        send(client, topic, "b")
        run(client, connect, group, topic, count=2)
    for count, body in enumerate("cd", 3):
        site.restore()
        with new_process() as client:
            send(client, topic, body)
            run(client, connect, group, topic, count=count)
    assert effects(connect) == ["a", "b", "c", "d"]


def test_a_client_refuses_a_log_that_was_restored_meanwhile(
    site: Site, new_process: ConnectClient
) -> None:
    """Though it begins a later boot epoch. A process that knows the restored log
    refuses the original in turn.
    """
    topic = fresh("t")
    with new_process() as client:
        make(client, topic)
        send(client, topic, "a")
        site.back_up()
        original = site.data.with_name("original")
        site.broker.kill()
        shutil.copytree(site.data, original)
        site.restore()
        with pytest.raises(LogChanged, match="restored from a backup"):
            client.send(topic, b"b")
    with new_process() as client:
        assert client.send(topic, b"b").offset == 1
        site.broker.kill()
        shutil.rmtree(site.data)
        original.rename(site.data)
        site.broker.start()
        with pytest.raises(LogChanged, match="knows"):
            client.send(topic, b"c")


def test_a_restore_is_an_alarm_until_an_operator_accepts_it(
    site: Site, new_process: ConnectClient
) -> None:
    topic, url = fresh("t"), site.broker.url
    with new_process() as client:
        make(client, topic)
        send(client, topic, "a")
        site.back_up()
    report = site.restore()
    new_process().close()
    assert [one["name"] for one in command("alarms", "--broker", url, status=1)["alarms"]] == [
        "log.restored"
    ]
    [shown] = command("log", "lost", "--broker", url, status=1)["restores"]
    assert (shown["incarnation"], shown["position"]) == (
        report["incarnation"],
        report["position"],
    )
    command("log", "lost", "--broker", url, "--accept", "--reason", "the test")
    site.broker.kill()
    site.broker.start()
    assert command("alarms", "--broker", url)["alarms"] == []


def test_a_broker_knows_the_age_of_its_newest_backup(
    site: Site, new_process: ConnectClient
) -> None:
    def backed_up_at() -> int | None:
        with new_process() as client:
            shown: int | None = client.call("broker.stats")["log"]["backed_up_at"]
            return shown

    with new_process() as client:
        make(client, fresh("t"))
    assert backed_up_at() is None
    made = site.back_up()
    assert backed_up_at() == made["taken_at"]
    site.broker.kill()
    site.broker.start()
    assert backed_up_at() == made["taken_at"]
    site.restore()
    known = backed_up_at()
    [restored] = command("log", "lost", "--broker", site.broker.url, status=1)["restores"]
    assert known == restored["stored_to"] <= made["taken_at"]


def test_commits_whose_messages_a_restored_log_has_lost_are_named(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of before, those that wait in the outbox, and those that come after the
    restore are not lost. The rows are found as docs/operations/backup.md says.
    """
    monkeypatch.setattr(lost_messages, "PAGE_SIZE", 2)
    site = Site(tmp_path, database)
    make_tables(database)
    wait_until(lambda: reported(database, 1), what="the broker has reported")
    world = World(database, site.broker, txmq.connect(site.broker.url, timeout=PATIENCE_S))

    def commit(*orders: str, **options: Any) -> str:
        with world.client.transaction(world.connection, **options) as tx:
            for order in orders:
                world.insert(order)
                tx.send(world.topic, order.encode())
        return tx.token.hex

    commit("before")
    wait_until(world.settled, what="it is decided")
    site.back_up()
    lost = [commit(f"lost-{number}") for number in range(3)] + [commit("two", "rows")]
    wait_until(world.settled, what="they are decided")
    site.broker.kill()
    commit("waits", on_unavailable="outbox", timeout=0.3)
    site.restore()
    for name in ("_newest_epochs", "_incarnations"):
        monkeypatch.setattr(conversation, name, {})
    world.client.close()
    world.client = client = txmq.connect(site.broker.url, service="tests", timeout=PATIENCE_S)
    wait_until(lambda: refusals(client), what="the restored broker is refused")
    directory = (site.data / "directory").read_text().split()[0]
    with closing(connection_of(database)) as connection:
        take_over(connection, client.log_id, UUID(directory), "the disk was lost")
        connection.commit()
    commit("after")
    url = ("--broker", site.broker.url)
    shown = command("log", "lost", database, *url, status=1)["transactions"]
    assert [one["token"] for one in shown] == lost
    page = (ROOT / "docs" / "operations" / "backup.md").read_text("utf-8")
    query = re.search(r"(SELECT \* FROM orders .*'XMIN');", page)
    assert query is not None
    rows = [asked(database, query[1].replace("XMIN", one["xmin"])) for one in shown]
    found = [sorted(order for order, _paid in of_one) for of_one in rows]
    assert found == [["lost-0"], ["lost-1"], ["lost-2"], ["rows", "two"]]
    assert (
        len(command("log", "lost", database, *url, "--limit", "3", status=1)["transactions"]) == 3
    )
    wait_until(
        lambda: world.messages() == {"before", "waits", "after"}, what="the outbox is published"
    )
    assert len(command("log", "lost", database, *url, status=1)["transactions"]) == 4
    world.connection.close()
    client.close()
    site.broker.stop()


def test_a_second_backup_copies_only_what_is_new(site: Site, new_process: ConnectClient) -> None:
    topic = fresh("t")
    with new_process() as client:
        make(client, topic)
        send(client, topic, "a" * 100_000)
        first = site.back_up()
        send(client, topic, "b")
        second = site.back_up()
    assert (first["kept"], second["kept"]) == (0, first["end"])
    assert second["copied"] == second["end"] - first["end"] < 10_000
    assert command("log", "backup", str(site.backup), "--verify")["damaged"] == []


@pytest.mark.parametrize("kind", ["position", "time"])
def test_a_restore_to_a_point(site: Site, new_process: ConnectClient, kind: str) -> None:
    topic = fresh("t")
    with new_process() as client:
        make(client, topic)
        send(client, topic, "a")
        point = site.back_up()
        send(client, topic, "b")
        site.back_up()
    until = str(point["end"]) if kind == "position" else format_time(point["taken_at"])
    site.restore("--until", until.replace(" ", "T"))
    new_process().close()
    assert bodies(site.broker, topic) == [b"a"]


def test_no_broker_starts_on_a_backup(site: Site, new_process: ConnectClient) -> None:
    with new_process() as client:
        make(client, fresh("t"))
        site.back_up()
    process = Running(
        site.backup.with_name("it"),
        "broker",
        "--create-topics",
        "--data",
        str(site.backup),
        "--listen",
        "127.0.0.1:0",
    )
    assert process.status() == 1
    assert "txmq log restore" in process.err.read_text()


def test_a_restored_log_decides_nothing_in_a_database_before_an_operators_word(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outbox stays, and the undecided transaction gets no fence."""
    site = Site(tmp_path, database)
    make_tables(database)
    wait_until(lambda: reported(database, 1), what="the broker has reported")
    world = World(database, site.broker, txmq.connect(site.broker.url, timeout=PATIENCE_S))
    with world.client.transaction(world.connection) as tx:
        world.insert("before")
        tx.send(world.topic, b"before")
    tx.wait_published(PATIENCE_S)
    decider = ByPostgres(*identity_of(database), xid=None, position=1)
    with peer(site.broker.url) as producer:
        # The original must not decide it before it is killed.
        token = producer.half(world.topic, b"undecided", decider, check_after_us=HOUR)
        site.back_up()
    site.broker.kill()
    with world.client.transaction(world.connection, on_unavailable="outbox", timeout=0.3) as tx:
        world.insert("waits")
        tx.send(world.topic, b"waits")
    site.restore()
    for name in ("_newest_epochs", "_incarnations"):
        monkeypatch.setattr(conversation, name, {})
    world.client = client = txmq.connect(site.broker.url, service="tests", timeout=PATIENCE_S)
    wait_until(lambda: refusals(client), what="the restored broker is refused")
    client.call("tx.check", token=token)
    with client.transaction(world.connection) as tx:  # decided by the client
        world.insert("early")
        tx.send(world.topic, b"early")
    counted = (
        "SELECT (SELECT count(*) FROM public.txmq_outbox),"
        f" (SELECT count(*) FROM public.txmq_token WHERE state = 'R' AND tok = '{token}')"
    )
    assert asked(database, counted) == [(1, 0)]
    directory = (site.data / "directory").read_text().split()[0]
    with closing(connection_of(database)) as connection:
        take_over(connection, client.log_id, UUID(directory), "the disk was lost")
        connection.commit()
    wait_until(
        lambda: world.messages() == {"before", "early", "waits"},
        what="the outbox is published",
    )
    client.call("tx.check", token=token)
    wait_until(world.settled, what="the undecided one is decided")
    assert world.orders() == world.messages() == {"before", "early", "waits"}
    world.connection.close()
    client.close()
    site.broker.stop()


def test_a_reader_of_the_lost_part_is_refused_and_others_go_on(
    site: Site, new_process: ConnectClient, tmp_path: Path
) -> None:
    topic, positions = fresh("t"), FileOffsets(tmp_path)

    def read(name: str, count: int) -> list[bytes]:
        with new_process() as client:
            with client.reader(name, [topic], positions) as reader:
                found = [reader.receive(timeout=PATIENCE_S) for _ in range(count)]
                reader.commit()
            return [message.body for message in found if message is not None]

    with new_process() as client:
        make(client, topic)
        send(client, topic, "a", "b")
    assert read("early", 2) == [b"a", b"b"]
    site.back_up()
    with new_process() as client:
        send(client, topic, "lost")
    assert read("late", 3) == [b"a", b"b", b"lost"]
    site.restore()
    with new_process() as client:
        send(client, topic, "c", "d")
    assert read("early", 2) == [b"c", b"d"]
    with pytest.raises(LogChanged):
        read("late", 1)


def test_a_backup_beside_sends_has_all_that_was_acknowledged_before(
    site: Site, new_process: ConnectClient
) -> None:
    """And of what came later a part without gaps, though the broker is killed."""
    topic = fresh("t")
    with new_process() as client:
        make(client, topic)
        for number in range(3):
            for future in [client.send_async(topic, b"%d" % n, key="k") for n in range(200)]:
                future.result()
            more = [client.send_async(topic, b"more", key="k") for _ in range(500)]
            site.back_up()
            for future in more:
                future.result()
            acknowledged = 700 * number + 200
    site.restore()
    new_process().close()
    offsets = [found.offset for found in site.broker.read(topic)]
    assert offsets == list(range(len(offsets)))
    assert acknowledged <= len(offsets) <= acknowledged + 500


def test_a_consumers_store_does_not_take_a_new_message_for_a_lost_one(
    site: Site, new_process: ConnectClient, tmp_path: Path
) -> None:
    topic, group, handled = fresh("t"), fresh("g"), list[bytes]()
    store: dict[str, Any] = {"on_failure": "local", "local_store": tmp_path / "store"}

    def handle(message: ReceivedMessage) -> None:
        handled.append(message.body)
        if message.body == b"lost":
            raise KeyError("k")

    def consume(client: Client, count: int) -> int:
        later = RetryPolicy((PATIENCE_S,), retries=3)
        with client.consumer(group, [topic], retry=later, **store) as consumer:
            run_until(
                consumer,
                handle,
                lambda: len(handled) >= count and shown(client, group)["unsettled"] == 0,
            )
            return consumer.stats.stored

    with new_process() as client:
        make(client, topic)
        site.back_up()
        send(client, topic, "lost")
        assert consume(client, 1) == 1
    site.restore()
    with new_process() as client:
        send(client, topic, "new")
        assert consume(client, 2) == 0
    assert handled == [b"lost", b"new"]


def test_a_spool_is_drained_into_a_log_that_has_lost_its_session(
    site: Site, new_process: ConnectClient, tmp_path: Path
) -> None:
    """The broker knows the session up to a message before lost ones."""
    topic = fresh("t")
    with new_process() as operator:
        make(operator, topic)
    url, spool = site.broker.url, tmp_path / "spool"
    with txmq.connect(url, service="tests", timeout=PATIENCE_S, spool=spool) as client:
        client.send(topic, b"a")
        site.back_up()
        client.send(topic, b"lost")
        site.broker.kill()
        assert client.send(topic, b"b").spooled
    site.restore()
    new_process().close()
    with txmq.connect(url, service="tests", timeout=PATIENCE_S, spool=spool) as client:
        wait_until(lambda: bodies(site.broker, topic) == [b"a", b"b"], what="the drain")
        assert not client.send(topic, b"c").spooled
    assert bodies(site.broker, topic) == [b"a", b"b", b"c"]
