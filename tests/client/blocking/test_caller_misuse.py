"""Callers who end a block's transaction themselves, against real servers.

Rows and messages agree, or an error says that the caller has parted them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

import psycopg2
import pytest
from psycopg2 import extensions, extras

from tests.client.world import ApplicationError, World, fail, make_tables
from tests.tx.postgres.business_table import run
from txmq.client.blocking.transaction.transaction import Transaction
from txmq.client.protocol.awaited import postgres
from txmq.errors import (
    DatabaseConflict,
    LocalProtocolError,
    TransactionAborted,
    TransactionEnded,
    TxmqError,
)
from txmq.testing.wait import PATIENCE_S, wait_until
from txmq.tx.postgres.blocking import guarded_commit
from txmq.tx.postgres.caller_block import CallerBlock
from txmq.tx.postgres.statement_watch import StatementWatch, watch_of

REFUSALS = (psycopg2.ProgrammingError, LocalProtocolError)


@contextmanager
def raising(kind: Any, match: str | None = None) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Require that a whole block raises."""
    with pytest.raises(kind, match=match) as raised:
        yield raised


def prepared_select(connection: Any) -> None:
    run(connection, "SELECT 1")


def prepared_insert(connection: Any) -> None:
    run(connection, "INSERT INTO orders (id) VALUES ('o-0')")


def autocommit(connection: Any) -> None:
    connection.autocommit = True


def isolated_autocommit(connection: Any) -> None:
    connection.autocommit = True
    connection.isolation_level = extensions.ISOLATION_LEVEL_REPEATABLE_READ


def by_hand(connection: Any) -> None:
    connection.autocommit = True
    run(connection, "BEGIN")


def ended_by_sql(connection: Any) -> None:
    run(connection, "SELECT 1", "COMMIT")


BEGINNINGS: dict[str, Callable[[Any], None]] = {
    "a fresh one": lambda _: None,
    "after a SELECT": prepared_select,
    "after an INSERT": prepared_insert,
    "autocommit": autocommit,
    "autocommit, isolated": isolated_autocommit,
    "BEGIN by hand": by_hand,
    "ended by SQL": ended_by_sql,
}


class Misuse(NamedTuple):
    """The means of a caller, among them a cursor from before the block."""

    world: World
    connection: Any
    cursor: Any

    def old(self, *statements: str) -> None:
        for statement in statements:
            self.cursor.execute(statement)

    def block(self, *, raises: bool) -> None:
        with suppress(ApplicationError), self.connection:
            self.world.insert("inner", self.connection)
            if raises:
                fail()

    def nested(self, *, raises: bool) -> None:
        tx = self.world.client.transaction(self.connection)
        with suppress(ApplicationError), tx:
            self.world.insert("nested", self.connection)
            tx.send(self.world.topic, b"nested")
            if raises:
                fail()

    def nested_xa(self) -> None:
        with self.world.client.xa(self.connection) as tx:
            tx.send(self.world.topic, b"nested")

    def elsewhere(self, work: Callable[[], None]) -> None:
        errors: list[BaseException] = []

        def target() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001  # raised again below
                errors.append(error)

        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]


