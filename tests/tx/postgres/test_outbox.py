"""The table of the outbox: the numbers of its rows, its floor, and looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from uuid import UUID

import pytest

from tests.tx.postgres.support import LOG, OTHER_LOG, new_token, producer, rows
from txmq.errors import DatabaseConflict
from txmq.tx.postgres.blocking import enqueue, fetch, insert_token, read_key_status
from txmq.tx.postgres.outbox import NewOutboxRow, OutboxRow, PublishedRow, SetAside
from txmq.tx.postgres.resolver import TokenResolver
from txmq.tx.postgres.session import Connection, connect


@pytest.fixture
def business(database: str) -> Iterator[Connection]:
    """A connection of a service, in whose transactions rows are written."""
    with closing(producer(database)) as connection:
        yield connection


@pytest.fixture
def own(database: str) -> Iterator[Connection]:
    """A connection of the process that publishes the rows."""
    with closing(connect(database, application_name="test")) as connection:
        yield connection


@pytest.fixture
def no_autovacuum(database: str) -> Iterator[None]:
    """Keep autovacuum away from the outbox: the floor does not rise beside it."""
    rows(database, "ALTER TABLE txmq_outbox SET (autovacuum_enabled = off)")
    yield
    rows(database, "ALTER TABLE txmq_outbox RESET (autovacuum_enabled)")


def put(connection: Connection, *keys: int, log_id: UUID = LOG) -> UUID:
    """Write a row with these keys into the open transaction; return its token."""
    token = new_token()
    enqueue(connection, [NewOutboxRow(log_id, token, None, "shop", 1, list(keys), b"x")])
    return token


def put_and_commit(connection: Connection, *keys: int, log_id: UUID = LOG) -> UUID:
    token = put(connection, *keys, log_id=log_id)
    connection.commit()
    return token


def drain(connection: Connection, log_id: UUID = LOG) -> list[OutboxRow]:
    """Fetch and delete rows until none is left; return them."""
    drained: list[OutboxRow] = []
    done: list[PublishedRow] = []
    while found := fetch(connection, log_id, done, SetAside()):
        drained += found
        done = [row.published for row in found]
    return drained


def settle(connection: Connection) -> None:
    """Bring the floor of an empty outbox to its place; the first fetch makes it."""
    for _ in range(2):
        assert fetch(connection, LOG, [], SetAside()) == []


def floor(dsn: str) -> int:
    [(seq,)] = rows(dsn, "SELECT max(seq) FROM txmq_outbox_floor WHERE log_id = %s", str(LOG))
    assert isinstance(seq, int)
    return seq


def stamp(connection: Connection) -> int | None:
    """Return the outbox's stamp in a transaction of its own."""
    found = insert_token(connection, new_token(), [LOG]).brokers[LOG].outbox_stamp
    connection.commit()
    return found


def test_a_row_with_the_number_of_a_published_one_stays(
    business: Connection, own: Connection
) -> None:
    token = put_and_commit(business, 1)
    [row] = fetch(own, LOG, [], SetAside())
    assert row.token == token
    # as after a failover: the row that was published is lost, another has its number
    assert fetch(own, LOG, [PublishedRow(row.seq, new_token())], SetAside()) == [row]
    assert fetch(own, LOG, [row.published], SetAside()) == []


def test_numbers_go_on_behind_the_rows_where_the_sequence_has_gone_back(
    database: str, business: Connection, own: Connection
) -> None:
    published = [put_and_commit(business, 1) for _ in range(3)]
    assert [row.token for row in drain(own)] == published
    waiting = [put_and_commit(business, 1) for _ in range(2)]
    rows(database, "ALTER SEQUENCE txmq_outbox_seq_seq RESTART")
    waiting += [put_and_commit(business, 1) for _ in range(3)]
    assert [row.token for row in drain(own)] == waiting


def test_numbers_go_on_behind_the_floor_of_an_empty_outbox(
    database: str, business: Connection, own: Connection
) -> None:
    put_and_commit(business, 1)
    drain(own)
    rows(database, "ALTER SEQUENCE txmq_outbox_seq_seq RESTART")
    token = put_and_commit(business, 1)
    assert [row.token for row in drain(own)] == [token]


