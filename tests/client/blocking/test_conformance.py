"""Each way to have rows and messages in one transaction, in each of the same scenes.

The table in docs/TRANSACTIONS.md says what its users see; here it is shown. Whatever it
is, rows and messages agree in the end.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from itertools import chain
from pathlib import Path

import psycopg2
import pytest

from tests.client.async_frameworks import ASYNC_FRAMEWORKS
from tests.client.frameworks import BLOCKING_FRAMEWORKS, Framework, Work
from tests.client.world import ApplicationError, World, fail
from txmq.testing.wait import wait_until

DOCUMENT = Path(__file__).parents[3] / "docs" / "TRANSACTIONS.md"
DEADLINE_S = 20.0
TERMINATES = """
CREATE OR REPLACE FUNCTION die() RETURNS trigger LANGUAGE plpgsql
AS $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END $$;
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


def commit(framework: Framework) -> None:
    with framework.transaction() as work:
        both(framework, work)


def error(framework: Framework) -> None:
    with suppress(ApplicationError), framework.transaction() as work:
        both(framework, work)
        fail()


def swallowed_error(framework: Framework) -> None:
    with framework.transaction() as work:
        both(framework, work)
        with suppress(Exception):
            work.execute("SELECT 1 / 0")


def savepoint(framework: Framework) -> None:
    """Only what was sent in the savepoint goes with it: `kept` stays."""
    with framework.transaction() as work:
        both(framework, work)
        with suppress(ApplicationError), work.savepoint():
            both(framework, work, "o-2")
            fail()
        with work.savepoint():
            both(framework, work, "o-3")


def first_savepoint(framework: Framework) -> None:
    """The first message of all is sent in a savepoint that is rolled back."""
    with framework.transaction() as work:
        with suppress(ApplicationError), work.savepoint():
            both(framework, work, "o-2")
            fail()
        both(framework, work)


def closed(framework: Framework) -> None:
    with framework.transaction() as work:
        both(framework, work)
        work.connection.close()


def lost(framework: Framework) -> None:
    with framework.transaction() as work:
        both(framework, work)
        pid = work.connection.info.backend_pid
        elsewhere(framework, f"SELECT pg_terminate_backend({pid}, 5000)")


def commit_inside(framework: Framework) -> None:
    with framework.transaction() as work:
        both(framework, work)
        work.connection.commit()


def rollback_inside(framework: Framework) -> None:
    with framework.transaction() as work:
        both(framework, work)
        work.connection.rollback()


def sql_commit_inside(framework: Framework) -> None:
    with framework.transaction() as work:
        both(framework, work)
        work.execute("COMMIT")


def autocommit(framework: Framework) -> None:
    framework.autocommit()


def serialization_failure(framework: Framework) -> None:
    elsewhere(framework, "INSERT INTO lines (id) VALUES (1), (2)")
    with framework.transaction("SERIALIZABLE") as work:
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
            wait_until(lambda: waits(framework, pid), DEADLINE_S)
            work.execute("SET LOCAL deadlock_timeout = '10ms'")
            work.execute(second)


def waits(framework: Framework, pid: int) -> bool:
    with closing(psycopg2.connect(framework.world.dsn)) as own, own.cursor() as cursor:
        cursor.execute(f"SELECT FROM pg_locks WHERE NOT granted AND pid = {pid}")
        return bool(cursor.rowcount)


def killed_at_commit(framework: Framework) -> None:
    elsewhere(framework, TERMINATES)
    with framework.transaction() as work:
        both(framework, work)


SCENES: dict[str, Scene] = {
    "the end": commit,
    "an error": error,
    "a swallowed SQL error": swallowed_error,
    "a savepoint rolled back": savepoint,
    "the first send in it": first_savepoint,
    "`close()` inside": closed,
    "the connection lost": lost,
    "`commit()` inside": commit_inside,
    "`rollback()` inside": rollback_inside,
    "`COMMIT` as SQL inside": sql_commit_inside,
    "autocommit": autocommit,
    "serialization failure": serialization_failure,
    "deadlock": deadlock,
    "server killed at COMMIT": killed_at_commit,
}


def outcome(scene: Scene, framework: Framework) -> str:
    """Return what exists in the end, and the error that was raised."""
    world, raised = framework.world, ""
    try:
        scene(framework)
    except Exception as error:  # noqa: BLE001  # its name is the result
        raised = f", `{type(error).__name__}`"
    wait_until(world.settled, DEADLINE_S)
    rows, messages = world.orders(), world.messages()
    if rows == messages:
        return {0: "neither", 1: "both", 2: "the rest"}[len(rows)] + raised
    return f"{'rows' if rows > messages else 'messages'} only{raised}"


def documented() -> dict[tuple[str, type[Framework]], str]:
    """Return the cells of the tables, by scene and way."""
    lines = re.findall(r"^\| (.*) \|$", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    cells: dict[tuple[str, type[Framework]], str] = {}
    for kinds in FRAMEWORKS:
        start = lines.index(" | ".join(["scene", *(kind.name for kind in kinds)])) + 1
        rows = [line.split(" | ") for line in lines[start : start + len(SCENES)]]
        assert [row[0] for row in rows] == list(SCENES)
        for scene, *found in rows:
            cells |= {(scene, kind): cell for kind, cell in zip(kinds, found, strict=True)}
    return cells


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("kind", [*chain(*FRAMEWORKS)], ids=lambda kind: kind.__name__)
def test_each_way_does_what_the_table_says(world: World, kind: type[Framework], scene: str) -> None:
    with ExitStack() as stack:
        found = outcome(SCENES[scene], kind(world, stack))
    assert found == documented()[scene, kind]
