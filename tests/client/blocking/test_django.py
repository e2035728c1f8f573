"""Messages in Django's transactions, with the backend `txmq.django.backend`."""

from __future__ import annotations

import logging
import threading
import unittest
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from io import StringIO
from typing import Any

import pytest
from django.core import checks
from django.core.exceptions import PermissionDenied
from django.core.management import CommandError, call_command
from django.db import Error, IntegrityError, connections, transaction
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory, TestCase

import txmq.django
from tests.client.django_project import OTHER, OWN, PLAIN, configure, database, sender
from tests.client.world import ApplicationError, World, fail
from txmq.django import send
from txmq.errors import BrokerUnavailable, ConfigError, LocalProtocolError, TransactionAborted
from txmq.model.message import ReceivedMessage
from txmq.testing.postgres_server import PostgresServer
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.schema import check
from txmq.tx.postgres.session import connect

configure()
ATOMIC = transaction.atomic(using=OWN)
_handled: list[Any] = []  # topic, and what the handler shall do


@pytest.fixture
def own(world: World) -> Iterator[Any]:
    with database(OWN, world.dsn) as wrapper, sender(world.client):
        yield wrapper


@contextmanager
def raising(kind: type[Exception]) -> Iterator[None]:
    """Require that a whole block raises."""
    with pytest.raises(kind):
        yield


def both(world: World, order: str, using: str = OWN) -> None:
    world.insert(order, connections[using])
    send(world.topic, order.encode(), using=using)


def agreed(world: World) -> set[str]:
    wait_until(world.settled)
    assert world.orders() == world.messages()
    return world.orders()


def test_messages_go_with_the_outermost_block_and_its_savepoints(world: World, own: Any) -> None:
    with transaction.atomic(using=OWN, durable=True):
        both(world, "o-1")
        with suppress(ApplicationError), ATOMIC:
            both(world, "o-2")
            with ATOMIC:
                both(world, "o-3")
            fail()
        with ATOMIC:
            both(world, "o-4")
    with suppress(ApplicationError), ATOMIC:
        both(world, "o-5")
        fail()
    with ATOMIC:  # nothing to send
        world.insert("o-6", own)
    with ATOMIC:
        send(world.topic, b"o-6", using=OWN)
    assert agreed(world) == {"o-1", "o-4", "o-6"}


def test_an_error_without_a_savepoint_takes_the_whole_block_back(world: World, own: Any) -> None:
    with ATOMIC:
        both(world, "o-1")
        with suppress(ApplicationError), transaction.atomic(using=OWN, savepoint=False):
            both(world, "o-2")
            fail()
    with ATOMIC:
        both(world, "o-3")
    assert agreed(world) == {"o-3"}


def test_a_commit_that_takes_nothing_along_calls_no_hook(world: World, own: Any) -> None:
    called: list[str] = []
    with raising(TransactionAborted), ATOMIC:
        both(world, "o-1")
        transaction.on_commit(lambda: called.append("o-1"), using=OWN)
        with suppress(Error), own.cursor() as cursor:
            cursor.execute("SELECT 1 / 0")
    with raising(IntegrityError), ATOMIC:
        both(world, "o-2")
        transaction.on_commit(lambda: called.append("o-2"), using=OWN)
        with own.cursor() as cursor:
            cursor.execute("INSERT INTO lines VALUES (1, 'nobody')")  # deferred to COMMIT
    with ATOMIC:
        both(world, "o-3")
        transaction.on_commit(lambda: called.append("o-3"), using=OWN)
    assert own.connection.autocommit
    assert called == ["o-3"]
    assert agreed(world) == {"o-3"}


def test_without_the_broker_the_block_is_rolled_back(world: World, own: Any, connect: Any) -> None:
    called: list[str] = []
    away = connect("txmq://127.0.0.1:1", timeout=0.2)
    with sender(away), raising(BrokerUnavailable), ATOMIC:
        txmq.django.enlist(OWN, timeout=0.2)
        both(world, "o-1")
        transaction.on_commit(lambda: called.append("o-1"), using=OWN)
    with ATOMIC:
        both(world, "o-2")
    assert called == []
    assert agreed(world) == {"o-2"}


