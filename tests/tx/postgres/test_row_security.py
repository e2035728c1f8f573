"""Row-level security on txmq's tables is an error: without one a hidden outbox seems
empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.tx.postgres.support import LOG, check_of, new_token, poor_role, producer, rows, xid_of
from txmq.model.message import Decision
from txmq.tx.postgres.blocking import enqueue, insert_token
from txmq.tx.postgres.outbox import NewOutboxRow, SetAside
from txmq.tx.postgres.resolver import TokenResolver
from txmq.tx.postgres.schema import check
from txmq.tx.postgres.session import connect

TABLES = ("txmq_token", "txmq_outbox")


@pytest.fixture
def broker_role(database: str) -> Iterator[str]:
    """A role that may do everything with the tables, and owns none of them."""
    with poor_role(database) as (role, dsn):
        for objects in ("TABLES", "FUNCTIONS"):
            rows(database, f"GRANT ALL ON ALL {objects} IN SCHEMA public TO {role}")
        yield dsn


def secure(dsn: str, table: str, *, on: bool = True) -> None:
    rows(dsn, f"ALTER TABLE public.{table} {'ENABLE' if on else 'DISABLE'} ROW LEVEL SECURITY")


def test_a_token_whose_row_is_hidden_stays_undecided(database: str, broker_role: str) -> None:
    token = new_token()
    with closing(producer(database)) as connection:
        insert_token(connection, token, [LOG])
        asked = check_of(database, token, xid_of(connection))
        connection.commit()
    secure(database, "txmq_token")
    with closing(TokenResolver(broker_role)) as resolver:
        [answer] = resolver.resolve([asked])
        assert answer.verdict is Decision.UNKNOWN
        assert "row-level security" in answer.reason
        secure(database, "txmq_token", on=False)
        assert resolver.resolve([asked])[0].verdict is Decision.COMMIT


def test_a_hidden_outbox_is_an_error_and_not_an_empty_one(database: str, broker_role: str) -> None:
    with closing(producer(database)) as connection:
        insert_token(connection, new_token(), [LOG])
        enqueue(connection, [NewOutboxRow(LOG, new_token(), None, "shop", 1, [], b"x")])
        connection.commit()
    secure(database, "txmq_outbox")
    with closing(TokenResolver(broker_role)) as resolver:
        assert resolver.fetch(LOG, [], SetAside()) is None
        assert resolver.failing
        assert "row-level security" in resolver.trouble
    with closing(TokenResolver(database)) as resolver:  # the owner sees every row
        assert [row.content for row in resolver.fetch(LOG, [], SetAside()) or ()] == [b"x"]


def test_the_check_names_the_tables_whose_rows_are_hidden(database: str, broker_role: str) -> None:
    for table in TABLES:
        secure(database, table)
    for dsn, hidden in ((broker_role, TABLES), (database, ())):
        with closing(connect(dsn, application_name="test")) as connection:
            remarks = check(connection)
        found = [one for one in remarks if one.startswith("row-level security hides rows of ")]
        assert [one.split()[5] for one in found] == list(hidden)
        assert all(f"ALTER TABLE public.{one.split()[5]} DISABLE" in one for one in found)
