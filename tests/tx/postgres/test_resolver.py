"""The resolver answers COMMIT and ROLLBACK only with proof, else UNKNOWN."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import psycopg2
import pytest
from psycopg2 import extensions

from tests.tx.postgres.support import (
    LOG,
    OTHER_LOG,
    backend_pid,
    check_of,
    identity_of,
    new_token,
    poor_role,
    producer,
    rows,
    wait_for_backend,
    xid_of,
)
from txmq.errors import DatabaseUnavailable, TokenFenced
from txmq.model.message import Decision
from txmq.testing.postgres_server import OwnServer
from txmq.testing.wait import wait_until
from txmq.tx.postgres.blocking import guarded_commit, insert_token
from txmq.tx.postgres.evidence import Limits
from txmq.tx.postgres.identity import Server, ServerIdentity, TimelineHistory
from txmq.tx.postgres.partitions import DAY_MS
from txmq.tx.postgres.resolver import Answer, Check, ResolverPolicy, TokenResolver
from txmq.tx.postgres.session import Connection, connect


@pytest.fixture
def connection(database: str) -> Iterator[Connection]:
    with closing(producer(database)) as connection:
        yield connection


@pytest.fixture
def resolver(database: str) -> Iterator[TokenResolver]:
    with closing(TokenResolver(database)) as resolver:
        yield resolver


def verdict(resolver: TokenResolver, check: Check) -> Decision:
    return resolver.resolve([check])[0].verdict


def states(dsn: str) -> list[tuple[object, ...]]:
    return rows(dsn, "SELECT state FROM public.txmq_token")


def test_a_committed_row_is_a_commit_for_good(
    database: str, connection: Connection, resolver: TokenResolver
) -> None:
    token = new_token()
    insert_token(connection, token, [LOG])
    guarded_commit(connection, token)
    check = check_of(database, token)
    assert [verdict(resolver, check) for _ in range(2)] == [Decision.COMMIT] * 2
    assert states(database) == [("D",)]


def test_without_a_row_the_fence_decides_for_good(
    database: str, connection: Connection, resolver: TokenResolver
) -> None:
    token = new_token()
    insert_token(connection, token, [LOG])
    connection.rollback()
    check = check_of(database, token)
    assert [verdict(resolver, check) for _ in range(2)] == [Decision.ROLLBACK] * 2
    assert states(database) == [("R",)]
    with pytest.raises(TokenFenced):
        insert_token(connection, token, [LOG])


def test_each_broker_has_an_answer_of_its_own(
    database: str, connection: Connection, resolver: TokenResolver
) -> None:
    token = new_token()
    insert_token(connection, token, [LOG])
    connection.commit()
    here = check_of(database, token)
    there = here._replace(log_id=OTHER_LOG)
    assert [a.verdict for a in resolver.resolve([there, here])] == [
        Decision.ROLLBACK,
        Decision.COMMIT,
    ]


@pytest.mark.parametrize("hint", [True, False])
def test_a_transaction_in_progress_is_waited_for(
    database: str,
    connection: Connection,
    resolver: TokenResolver,
    hint: bool,  # noqa: FBT001
) -> None:
    token = new_token()
    insert_token(connection, token, [LOG])
    xid = xid_of(connection)
    check = check_of(database, token, xid if hint else None)
    assert verdict(resolver, check) is Decision.UNKNOWN
    guarded_commit(connection, token)
    assert verdict(resolver, check) is Decision.COMMIT


def test_a_prepared_transaction_is_waited_for(
    database: str, connection: Connection, resolver: TokenResolver
) -> None:
    token = new_token()
    connection.tpc_begin(connection.xid(1, "token", "branch"))
    insert_token(connection, token, [LOG])
    connection.tpc_prepare()
    connection.reset()
    check = check_of(database, token)
    assert verdict(resolver, check) is Decision.UNKNOWN
    rows(database, "COMMIT PREPARED '1_dG9rZW4=_YnJhbmNo'")
    assert verdict(resolver, check) is Decision.COMMIT


@pytest.mark.parametrize("xid", [-1, 0, 3, 2**62, 2**64, 743])
def test_an_xid_is_no_more_than_a_hint(
    database: str, connection: Connection, resolver: TokenResolver, xid: int
) -> None:
    here, gone = new_token(), new_token()
    insert_token(connection, here, [LOG])
    connection.commit()
    checks = [check_of(database, here, xid), check_of(database, gone, xid)]
    assert [a.verdict for a in resolver.resolve(checks)] == [Decision.COMMIT, Decision.ROLLBACK]


def test_the_xid_of_a_transaction_in_progress_only_delays(
    database: str, connection: Connection, resolver: TokenResolver
) -> None:
    insert_token(connection, new_token(), [LOG])
    xid = xid_of(connection)
    reused = check_of(database, new_token(), xid)
    assert verdict(resolver, reused) is Decision.UNKNOWN
    connection.commit()
    assert verdict(resolver, reused) is Decision.ROLLBACK


def test_a_stuck_transaction_is_ended_if_the_policy_says_so(
    database: str, connection: Connection
) -> None:
    token = new_token()
    insert_token(connection, token, [LOG])
    xid = xid_of(connection)
    with closing(
        TokenResolver(database, policy=ResolverPolicy(end_stuck_after_s=0.0))
    ) as impatient:
        check = check_of(database, token, xid)
        wait_until(lambda: verdict(impatient, check) is Decision.ROLLBACK)
    with pytest.raises(psycopg2.OperationalError):
        connection.commit()


def test_a_stuck_transaction_whose_id_nobody_knows_is_ended(
    database: str, connection: Connection
) -> None:
    token, others = new_token(), [new_token() for _ in range(3)]
    insert_token(connection, token, [LOG])
    with closing(
        TokenResolver(database, policy=ResolverPolicy(end_stuck_after_s=0.0))
    ) as impatient:
        found = impatient.resolve([check_of(database, one) for one in (*others, token)])
        assert {answer.verdict for answer in found} == {Decision.ROLLBACK}
    with pytest.raises(psycopg2.OperationalError):
        connection.commit()


@pytest.mark.parametrize("older_than_s", [None, 3600.0])
def test_a_transaction_in_progress_is_left_alone_and_named(
    database: str, connection: Connection, older_than_s: float | None
) -> None:
    token, absent = new_token(), new_token()
    insert_token(connection, token, [LOG])
    pid = backend_pid(connection)
    policy = ResolverPolicy(end_stuck_after_s=older_than_s)
    with closing(TokenResolver(database, policy=policy)) as patient:
        checks = [check_of(database, token), check_of(database, absent)]
        waiting, decided = patient.resolve(checks)
        assert (waiting.verdict, waiting.blocked) == (Decision.UNKNOWN, True)
        assert decided == Answer(Decision.ROLLBACK)
        assert f"session {pid} " in patient.blocked["tokens"]
        assert not patient.failing
        guarded_commit(connection, token)
        assert patient.resolve(checks)[0] == Answer(Decision.COMMIT)
        assert patient.blocked == {}


def test_a_transaction_that_is_not_stuck_is_not_ended(
    database: str, connection: Connection
) -> None:
    token = new_token()
    insert_token(connection, token, [LOG])
    xid = xid_of(connection)
    with closing(
        TokenResolver(database, policy=ResolverPolicy(end_stuck_after_s=3600.0))
    ) as patient:
        assert verdict(patient, check_of(database, token, xid)) is Decision.UNKNOWN
    guarded_commit(connection, token)


DAMAGES = {
    "no table": (
        "ALTER TABLE public.txmq_token RENAME TO elsewhere",
        "ALTER TABLE public.elsewhere RENAME TO txmq_token",
    ),
    "another table": (
        "ALTER TABLE public.txmq_token RENAME TO elsewhere; CREATE TABLE public.txmq_token (n int)",
        "DROP TABLE public.txmq_token; ALTER TABLE public.elsewhere RENAME TO txmq_token",
    ),
    "no right to write": (
        "REVOKE UPDATE ON public.txmq_token FROM {role}",
        "GRANT UPDATE ON public.txmq_token TO {role}",
    ),
    "no right to read": (
        "REVOKE SELECT ON public.txmq_token FROM {role}",
        "GRANT SELECT ON public.txmq_token TO {role}",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unreadable_table_gives_unknown_until_it_is_repaired(
    database: str, connection: Connection, damage: str
) -> None:
    token = new_token()
    insert_token(connection, token, [LOG])
    connection.commit()
    with poor_role(database) as (role, poor), closing(TokenResolver(poor)) as resolver:
        harm, cure = (statement.format(role=role) for statement in DAMAGES[damage])
        rows(database, f"GRANT SELECT, INSERT, UPDATE ON public.txmq_token TO {role}; {harm}")
        [answer] = resolver.resolve([check_of(database, token)])
        assert answer.verdict is Decision.UNKNOWN
        assert answer.reason
        rows(database, cure)
        assert verdict(resolver, check_of(database, token)) is Decision.COMMIT


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"system_id": 1}, "another cluster"),
        ({"database_oid": 1}, "another database"),
        ({"timeline": 1000}, "behind the transaction's 1000"),
    ],
)
def test_another_database_decides_nothing(
    database: str, resolver: TokenResolver, change: dict[str, int], reason: str
) -> None:
    own = check_of(database, new_token())
    foreign = own._replace(decider=own.decider._replace(**change))
    unknown, known = resolver.resolve([foreign, own])
    assert (unknown.verdict, known.verdict) == (Decision.UNKNOWN, Decision.ROLLBACK)
    assert reason in unknown.reason
    assert len(states(database)) == 1


def test_a_standby_decides_nothing_and_a_promoted_one_does() -> None:
    group = ServerIdentity(system_id=7, timeline=1, database_oid=5)
    standby = Server(group, in_recovery=True, version=160000, max_prepared_transactions=0)
    assert group.why_not(standby, 1) == "the server is in recovery"
    promoted = replace(standby, identity=group._replace(timeline=2), in_recovery=False)
    assert group.why_not(promoted, 1, TimelineHistory(2, {1: 9})) == ""


def test_a_read_only_server_decides_nothing(database: str, resolver: TokenResolver) -> None:
    [(name,)] = rows(database, "SELECT current_database()")
    token = new_token()
    check = check_of(database, token)
    rows(database, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    [answer] = resolver.resolve([check])
    assert answer.verdict is Decision.UNKNOWN
    assert "read-only" in answer.reason
    assert (
        states(database.replace("dbname", "options='-c default_transaction_read_only=off' dbname"))
        == []
    )


def test_an_unreachable_server_is_asked_less_and_less_often(database: str) -> None:
    now, away = 0.0, True
    asked: list[float] = []

    def connection() -> Connection:
        asked.append(now)
        if away:
            raise DatabaseUnavailable("away")
        return connect(database, application_name="test")

    policy = ResolverPolicy(first_pause_s=1.0, longest_pause_s=4.0)
    resolver = TokenResolver(connection, policy=policy, clock=lambda: now)
    check = check_of(database, new_token())
    for _ in range(2 * 15):
        assert resolver.resolve([check]) == [Answer(Decision.UNKNOWN, "away")]
        now += 0.5
    assert asked == [0.0, 1.0, 3.0, 7.0, 11.0]
    away = False
    assert verdict(resolver, check) is Decision.ROLLBACK
    away = True
    resolver.close()
    for _ in range(4):
        resolver.resolve([check])
        now += 0.5
    assert asked[-3:] == [15.0, 15.0, 16.0]


def test_a_connection_that_died_is_replaced(database: str, resolver: TokenResolver) -> None:
    check = check_of(database, new_token())
    assert verdict(resolver, check) is Decision.ROLLBACK
    rows(
        database,
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE application_name = 'txmq resolver' AND datname = current_database()",
    )
    assert verdict(resolver, check) is Decision.UNKNOWN
    wait_until(lambda: verdict(resolver, check) is Decision.ROLLBACK)


def test_one_undecided_token_does_not_delay_the_others(
    database: str, connection: Connection, resolver: TokenResolver
) -> None:
    committed, gone, open_one, ancient = ([new_token() for _ in range(n)] for n in (40, 40, 1, 0))
    with closing(producer(database)) as other, other.cursor() as cursor:
        cursor.execute(
            "INSERT INTO txmq_token (tok, log_id) SELECT unnest(%s::uuid[]), %s",
            ([str(t) for t in committed], str(LOG)),
        )
        other.commit()
    insert_token(connection, open_one[0], [LOG])
    ancient = [new_token(open_one[0].int // 2**80 - 9 * DAY_MS)]
    decider = identity_of(database)
    expected = dict.fromkeys(committed, Decision.COMMIT) | dict.fromkeys(gone, Decision.ROLLBACK)
    expected |= dict.fromkeys([*open_one, *ancient], Decision.UNKNOWN)
    checks = [Check(token, LOG, decider, None, 1) for token in expected]
    answers = resolver.resolve([*checks, checks[0]])
    assert {
        check.token: answer.verdict for check, answer in zip(checks, answers, strict=False)
    } == expected
    assert answers[-1] == answers[0]


def test_concurrent_resolvers_agree(database: str) -> None:
    decider, found = identity_of(database), list[list[Decision]]()
    checks = [Check(new_token(), LOG, decider, None, 1) for _ in range(300)]
    with closing(producer(database)) as connection, connection.cursor() as cursor:
        committed = [str(check.token) for check in checks[::2]]
        cursor.execute(
            "INSERT INTO txmq_token (tok, log_id) SELECT unnest(%s::uuid[]), %s",
            (committed, str(LOG)),
        )
        connection.commit()

    def resolve(order: int) -> None:
        with closing(TokenResolver(database, policy=ResolverPolicy(batch=50))) as resolver:
            for _ in range(3):
                answers = dict(zip(checks[::order], resolver.resolve(checks[::order]), strict=True))
            found.append([answers[check].verdict for check in checks])

    threads = [threading.Thread(target=resolve, args=(order,)) for order in (1, -1, 1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[Decision.COMMIT, Decision.ROLLBACK] * 150] * 4


@pytest.fixture
def without_standby(crashable_postgres: OwnServer, crashable_database: str) -> Iterator[None]:
    """Commits wait for a synchronous standby that does not exist, until the test
    ends.
    """
    rows(crashable_database, "CREATE TABLE probe (n int)")
    waits = threading.Event()

    def commit_until_it_waits() -> None:
        while not waits.is_set():
            with probe.cursor() as cursor:
                cursor.execute("INSERT INTO probe VALUES (1)")

    with closing(connect(crashable_database, application_name="probe")) as probe:
        thread = threading.Thread(target=commit_until_it_waits)
        thread.start()
        set_standby(crashable_postgres, "= 'ghost'")
        # The server takes a new setting up in its own time.
        wait_for_backend(crashable_postgres, backend_pid(probe), "wait_event = 'SyncRep'")
        waits.set()
        crashable_postgres.execute(f"SELECT pg_cancel_backend({backend_pid(probe)})")
        thread.join()
    yield
    set_standby(crashable_postgres, "TO DEFAULT")


def set_standby(server: OwnServer, value: str) -> None:
    server.execute(f"ALTER SYSTEM SET synchronous_standby_names {value}")
    server.execute("SELECT pg_reload_conf()")


@pytest.mark.parametrize("level", ["error", "notice"])
def test_hidden_warnings_do_not_hide_that_a_standby_is_missing(
    crashable_postgres: OwnServer, crashable_database: str, without_standby: None, level: str
) -> None:
    token = new_token()
    quiet = extensions.make_dsn(crashable_database, options=f"-c client_min_messages={level}")
    policy = ResolverPolicy(limits=Limits(deadline_s=0.3), first_pause_s=0.01)
    with closing(producer(quiet)) as connection, closing(TokenResolver(quiet, policy=policy)) as by:
        insert_token(connection, token, [LOG])
        outcomes = list[bool]()
        committing = threading.Thread(
            target=lambda: outcomes.append(guarded_commit(connection, token))
        )
        committing.start()
        wait_for_backend(crashable_postgres, backend_pid(connection), "wait_event = 'SyncRep'")
        crashable_postgres.execute(f"SELECT pg_cancel_backend({backend_pid(connection)})")
        committing.join()
        assert outcomes == [False]
        assert rows(quiet, "SHOW client_min_messages") == [(level,)]
        check = check_of(crashable_database, token)
        wait_until(lambda: "synchronous standby" in by.resolve([check])[0].reason)
        assert verdict(by, check) is Decision.UNKNOWN


def test_nothing_is_decided_that_a_synchronous_standby_has_not_confirmed(
    crashable_postgres: OwnServer, crashable_database: str, without_standby: None
) -> None:
    token, gone = new_token(), new_token()
    check, nothing = check_of(crashable_database, token), check_of(crashable_database, gone)
    policy = ResolverPolicy(limits=Limits(deadline_s=0.3), first_pause_s=0.01)
    with (
        closing(producer(crashable_database)) as connection,
        closing(TokenResolver(crashable_database, policy=policy)) as resolver,
    ):
        insert_token(connection, token, [LOG])
        outcomes = list[bool]()
        committing = threading.Thread(
            target=lambda: outcomes.append(guarded_commit(connection, token))
        )
        committing.start()
        wait_for_backend(crashable_postgres, backend_pid(connection), "wait_event = 'SyncRep'")
        assert [answer.verdict for answer in resolver.resolve([check, nothing])] == [
            Decision.UNKNOWN
        ] * 2
        crashable_postgres.execute(f"SELECT pg_cancel_backend({backend_pid(connection)})")
        committing.join()
        assert outcomes == [False]
        wait_until(lambda: "synchronous standby" in resolver.resolve([check])[0].reason)
        assert verdict(resolver, check) is Decision.UNKNOWN
        set_standby(crashable_postgres, "TO DEFAULT")
        wait_until(lambda: verdict(resolver, check) is Decision.COMMIT)
        wait_until(lambda: verdict(resolver, nothing) is Decision.ROLLBACK)