def test_a_late_commit_of_a_smaller_number_is_not_passed_over(
    database: str, business: Connection, own: Connection
) -> None:
    put_and_commit(business, 1)
    drain(own)
    before = floor(database)
    with closing(producer(database)) as late:
        token = put(late, 2)
        put_and_commit(business, 1)
        drain(own)
        assert floor(database) == before  # a writer is open
        assert stamp(business) is None
        late.commit()
    assert [row.token for row in drain(own)] == [token]
    assert floor(database) == before + 2


@pytest.mark.usefixtures("no_autovacuum")
def test_the_floor_follows_a_long_queue_before_it_is_empty(
    database: str, business: Connection, own: Connection
) -> None:
    settle(own)
    first = floor(database)
    rows(
        database,
        "INSERT INTO txmq_outbox (log_id, tok, service, messages, content)"
        " SELECT %s::uuid, gen_random_uuid(), '', 1, 'x' FROM generate_series(1, 2600)",
        str(LOG),
    )
    floors, done = set[int](), list[PublishedRow]()
    while found := fetch(own, LOG, done, SetAside()):
        done = [row.published for row in found]
        floors.add(floor(database) - first)
    assert len(floors) == 3  # a thousand numbers at a time
    assert floor(database) == first + 2600


def test_the_floor_rises_whatever_isolation_the_database_has_as_its_default(
    database: str, business: Connection
) -> None:
    put_and_commit(business, 1)
    [(name,)] = rows(database, "SELECT current_database()")
    rows(database, f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    with closing(TokenResolver(database)) as resolver:
        done: list[PublishedRow] = []
        for _ in range(3):
            done = [row.published for row in resolver.fetch(LOG, done, SetAside()) or ()]
    assert not done
    assert floor(database) > 1


def test_publishers_without_rows_raise_their_floors_beside_each_other(
    database: str, business: Connection, own: Connection
) -> None:
    """Two that read at the same moments, again and again, would never raise one."""
    settle(own)
    put_and_commit(business, 1, log_id=OTHER_LOG)
    before = floor(database)
    with closing(producer(database)) as other, other.cursor() as cursor:
        cursor.execute("SELECT txmq_outbox_settle(%s::uuid)", (str(OTHER_LOG),))
        cursor.execute("LOCK TABLE txmq_outbox IN SHARE MODE")  # as where it raises the floor
        with own.cursor() as waiting:
            waiting.execute("SET lock_timeout = '5s'")
        assert fetch(own, LOG, [], SetAside()) == []
    assert floor(database) > before


@pytest.mark.usefixtures("no_autovacuum")
def test_a_look_walks_over_few_deleted_rows_under_an_old_snapshot(
    database: str, business: Connection, own: Connection
) -> None:
    with closing(producer(database)) as old, old.cursor() as cursor:
        old.set_session(isolation_level="REPEATABLE READ")
        cursor.execute("SELECT 1")
        rows(
            database,
            "INSERT INTO txmq_outbox (log_id, tok, service, messages, content)"
            " SELECT %s::uuid, gen_random_uuid(), '', 1, 'x' FROM generate_series(1, 5000)",
            str(LOG),
        )
        assert len(drain(own)) == 5000
        assert pages_read(own, f"SELECT public.txmq_outbox_stamp('{LOG}')") < 20
        assert pages_read(own, f"SELECT public.txmq_outbox_settle('{LOG}')") < 20
        assert pages_read(own, f"SELECT public.txmq_outbox_waits('{LOG}', '{{1}}')") < 20


def pages_read(connection: Connection, statement: str) -> int:
    """Return the pages that a statement touches, the least of a few runs: an autovacuum
    beside one of them makes the session read its catalogues anew.
    """
    found = []
    for _ in range(4):
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}")
            [([explained],)] = cursor.fetchall()
        found.append(int(explained["Plan"]["Shared Hit Blocks"]))
        found[-1] += int(explained["Plan"]["Shared Read Blocks"])
    return min(found)


def test_a_stamp_holds_until_a_row_is_written(business: Connection, own: Connection) -> None:
    assert stamp(business) == 0  # nobody has ever fetched
    settle(own)
    first = stamp(business)
    assert first
    assert stamp(business) == first
    put_and_commit(business, 1)
    assert stamp(business) is None
    drain(own)
    second = stamp(business)
    assert second
    assert second != first