WAYS: dict[str, Callable[[Misuse], None]] = {
    "commit()": lambda use: use.connection.commit(),
    "rollback()": lambda use: use.connection.rollback(),
    "tpc_commit()": lambda use: use.connection.tpc_commit(),
    "tpc_rollback()": lambda use: use.connection.tpc_rollback(),
    "reset()": lambda use: use.connection.reset(),
    "with": lambda use: use.block(raises=False),
    "with, raising": lambda use: use.block(raises=True),
    "nested": lambda use: use.nested(raises=False),
    "nested, raising": lambda use: use.nested(raises=True),
    "nested xa": Misuse.nested_xa,
    "COMMIT": lambda use: run(use.connection, "COMMIT"),
    "ROLLBACK": lambda use: run(use.connection, "/* enough */ rollback work"),
    "END": lambda use: run(use.connection, "END TRANSACTION"),
    "bytes": lambda use: use.connection.cursor().execute(b"COMMIT"),
    "COMMIT AND CHAIN": lambda use: run(use.connection, "COMMIT AND CHAIN"),
    "PREPARE": lambda use: run(use.connection, "PREPARE TRANSACTION 'mine'"),
    "old COMMIT": lambda use: use.old("COMMIT"),
    "old ROLLBACK": lambda use: use.old("ROLLBACK"),
    "old COMMIT BEGIN": lambda use: use.old("COMMIT", "BEGIN"),
    "old ROLLBACK BEGIN": lambda use: use.old("ROLLBACK; BEGIN"),
    "hidden COMMIT BEGIN": lambda use: run(use.connection, "SELECT 1; COMMIT; BEGIN"),
    "autocommit": lambda use: setattr(use.connection, "autocommit", not use.connection.autocommit),
    "a thread's commit()": lambda use: use.elsewhere(use.connection.commit),
    "a thread's rollback()": lambda use: use.elsewhere(use.connection.rollback),
    "a thread's block": lambda use: use.elsewhere(lambda: use.nested(raises=True)),
    "a failed statement": lambda use: run(use.connection, "SELECT 1 / 0"),
}
ENDS = ("swallowed", "raised", "swallowed, then the block raises")


USUAL = ("a fresh one", "after a SELECT", "autocommit", "BEGIN by hand")
QUICK = ("after a SELECT", "swallowed")
CASES = [
    (beginning, way, end)
    for beginning in BEGINNINGS
    for way in WAYS
    for end in ENDS
    if beginning in USUAL or way in ("commit()", "rollback()", "old ROLLBACK")
    if (beginning, end) != QUICK
]


@pytest.mark.parametrize("way", WAYS)
def test_rows_and_messages_agree_or_the_caller_is_told(world: World, way: str) -> None:
    beginning, end = QUICK
    misuse(world, beginning, way, end)


@pytest.mark.parametrize(("beginning", "way", "end"), CASES)
def test_they_agree_however_the_transaction_begins_and_ends(
    world: World, beginning: str, way: str, end: str
) -> None:
    misuse(world, beginning, way, end)


def misuse(world: World, beginning: str, way: str, end: str) -> None:
    connection = world.connection
    cursor = connection.cursor()
    BEGINNINGS[beginning](connection)
    before = {"o-0"} if beginning == "after an INSERT" else set[str]()
    settings = settings_of(connection)
    tx = world.client.transaction(connection)
    raised: BaseException | None = None
    try:
        with tx:
            world.insert("o-1", connection)
            tx.send(world.topic, b"o-1")
            try:
                WAYS[way](Misuse(world, connection, cursor))
            except (psycopg2.Error, TxmqError):
                if end == "raised":
                    raise
            with suppress(psycopg2.Error, TransactionEnded):  # nothing can be executed any more
                world.insert("o-2", connection)
                tx.send(world.topic, b"o-2")
            if end == "swallowed, then the block raises":
                fail()
    except (psycopg2.Error, TxmqError, ApplicationError) as error:
        raised = error
    agree_or_told(world, tx, before, raised)
    if way not in ("reset()", "autocommit"):
        assert settings_of(connection) == settings
    assert watch_of(connection) is None
    use_again(world, connection)


def agree_or_told(
    world: World, tx: Transaction, before: set[str], raised: BaseException | None
) -> None:
    if raised is None:
        tx.wait_published(PATIENCE_S)
        # A row of a block inside, whose refused end was swallowed, has no message.
        assert world.orders() - before - {"inner"} == world.messages() >= {"o-1"}
        return
    wait_until(world.settled)
    assert world.messages() == set()
    if not isinstance(raised, TransactionEnded):
        assert world.orders() == set()


def settings_of(connection: Any) -> tuple[Any, ...]:
    return (
        connection.autocommit,
        connection.isolation_level,
        connection.deferrable,
        connection.cursor_factory,
    )


