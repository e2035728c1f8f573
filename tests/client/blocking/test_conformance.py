"""Each way to have rows and messages in one transaction, in each of the same scenes.

The tables in scenes.md say what their users see; here it is shown. Whatever it
is, rows and messages agree in the end. A cell counts only if its scene has happened:
the server says so, by its SQLSTATE, its list of sessions or a sequence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path

import psycopg2
import pytest

from tests.client.async_frameworks import ASYNC_FRAMEWORKS, Called
from tests.client.frameworks import BLOCKING_FRAMEWORKS, Framework, Work
from tests.client.kept_sessions import asked
from tests.client.world import ApplicationError, World, fail
from txmq.testing.wait import wait_until

DOCUMENT = Path(__file__).with_name("scenes.md")
DIVISION_BY_ZERO, SERIALIZATION_FAILURE, DEADLOCK = "22012", "40001", "40P01"
TERMINATES = """
CREATE SEQUENCE IF NOT EXISTS deaths;  -- no rollback takes it back
ALTER SEQUENCE deaths RESTART;
CREATE OR REPLACE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM nextval('deaths') FROM txmq_token WHERE xmin::text = pg_current_xact_id()::xid::text;
    PERFORM pg_terminate_backend(pg_backend_pid());
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER die AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION die()
"""
Scene = Callable[[Framework], object]
FRAMEWORKS = (*BLOCKING_FRAMEWORKS, ASYNC_FRAMEWORKS)  # by the tables of what users see


def order(work: Work, name: str = "o-1") -> None:
    work.execute(f"INSERT INTO orders (id) VALUES ('{name}')")


def send(framework: Framework, work: Work, name: str = "o-1") -> None:
    work.transaction().send(framework.world.topic, name.encode())


def both(framework: Framework, work: Work, name: str = "o-1") -> None:
    order(work, name)
    send(framework, work, name)


def elsewhere(framework: Framework, *statements: str) -> None:
    with closing(psycopg2.connect(framework.world.dsn)) as connection, connection:
        for statement in statements:
            with connection.cursor() as cursor:
                cursor.execute(statement)


@contextmanager
def refused_with(framework: Framework, state: str) -> Iterator[None]:
    """Note that the server has refused a statement of the block with that SQLSTATE."""
    try:
        yield
    except Exception as error:
        if state in sqlstates(error):
            framework.hits.append(state)
        raise


def sqlstates(error: BaseException | None) -> set[str]:
    """Return the SQLSTATEs of an error and of what has led to it."""
    found = set[str]()
    while error is not None:
        for one in (error, getattr(error, "orig", None)):
            found |= {getattr(one, name, None) or "" for name in ("sqlstate", "pgcode")}
        error = error.__cause__ or error.__context__
    return found


def commit(framework: Framework) -> None:
    with framework.transaction() as work:
        both(framework, work)
        framework.hits.append("the end")


def error(framework: Framework) -> None:
    with suppress(ApplicationError), framework.transaction() as work:
        both(framework, work)
        framework.hits.append("an error")
        fail()


def swallowed_error(framework: Framework) -> None:
    with framework.transaction() as work:
        both(framework, work)
        with suppress(Exception), refused_with(framework, DIVISION_BY_ZERO):
            work.execute("SELECT 1 / 0")


def savepoint(framework: Framework) -> None:
    """Only what was sent in the savepoint goes with it: `kept` stays."""
    with framework.transaction() as work:
        both(framework, work)
        with suppress(ApplicationError), work.savepoint():
            both(framework, work, "o-2")
            framework.hits.append("o-2")
            fail()
        with work.savepoint():
            both(framework, work, "o-3")


def first_savepoint(framework: Framework) -> None:
    """The first message of all is sent in a savepoint that is rolled back."""
    with framework.transaction() as work:
        with suppress(ApplicationError), work.savepoint():
            both(framework, work, "o-2")
            framework.hits.append("o-2")
            fail()
        both(framework, work)


def closed(framework: Framework) -> None:
    with framework.transaction() as work:
        both(framework, work)
        pid = work.connection.info.backend_pid
        work.connection.close()
        wait_until(lambda: not lives(framework, pid))
        framework.hits.append("closed")


def lost(framework: Framework) -> None:
    with framework.transaction() as work:
        both(framework, work)
        pid = work.connection.info.backend_pid
        elsewhere(framework, f"SELECT pg_terminate_backend({pid}, 5000)")
        assert not lives(framework, pid)
        if isinstance(work.connection, Called):
            work.connection.hear_of_its_loss()
        framework.hits.append("lost")


def commit_inside(framework: Framework) -> None:
    with framework.transaction() as work:
        both(framework, work)
        framework.hits.append("called")
        work.connection.commit()


def rollback_inside(framework: Framework) -> None:
    with framework.transaction() as work:
        both(framework, work)
        framework.hits.append("called")
        work.connection.rollback()


def sql_commit_inside(framework: Framework) -> None:
    with framework.transaction() as work:
        both(framework, work)
        framework.hits.append("called")
        work.execute("COMMIT")


def autocommit(framework: Framework) -> None:
    framework.hits.append("called")
    framework.autocommit()


def serialization_failure(framework: Framework) -> None:
    elsewhere(framework, "INSERT INTO lines (id) VALUES (1), (2)")
    with (
        refused_with(framework, SERIALIZATION_FAILURE),
        framework.transaction("SERIALIZABLE") as work,
    ):
        work.execute("SELECT count(*) FROM lines")
        both(framework, work)
        with closing(psycopg2.connect(framework.world.dsn)) as other:
            other.isolation_level = "SERIALIZABLE"
            with other.cursor() as cursor:
                cursor.execute("SELECT count(*) FROM orders")
                cursor.execute("INSERT INTO lines (id) VALUES (3)")
            other.commit()


def deadlock(framework: Framework) -> None:
    elsewhere(framework, "INSERT INTO lines (id) VALUES (1), (2)")
    second = "UPDATE lines SET of = NULL WHERE id = 2"
    with closing(psycopg2.connect(framework.world.dsn)) as other, ExitStack() as stack:
        executor = stack.enter_context(ThreadPoolExecutor())
        with other.cursor() as cursor, framework.transaction() as work:
            work.execute("UPDATE lines SET of = NULL WHERE id = 1")
            both(framework, work)
            cursor.execute("SET LOCAL deadlock_timeout = '30s'; " + second)
            executor.submit(cursor.execute, "UPDATE lines SET of = NULL WHERE id = 1")
            pid = other.info.backend_pid
            wait_until(lambda: waits(framework, pid))
            work.execute("SET LOCAL deadlock_timeout = '10ms'")
            with refused_with(framework, DEADLOCK):
                work.execute(second)


def waits(framework: Framework, pid: int) -> bool:
    return bool(
        asked(framework.world.dsn, f"SELECT 1 FROM pg_locks WHERE NOT granted AND pid = {pid}")
    )


def lives(framework: Framework, pid: int) -> bool:
    return bool(asked(framework.world.dsn, f"SELECT 1 FROM pg_stat_activity WHERE pid = {pid}"))


def killed_at_commit(framework: Framework) -> None:
    elsewhere(framework, TERMINATES)
    try:
        with framework.transaction() as work:
            both(framework, work)
    finally:
        # The server dies behind the token row: in COMMIT, or in PREPARE.
        if asked(framework.world.dsn, "SELECT last_value FROM deaths WHERE is_called") == [(1,)]:
            framework.hits.append("killed")


# What each scene does, and what it has seen of it.
SCENES: dict[str, tuple[Scene, str]] = {
    "the end": (commit, "the end"),
    "an error": (error, "an error"),
    "a swallowed SQL error": (swallowed_error, DIVISION_BY_ZERO),
    "a savepoint rolled back": (savepoint, "o-2"),
    "the first send in it": (first_savepoint, "o-2"),
    "`close()` inside": (closed, "closed"),
    "the connection lost": (lost, "lost"),
    "`commit()` inside": (commit_inside, "called"),
    "`rollback()` inside": (rollback_inside, "called"),
    "`COMMIT` as SQL inside": (sql_commit_inside, "called"),
    "autocommit": (autocommit, "called"),
    "serialization failure": (serialization_failure, SERIALIZATION_FAILURE),
    "deadlock": (deadlock, DEADLOCK),
    "server killed at COMMIT": (killed_at_commit, "killed"),
}
# The rows that each outcome leaves.
LEFT = {"neither": set[str](), "both": {"o-1"}, "the rest": {"o-1", "o-3"}, "rows only": {"o-1"}}


def outcome(scene: Scene, framework: Framework) -> str:
    """Return what exists in the end, and the error that was raised."""
    world, raised = framework.world, ""
    try:
        scene(framework)
    except Exception as error:  # noqa: BLE001  # its name is the result
        raised = f", `{type(error).__name__}`"
    wait_until(world.settled)
    rows, messages = world.orders(), world.messages()
    if rows == messages:
        kind = {0: "neither", 1: "both", 2: "the rest"}[len(rows)]
    else:
        kind = f"{'rows' if rows > messages else 'messages'} only"
    assert rows == LEFT[kind]
    return kind + raised


def documented() -> dict[tuple[str, type[Framework]], str]:
    """Return the cells of the tables, by scene and way."""
    lines = re.findall(r"^\| (.*) \|$", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    cells: dict[tuple[str, type[Framework]], str] = {}
    tables = iter([("every way", [*chain(*FRAMEWORKS)]), *map(columns, FRAMEWORKS)])
    kinds: Sequence[type[Framework]] = ()
    for scene, *found in (re.split(r" ?\| ?", line) for line in lines):
        if scene == "scene":
            head, kinds = next(tables)
            assert " | ".join(found) == head
            continue
        assert scene in SCENES
        told = ""
        for kind, cell in zip(kinds, chain(found, repeat("")), strict=False):
            # an empty cell is the same as to its left, an error alone leaves neither
            told = f"neither, {cell}" if cell.startswith("`") else cell or told
            cells[scene, kind] = told
    return cells


def columns(kinds: Sequence[type[Framework]]) -> tuple[str, Sequence[type[Framework]]]:
    return " | ".join(kind.name for kind in kinds), kinds


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("kind", [*chain(*FRAMEWORKS)], ids=lambda kind: kind.__name__)
def test_each_way_does_what_the_table_says(world: World, kind: type[Framework], scene: str) -> None:
    play, hit = SCENES[scene]
    with ExitStack() as stack:
        framework = kind(world, stack)
        found = outcome(play, framework)
    assert found == documented()[scene, kind]
    assert framework.hits == [hit]  # so the cell does not hold by another error
