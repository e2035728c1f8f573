"""The status of transaction ids, those included that the server has yet to give."""

from __future__ import annotations

from contextlib import closing

from tests.tx.postgres.support import producer
from txmq.tx.postgres.branch_finish import NOT_GIVEN, statuses
from txmq.tx.postgres.session import connect

GIVE = "SELECT pg_current_xact_id()::text::int8"


def test_an_id_that_the_server_has_not_given_is_told_from_one_that_is_in_progress(
    database: str,
) -> None:
    with (
        closing(connect(database, application_name="test")) as asking,
        closing(producer(database)) as writer,
        writer.cursor() as cursor,
    ):
        cursor.execute(GIVE)
        [(xid,)] = cursor.fetchall()
        found = statuses(asking, [xid, xid + 1_000_000])
        assert found == {xid: "in progress", xid + 1_000_000: NOT_GIVEN}
        writer.commit()
        assert statuses(asking, [xid]) == {xid: "committed"}