def test_a_stamp_of_rows_that_wait_is_none_however_the_sequence_stands(
    database: str, business: Connection, own: Connection
) -> None:
    settle(own)
    put_and_commit(business, 1)
    rows(database, "ALTER SEQUENCE txmq_outbox_seq_seq RESTART")
    assert stamp(business) is None


def test_a_stamp_comes_by_no_operator_of_the_caller(
    database: str, business: Connection, own: Connection
) -> None:
    settle(own)
    rows(
        database,
        "CREATE SCHEMA mine;"
        "CREATE FUNCTION mine.never(uuid, uuid) RETURNS bool LANGUAGE sql AS 'SELECT false';"
        "CREATE FUNCTION mine.ever(int8, int8) RETURNS bool LANGUAGE sql AS 'SELECT true';"
        "CREATE OPERATOR mine.= (FUNCTION = mine.never, LEFTARG = uuid, RIGHTARG = uuid);"
        "CREATE OPERATOR mine.< (FUNCTION = mine.ever, LEFTARG = int8, RIGHTARG = int8);"
        "CREATE OPERATOR mine.>= (FUNCTION = mine.ever, LEFTARG = int8, RIGHTARG = int8)",
    )
    first = stamp(business)
    with business.cursor() as cursor:
        cursor.execute("SET search_path = mine, pg_catalog")
        cursor.execute("SELECT public.txmq_outbox_stamp(%s)", (str(LOG),))
        assert cursor.fetchall() == [(first,)]
    put_and_commit(business, 1)
    with business.cursor() as cursor:
        cursor.execute("SELECT public.txmq_outbox_stamp(%s)", (str(LOG),))
        assert cursor.fetchall() == [(None,)]


@pytest.mark.parametrize(
    ("written", "wanted", "waits"),
    [
        ([1, 2], [2, 3], True),
        ([1], [2], False),
        ([], [2], False),
        ([1], [], False),
    ],
)
def test_only_rows_with_one_of_the_keys_wait_for_a_transaction(
    business: Connection,
    written: list[int],
    wanted: list[int],
    waits: bool,  # noqa: FBT001
) -> None:
    put_and_commit(business, *written)
    put_and_commit(business, *wanted, log_id=OTHER_LOG)
    assert read_key_status(business, LOG, wanted).waiting is waits


def test_rows_set_aside_and_those_of_their_keys_are_not_fetched(
    business: Connection, own: Connection
) -> None:
    for keys in ([1, 2], [2], [4], []):
        put_and_commit(business, *keys)
    first, second, third, fourth = fetch(own, LOG, [], aside := SetAside())
    aside.add(first, "no topic")
    assert [aside.holds(row) for row in (second, third, fourth)] == [True, False, False]
    assert fetch(own, LOG, [], aside) == [third, fourth]
    aside.add(fourth, "no key")
    assert fetch(own, LOG, [third.published], aside) == []
    assert str(aside) == f"row {first.seq}: no topic (1 more are set aside)"


def test_rows_wait_behind_one_that_waits_itself_for_another_key(
    business: Connection, own: Connection
) -> None:
    for keys in ([1], [1, 2], [2], [3]):
        put_and_commit(business, *keys)
    first, *others = fetch(own, LOG, [], aside := SetAside())
    aside.add(first, "no topic")
    found = fetch(own, LOG, [], aside)
    assert found == others, "the keys of the second one are not known yet"
    assert [aside.holds(row) for row in found] == [True, True, False]
    assert fetch(own, LOG, [], aside) == found[2:]


def test_a_snapshot_that_may_hide_a_row_is_a_conflict(
    database: str, business: Connection, own: Connection
) -> None:
    settle(own)
    with closing(producer(database)) as old:
        old.set_session(isolation_level="REPEATABLE READ")
        assert read_key_status(old, LOG, [1]).waiting is False
        put_and_commit(business, 1)
        with pytest.raises(DatabaseConflict):
            read_key_status(old, LOG, [1])
        old.rollback()
        assert read_key_status(old, LOG, [1]).waiting is True
        old.rollback()
        drain(own)
        assert read_key_status(old, LOG, [1]).waiting is False
