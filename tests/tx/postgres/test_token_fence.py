"""Token row and token fence in a race, and planted bugs that the race must find."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import psycopg2
import pytest

from tests.tx.postgres.token_fence_race import Race, Resolver
from txmq.errors import DatabaseError
from txmq.model.message import Decision
from txmq.testing.wait import PATIENCE_S
from txmq.tx.postgres.evidence import PROVE, Limits, write
from txmq.tx.postgres.resolver import Answer, Check, ResolverPolicy, TokenResolver
from txmq.tx.postgres.session import Connection, connect

RUN_S = 4.0
ENOUGH = {"COMMIT": 100, "ROLLBACK": 50, "UNKNOWN": 20, "TokenFenced": 5, "killed": 10}
EAGER = ResolverPolicy(first_pause_s=0.01, longest_pause_s=0.05)


def sound(dsn: str) -> Resolver:
    return TokenResolver(dsn, policy=EAGER)


class Mistaken:
    """A resolver with a wrong rule about one token. Its errors are UNKNOWN, as they
    should be.
    """

    def __init__(self, dsn: str, rule: Callable[[Connection, Check], Decision]) -> None:
        self._dsn, self._rule = dsn, rule
        self._connection: Connection | None = None

    def resolve(self, checks: Sequence[Check]) -> list[Answer]:
        return [Answer(self._decide(check)) for check in checks]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _decide(self, check: Check) -> Decision:
        try:
            if self._connection is None or self._connection.closed:
                self._connection = connect(self._dsn, application_name="mistaken")
            return self._rule(self._connection, check)
        except (DatabaseError, psycopg2.Error):
            if self._connection is not None and not self._connection.closed:
                raise
            return Decision.UNKNOWN  # its backend was killed


def without_fence(connection: Connection, check: Check) -> Decision:
    """Take a missing row for a rollback."""
    written = write(connection, PROVE, check.log_id, [check.token], Limits())
    return Decision.COMMIT if written.done else Decision.ROLLBACK


def row_before_status(connection: Connection, check: Check) -> Decision:
    """Read the row before the status, so that the transaction may commit in between."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT FROM public.txmq_token WHERE tok = %s AND log_id = %s",
            (str(check.token), str(check.log_id)),
        )
        row = cursor.fetchall()
        cursor.execute("SELECT pg_xact_status(%s::text::xid8)", (check.xid,))
        status = cursor.fetchall()
    if row:
        return Decision.COMMIT
    return Decision.UNKNOWN if status == [("in progress",)] else Decision.ROLLBACK


def test_no_phantom_and_no_loss_among_racing_producers_and_killed_backends(database: str) -> None:
    race = Race(database, sound)
    race.run(RUN_S, at_least=ENOUGH)
    assert race.phantoms() == set()
    assert race.lost() == set()
    assert race.flipped == set()
    assert race.misreported() == set()
    assert race.undecided() == []
    assert {name: race.counts[name] >= least for name, least in ENOUGH.items()} == dict.fromkeys(
        ENOUGH, True
    )


@pytest.mark.parametrize("rule", [without_fence, row_before_status])
def test_a_planted_resolver_bug_is_found(
    database: str, rule: Callable[[Connection, Check], Decision]
) -> None:
    race = Race(database, lambda dsn: Mistaken(dsn, rule), hints=1.0)
    race.run(PATIENCE_S)  # a second or two
    assert race.lost() or race.flipped