def test_each_database_has_messages_of_its_own(world: World, own: Any) -> None:
    with database(OTHER, world.dsn):
        with suppress(ApplicationError), ATOMIC:
            with transaction.atomic(using=OTHER):
                both(world, "o-1", OTHER)
            both(world, "o-2")
            fail()
        assert agreed(world) == {"o-1"}


def test_a_request_is_one_transaction(
    world: World, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.core.handlers.base import BaseHandler

    def view(request: HttpRequest) -> HttpResponse:
        both(world, request.path[1:])
        if request.path == "/o-2":
            fail()
        return HttpResponse()

    monkeypatch.setitem(connections.settings[OWN], "ATOMIC_REQUESTS", True)
    monkeypatch.setitem(own.settings_dict, "ATOMIC_REQUESTS", True)
    for path in ("/o-1", "/o-2"):
        with suppress(ApplicationError):
            BaseHandler().make_view_atomic(view)(RequestFactory().get(path))
    assert agreed(world) == {"o-1"}


def test_what_takes_no_messages_along_says_what_to_do(world: World, own: Any) -> None:
    with pytest.raises(LocalProtocolError, match="block is open on"):
        send(world.topic, b"o-1", using=OWN)
    with (
        database(PLAIN, world.dsn),
        transaction.atomic(),
        pytest.raises(LocalProtocolError, match="take no messages along"),
    ):
        send(world.topic, b"o-1")


def test_the_settings_are_checked(settings_of_txmq: Any) -> None:
    settings_of_txmq({"SERVICE": "shop"})
    with pytest.raises(ConfigError, match="no 'URL'"):
        txmq.django.client()
    assert [found.id for found in checks.run_checks()] == ["txmq.W001"]
    settings_of_txmq({"URL": "txmq://127.0.0.1:1", "SERVICE": "shop", "OPTIONS": {"timeout": 1.0}})
    assert checks.run_checks() == []
    assert txmq.django.client() is txmq.django.client()
    assert txmq.django.client().service == "shop"
    txmq.django.client().close()


def test_threads_that_come_first_at_once_share_a_client(
    settings_of_txmq: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they have an `instance`, the later of two would fence the other."""
    settings_of_txmq({"URL": "txmq://127.0.0.1:1", "SERVICE": "shop"})
    connect, came, all_came = txmq.connect, list[str](), threading.Event()

    def slowly(*args: Any, **options: Any) -> Any:
        assert all_came.wait(PATIENCE_S)
        return connect(*args, **options)

    def use() -> Any:
        came.append("")
        return txmq.django.client()

    monkeypatch.setattr("txmq.client.blocking.connect.connect", slowly)
    with ThreadPoolExecutor(4) as executor:
        found = [executor.submit(use) for _ in range(4)]
        wait_until(lambda: len(came) == len(found))
        all_came.set()
        clients = {id(future.result()): future.result() for future in found}
    for client in clients.values():
        client.close()
    assert len(clients) == 1


@pytest.fixture
def settings_of_txmq() -> Iterator[Any]:
    from django.test.utils import override_settings

    with ExitStack() as stack:
        yield lambda given: stack.enter_context(override_settings(TXMQ=given))


class Operator:
    """A user of the admin, with its rights."""

    is_active = is_staff = is_authenticated = True

    def __init__(self, *rights: str) -> None:
        self.rights = rights

    def has_perm(self, right: str, obj: object = None) -> bool:
        return right in self.rights

    def has_module_perms(self, app: str) -> bool:
        return bool(self.rights)

    def has_usable_password(self) -> bool:
        return False

    def get_username(self) -> str:
        return "operator"


def registered() -> Any:
    """Return the page of the admin."""
    from django.contrib import admin

    from txmq.django.models import Broker

    admin.autodiscover()
    return admin.site._registry[Broker]


def page(path: str, *rights: str) -> str:
    """Return what an operator sees in the admin."""
    request = RequestFactory().get(path)
    request.user = Operator(*rights)
    response = registered().changelist_view(request)
    return str(response.render().content.decode())


def test_the_admin_shows_undecided_transactions_and_letters(world: World, own: Any) -> None:
    tx = world.client.enlist(world.connection, hooks=True, check_after=60.0)
    tx.send(world.topic, b"m")
    tx.before_commit()
    group = f"admin-{world.topic}"
    world.client.send(f"{world.topic}-in", b"m", key="<k>")
    with world.client.consumer(group, [f"{world.topic}-in"]) as consumer:
        message = consumer.receive(PATIENCE_S)
        assert message is not None
        consumer.dead_letter(message, reason="<script>")
    with pytest.raises(PermissionDenied):
        page("/")
    seen = page(f"/?group={group}", "txmq.view_broker")
    for text in (tx.token.hex, "orders", group, "&lt;k&gt;", "&lt;script&gt;"):
        assert text in seen
    assert "<script>" not in seen.replace('<script src="', "")
    assert not registered().has_change_permission(RequestFactory().get("/"))
    world.connection.rollback()
    tx.after_rollback()


def test_the_admin_says_that_the_broker_is_away(connect: Any) -> None:
    with sender(connect("txmq://127.0.0.1:1", timeout=0.2)):
        assert "errornote" in page("/", "txmq.view_broker")


def test_migrate_makes_the_tables(postgres: PostgresServer) -> None:
    name = postgres.create_database()
    # makemigrations looks into the default database, too
    with database(PLAIN, postgres.dsn(name)), database(OTHER, postgres.dsn(name)):
        for _ in range(2):
            call_command("migrate", "txmq", database=OTHER, verbosity=0)
        connection = connect(postgres.dsn(name), application_name="test")
        assert check(connection) == []
        connection.close()
        call_command("makemigrations", "txmq", check=True, dry_run=True, verbosity=0)
        call_command("migrate", "txmq", "zero", database=OTHER, verbosity=0)
    postgres.drop_database(name)


def test_a_test_case_commits_nothing(world: World, own: Any) -> None:
    class Case(TestCase):  # type: ignore[misc]  # Django has no types
        databases = frozenset({OWN})

        def test_order(self) -> None:
            with ATOMIC:
                both(world, "o-1")
                assert [sent.topic for sent in txmq.django.enlist(OWN).pending()] == [world.topic]

    result = unittest.TestResult()
    unittest.TestSuite([Case("test_order")]).run(result)
    assert (result.testsRun, result.wasSuccessful()) == (1, True)
    with ATOMIC:
        both(world, "o-2")
    assert agreed(world) == {"o-2"}


def charge(message: ReceivedMessage) -> None:
    """Write a row and send a message; fail at the first attempt of some."""
    topic, fails = _handled[0]
    order = message.body.decode()
    with connections[OWN].cursor() as cursor:
        cursor.execute("INSERT INTO orders (id) VALUES (%s)", (order,))
    send(topic, order.encode(), using=OWN)
    if order in fails:
        fails.remove(order)
        fail()


def refuse(message: ReceivedMessage) -> None:
    raise ApplicationError(message.body)


def test_a_handler_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(CommandError, match=r"--handler shop\.chrage: "):
        call_command("txmq_consume", "billing", "orders", handler="shop.chrage")


def test_a_handler_that_fails_is_seen_on_stderr(
    world: World, own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    incoming, said = f"{world.topic}-fails", StringIO()
    world.client.send(incoming, b"o-1")
    retry = txmq.RetryPolicy((0.01,), retries=0)
    with world.client.consumer("failing", [incoming], retry=retry):
        pass  # the group: its first failure is the last one
    arguments = ("failing", incoming, "--handler", f"{__name__}.refuse", "--database", OWN)
    call_command("txmq_consume", *arguments, "--idle-exit", "1", stderr=said)
    assert "WARNING message.failed" in said.getvalue()
    assert "raise ApplicationError" in said.getvalue()
    assert [type(one) for one in logging.getLogger("txmq").handlers] == [logging.NullHandler]


def test_a_consumer_s_rows_messages_and_acks_are_one_decision(world: World, own: Any) -> None:
    incoming = f"{world.topic}-in"
    for order in ("o-1", "o-2", "o-3"):
        world.client.send(incoming, order.encode())
    with world.client.consumer("django", [incoming], retry=txmq.RetryPolicy((0.01,))):
        pass  # the group, with quick retries
    _handled[:] = [(world.topic, ["o-2"])]
    call_command(
        "txmq_consume",
        "django",
        incoming,
        "--handler",
        f"{__name__}.charge",
        "--database",
        OWN,
        "--idle-exit",
        "1",
    )
    assert agreed(world) == {"o-1", "o-2", "o-3"}
    shown = world.client.call("group.show", group="django")
    assert shown["unsettled"] == 0