def use_again(world: World, connection: Any) -> None:
    """The connection is in step with the server."""
    with suppress(psycopg2.Error):
        connection.rollback()
    assert connection.info.transaction_status == extensions.TRANSACTION_STATUS_IDLE
    known, stored = world.orders(), world.messages()
    try:
        tx = last_transaction(world, connection)
    except DatabaseConflict:  # the outbox came into use meanwhile
        tx = last_transaction(world, connection)
    tx.wait_published(PATIENCE_S)
    assert (world.orders() - known, world.messages() - stored) == ({"last"}, {"last"})


def last_transaction(world: World, connection: Any) -> Transaction:
    with world.client.transaction(connection) as tx:
        world.insert("last", connection)
        tx.send(world.topic, b"last")
    return tx


async def agreed(_block: CallerBlock) -> bool:
    return True


PLANTED: dict[str, tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "no look at the transaction before its rollback": (
        "after a SELECT",
        "commit()",
        lambda patch: patch.setattr(CallerBlock, "_look_joined", agreed),
    ),
    "raw statements are not seen": (
        "a fresh one",
        "COMMIT AND CHAIN",
        lambda patch: patch.setattr(StatementWatch, "start", lambda _self: None),
    ),
    "the token's INSERT proves nothing": (
        "a fresh one",
        "hidden COMMIT BEGIN",
        lambda patch: patch.setattr(CallerBlock, "require_same", lambda _self, _mark: None),
    ),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_the_check_of_agreement_finds_planted_bugs(
    world: World, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    beginning, way, patch = PLANTED[plant]
    patch(monkeypatch)
    with raising(AssertionError):
        for end in ("swallowed", "swallowed, then the block raises"):
            make_tables(world.dsn)
            misuse(world, beginning, way, end)


def test_what_is_refused_says_what_to_do(world: World) -> None:
    with (
        raising(LocalProtocolError, match=r"set_rollback_only\(\)") as refused,
        world.client.transaction(world.connection),
    ):
        world.connection.commit()
    assert "commit cannot be used" in refused.value.message
    with (
        raising(LocalProtocolError, match=r"tx\.savepoint\(\)"),
        world.client.transaction(world.connection),
    ):
        run(world.connection, "ROLLBACK")
    with (
        raising(LocalProtocolError, match="serves transaction"),
        world.client.transaction(world.connection),
        world.client.transaction(world.connection),
    ):
        raise AssertionError
    prepared_select(world.connection)
    with (
        raising(TransactionEnded, match="its messages are not sent"),
        world.client.transaction(world.connection) as tx,
    ):
        world.insert("o-1")
        tx.send(world.topic, b"o-1")
        world.connection.commit()
    assert (world.orders(), world.messages()) == ({"o-1"}, set())


def insert_twice_with_the_habitual_rollback(world: World) -> None:
    try:
        world.insert("o-1")
        world.insert("o-1")
    except psycopg2.Error:
        world.connection.rollback()
        raise


def test_a_habitual_rollback_before_the_error_goes_on_hides_nothing(world: World) -> None:
    with (
        raising(psycopg2.IntegrityError) as raised,
        world.client.transaction(world.connection) as tx,
    ):
        tx.send(world.topic, b"o-1")
        insert_twice_with_the_habitual_rollback(world)
    assert "savepoint" in raised.value.__notes__[0]
    prepared_select(world.connection)
    with raising(psycopg2.IntegrityError), world.client.transaction(world.connection) as tx:
        tx.send(world.topic, b"o-1")
        insert_twice_with_the_habitual_rollback(world)
    assert (world.orders(), world.messages()) == (set(), set())


def test_an_interrupt_is_not_replaced(world: World) -> None:
    prepared_select(world.connection)
    with raising(KeyboardInterrupt), world.client.transaction(world.connection) as tx:
        world.insert("o-1")
        tx.send(world.topic, b"o-1")
        world.connection.commit()
        raise KeyboardInterrupt
    assert (world.orders(), world.messages()) == ({"o-1"}, set())


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_raw_savepoints_withdraw_messages_with_their_rows(world: World, beginning: str) -> None:
    connection = world.connection
    BEGINNINGS[beginning](connection)
    before = {"o-0"} if beginning == "after an INSERT" else set[str]()
    with world.client.transaction(connection) as tx:
        put(world, tx, "kept-1")
        run(connection, 'SAVEPOINT "A b"', "savepoint B")
        put(world, tx, "gone-1")
        run(connection, "SAVEPOINT c")
        put(world, tx, "gone-2")
        run(connection, "ROLLBACK TO SAVEPOINT b")
        put(world, tx, "gone-3")
        run(connection, "rollback work to b", "RELEASE b")
        put(world, tx, "kept-2")
        with suppress(ApplicationError), tx.savepoint():
            put(world, tx, "gone-4")
            fail()
        with tx.savepoint():
            put(world, tx, "gone-5")
        run(connection, 'ROLLBACK TO "A b"')
        put(world, tx, "kept-3")
    tx.wait_published(PATIENCE_S)
    assert world.orders() - before == world.messages() == {"kept-1", "kept-3"}


def put(world: World, tx: Transaction, order: str) -> None:
    world.insert(order)
    tx.send(world.topic, order.encode())


def test_a_savepoint_from_before_the_block_cannot_be_rolled_back_to(world: World) -> None:
    connection = world.connection
    for cursor in (None, connection.cursor()):
        run(connection, "SAVEPOINT early")
        with (
            raising((LocalProtocolError, TransactionEnded)),
            world.client.transaction(connection) as tx,
        ):
            put(world, tx, "o-1")
            (cursor or connection.cursor()).execute("ROLLBACK TO SAVEPOINT early")
        assert (world.orders(), world.messages()) == (set(), set())


def test_the_caller_s_own_class_of_cursors_is_kept(world: World) -> None:
    with closing(
        psycopg2.connect(world.dsn, connection_factory=extras.DictConnection)
    ) as connection:
        cursors: Any = connection
        with world.client.transaction(connection) as tx:
            cursor = cursors.cursor()
            cursor.execute("SELECT 7 AS n")
            assert cursor.fetchone()["n"] == 7
            extras.execute_values(cursor, "INSERT INTO orders (id) VALUES %s", [("o-1",)])
            tx.send(world.topic, b"o-1")
            with cursors.cursor("named") as named:
                named.execute("SELECT id FROM orders")
                assert [row[0] for row in named] == ["o-1"]
            with cursors.cursor(cursor_factory=extras.RealDictCursor) as plain:
                plain.execute("SELECT 7 AS n")
                assert plain.fetchone()["n"] == 7
        tx.wait_published(PATIENCE_S)
        cursor.execute("ROLLBACK")  # it is the caller's again
    assert world.orders() == world.messages() == {"o-1"}


def test_a_block_inside_with_connection_is_left_alone(world: World) -> None:
    with world.connection, world.client.transaction(world.connection) as tx:
        put(world, tx, "o-1")
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-1"}


def test_a_deliberate_rollback_is_not_told_to_run_again(world: World) -> None:
    with (
        raising(TransactionAborted, match="out of stock") as aborted,
        world.client.transaction(world.connection) as tx,
    ):
        put(world, tx, "o-1")
        tx.set_rollback_only("out of stock")
    assert "again" not in str(aborted.value)
    assert (world.orders(), world.messages()) == (set(), set())


@pytest.mark.parametrize("ready", [False, True])
def test_an_asynchronous_connection_is_refused_for_what_it_is(world: World, ready: bool) -> None:  # noqa: FBT001
    with closing(psycopg2.connect(world.dsn, async_=True)) as connection:
        while ready and connection.poll() != extensions.POLL_OK:
            pass
        with (
            raising(LocalProtocolError, match="is asynchronous"),
            world.client.transaction(connection),
        ):
            pass


@pytest.mark.parametrize(
    "late",
    [
        lambda tx, topic: tx.send(topic, b"o-2"),
        lambda tx, _topic: tx.set_rollback_only("too late"),
    ],
)
def test_what_comes_while_the_block_ends_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch, late: Callable[[Transaction, str], None]
) -> None:
    """By another thread: nothing could be sent any more, nor rolled back."""
    refused = list[LocalProtocolError]()

    def at(place: str) -> None:
        if place == "tx.before_commit":
            with pytest.raises(LocalProtocolError, match="is ending") as raised:
                late(tx, world.topic)
            refused.append(raised.value)

    monkeypatch.setattr(postgres, "crashpoint", at)
    with world.client.transaction(world.connection) as tx:
        put(world, tx, "o-1")
    assert len(refused) == 1
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-1"}


class ListCursor(extensions.cursor):
    """A cursor of an application's own, with rows of its own."""

    def fetchall(self) -> Any:
        return [list(row) for row in super().fetchall()]


KINDS: dict[str, dict[str, Any]] = {
    "RealDictConnection": {"connection_factory": extras.RealDictConnection},
    "RealDictCursor": {"cursor_factory": extras.RealDictCursor},
    "NamedTupleCursor": {"cursor_factory": extras.NamedTupleCursor},
    "DictCursor": {"cursor_factory": extras.DictCursor},
    "its own": {"cursor_factory": ListCursor},
}


@pytest.mark.parametrize("beginning", ["a fresh one", "after a SELECT", "autocommit"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_caller_s_cursors_may_return_any_rows(world: World, kind: str, beginning: str) -> None:
    with closing(psycopg2.connect(world.dsn, **KINDS[kind])) as connection:
        BEGINNINGS[beginning](connection)
        with raising(ApplicationError), world.client.transaction(connection) as tx:
            world.insert("gone", connection)
            tx.send(world.topic, b"gone", key="k")
            fail()
        for policy in (None, "outbox"):
            with world.client.transaction(connection, on_unavailable=policy or "fail") as tx:
                world.insert(f"o-{policy}", connection)
                tx.send(world.topic, f"o-{policy}".encode(), key="k")
        with world.client.transaction(connection):
            prepared_select(connection)
        tx.wait_published(PATIENCE_S)
        with world.client.xa(connection) as xa:
            world.insert("o-xa", connection)
            xa.send(world.topic, b"o-xa", key="k")
        xa.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-None", "o-outbox", "o-xa"}


class Alarm(Exception):
    """What a handler of a signal raises, wherever the program is."""


@pytest.mark.parametrize("error", [Alarm, KeyboardInterrupt])
@pytest.mark.parametrize("sent", [False, True])
def test_an_interrupt_in_the_commit_gives_the_connection_back_as_it_was(
    world: World, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], *, sent: bool
) -> None:
    async def interrupted(*args: Any) -> Any:
        if sent:
            guarded_commit(*args)
        raise error

    autocommit(world.connection)
    settings = settings_of(world.connection)
    with monkeypatch.context() as patch:
        patch.setattr(postgres, "guarded_commit", interrupted)
        with raising(error), world.client.transaction(world.connection) as tx:
            put(world, tx, "o-1")
    assert settings_of(world.connection) == settings
    wait_until(world.settled)
    assert world.orders() == world.messages() == ({"o-1"} if sent else set())
    use_again(world, world.connection)


@pytest.mark.parametrize("raises", [False, True])
def test_the_child_of_a_fork_does_nothing_to_its_parent_s_block(
    world: World, *, raises: bool
) -> None:
    with world.client.transaction(world.connection) as tx:
        put(world, tx, "o-1")
        child = os.fork()
        if not child:
            leave_in_the_child(tx, SystemExit() if raises else None)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if raises else 1)
        put(world, tx, "o-2")
    tx.wait_published(PATIENCE_S)
    assert world.orders() == world.messages() == {"o-1", "o-2"}


def leave_in_the_child(tx: Transaction, error: BaseException | None) -> None:
    status = 2
    try:
        tx.__exit__(None if error is None else type(error), error, None)
        status = 0
    except LocalProtocolError as refused:
        status = 1 if "forked" in refused.message else 2
    finally:
        os._exit(status)


def test_an_asynchronous_connection_is_refused(world: World) -> None:
    with closing(psycopg2.connect(world.dsn, async_=True)) as connection:
        extras.wait_select(connection)
        with (
            raising(LocalProtocolError, match="asynchronous"),
            world.client.transaction(connection),
        ):
            raise AssertionError
