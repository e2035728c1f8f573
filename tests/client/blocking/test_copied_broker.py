"""Faults 95 and 98: a copy of a broker's data, and a copy of its database."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from psycopg2.extensions import parse_dsn

from tests.cli.peer import peer
from tests.client.kept_sessions import asked
from tests.client.real import RealBroker
from tests.client.world import World, make_tables
from tests.fixtures_postgres import copied
from tests.tx.postgres.support import identity_of, new_token, producer
from txmq.broker.data_directory.stored_reports import StoredReports
from txmq.client.blocking.client import Client
from txmq.errors import LogChanged, NoResolver
from txmq.model.decider import ByPostgres, DatabaseId
from txmq.model.message import Message
from txmq.testing.postgres_server import OwnServer
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.blocking import insert_token
from txmq.tx.postgres.brokers import take_over

Connect = Callable[..., Client]
REPORTS = "SELECT reports FROM public.txmq_broker"


def refusals(client: Client) -> list[str]:
    """Return the texts of the alarm resolver.refused."""
    alarms: list[dict[str, Any]] = client.call("broker.alarms")["alarms"]
    return [alarm["text"] for alarm in alarms if alarm["name"] == "resolver.refused"]


def reported(dsn: str, boot_epoch: int) -> bool:
    found = asked(dsn, "SELECT boot_epoch FROM public.txmq_broker")
    return found == [(boot_epoch,)]


def test_a_copy_of_the_data_touches_neither_outbox_nor_tokens_of_production(
    database: str, tmp_path: Path, connect: Connect
) -> None:
    original = RealBroker(tmp_path / "original", [database])
    make_tables(database)
    world = World(database, original, connect(original.url))
    wait_until(lambda: reported(database, 1), what="the original has reported")
    with world.client.transaction(world.connection) as tx:
        world.insert("before")
        tx.send(world.topic, b"before")
    tx.wait_published(PATIENCE_S)
    original.kill()
    (tmp_path / "copy").mkdir()
    shutil.copytree(tmp_path / "original" / "data", tmp_path / "copy" / "data")
    with world.client.transaction(world.connection, on_unavailable="outbox", timeout=0.3) as tx:
        world.insert("waits")
        tx.send(world.topic, b"waits")
    copy = RealBroker(tmp_path / "copy", [database])
    looker = connect(copy.url)
    wait_until(lambda: refusals(looker), what="the copy says that it is refused")
    [text] = refusals(looker)
    assert "--take-over" in text
    assert reported(database, 1)
    assert asked(database, "SELECT count(*) FROM public.txmq_outbox") == [(1,)]
    original.start()
    wait_until(lambda: world.messages() == {"before", "waits"}, what="the original publishes")
    assert {found.body for found in copy.read(world.topic)} == {b"before"}
    assert refusals(world.client) == []
    original.kill()
    original.start()
    world.client.send(world.topic, b"a later boot epoch than the copy's")
    with pytest.raises(LogChanged, match="is in boot epoch 2, and was in 3"):
        connect(copy.url).send_batch(world.topic, [Message(b"never")])
    world.connection.close()
    copy.stop()
    original.stop()


def test_a_transaction_on_another_copy_than_the_resolvers_is_refused(
    crashable_database: str, copy: OwnServer, tmp_path: Path, connect: Connect
) -> None:
    copied = copy.dsn(parse_dsn(crashable_database)["dbname"])
    broker = RealBroker(tmp_path / "broker", [copied])
    make_tables(crashable_database)
    world = World(crashable_database, broker, connect(broker.url))
    wait_until(lambda: reported(copied, 1), what="the broker has reported to the copy")

    def order() -> None:
        with world.client.transaction(world.connection) as tx:
            world.insert("never")
            tx.send(world.topic, b"never")

    for _ in range(2):
        with pytest.raises(NoResolver, match="leads to a copy"):
            order()
    assert world.orders() == set()
    wait_until(world.settled, what="all is decided")
    assert world.messages() == set()
    world.connection.close()
    broker.stop()


def test_a_copy_that_takes_the_originals_place_while_the_broker_is_down_decides_nothing(
    crashable_postgres: OwnServer, crashable_database: str, tmp_path: Path, connect: Connect
) -> None:
    original = crashable_database
    broker, data = RealBroker(tmp_path / "broker", [original]), tmp_path / "broker" / "data"
    client = connect(broker.url)
    client.call("topic.create", name="orders", partitions=1)
    wait_until(lambda: reported(original, 1), what="the broker has reported")
    with copied(crashable_postgres) as server:
        copy = server.dsn(parse_dsn(original)["dbname"])
        [(before,)] = asked(copy, REPORTS)
        with closing(producer(original)) as connection, peer(broker.url) as half:
            token = new_token()
            insert_token(connection, token, [client.log_id])
            decider = ByPostgres(*identity_of(original), xid=None, position=1)
            half.half("orders", b"paid", decider, token)
            found = identity_of(original)
            known_as = DatabaseId(found.system_id, found.database_oid)
            wait_until(
                lambda: StoredReports(data).get(known_as).stored > before,
                what="the broker remembers a report as a bundle has come",
            )
            broker.kill()
            connection.commit()
        broker.dsns = [copy]
        broker.start()
        wait_until(lambda: refusals(client), what="the copy is refused")
        assert "it is a copy" in refusals(client)[0]
        client.call("tx.check", token=token.hex)
        wait_until(
            lambda: "it is a copy" in client.call("tx.show", token=token.hex)["check_reason"],
            what="the check has an answer",
        )
        assert asked(copy, "SELECT FROM public.txmq_token") == []
        broker.kill()
    broker.dsns = [original]
    broker.start()
    wait_until(lambda: reported(original, 3), what="the broker has reported again")
    client.call("tx.check", token=token.hex)
    wait_until(
        lambda: client.call("tx.show", token=token.hex)["state"] == "PUBLISHED",
        what="the original decides",
    )
    broker.stop()


def test_two_resolvers_with_one_identity_decide_nothing(
    crashable_database: str, copy: OwnServer, tmp_path: Path, connect: Connect
) -> None:
    copied = copy.dsn(parse_dsn(crashable_database)["dbname"])
    broker = RealBroker(tmp_path / "broker", [copied, crashable_database])
    client = connect(broker.url)
    wait_until(lambda: len(refusals(client)) == 1, what="the alarm is raised")
    assert "resolvers db0, db1 lead to servers with one identity" in refusals(client)[0]
    client.call("topic.create", name="orders", partitions=1)
    decider = ByPostgres(*identity_of(crashable_database), xid=None, position=1)
    with peer(broker.url) as producer:
        token = producer.half("orders", b"paid", decider)
    client.call("tx.check", token=token)
    wait_until(
        lambda: "with one identity" in client.call("tx.show", token=token)["check_reason"],
        what="the check has an answer",
    )
    assert client.call("tx.show", token=token)["state"] == "UNDECIDED"
    fences = "SELECT FROM public.txmq_token WHERE state = 'R'"
    assert (asked(copied, fences), asked(crashable_database, fences)) == ([], [])
    broker.stop()


def test_a_backup_in_the_originals_place_gets_the_lease_by_an_operators_word_only(
    database: str, tmp_path: Path, connect: Connect
) -> None:
    """The directory has its inodes still, and restarts pass the original's epoch."""
    broker = RealBroker(tmp_path / "broker", [database])
    data, backup = tmp_path / "broker" / "data", tmp_path / "backup"
    wait_until(lambda: reported(database, 1), what="the broker has reported")
    broker.stop()
    shutil.copytree(data, backup)
    broker.start()
    wait_until(lambda: reported(database, 2), what="it has reported again")
    broker.kill()
    shutil.copytree(backup, data, dirs_exist_ok=True)
    client = connect(broker.url)
    for _ in range(3):
        broker.start()
        wait_until(lambda: refusals(client), what="the backup is refused")
        broker.kill()
    assert reported(database, 2)
    broker.start()
    wait_until(lambda: refusals(client), what="the backup is refused still")
    [text] = refusals(client)
    assert "was restored, or a clone of it runs" in text
    with closing(producer(database)) as connection:
        directory = UUID((data / "directory").read_text().split()[0])
        take_over(connection, client.log_id, directory, "the disk was lost")
        connection.commit()
    wait_until(lambda: not refusals(client), what="the broker works again")
    broker.stop()
