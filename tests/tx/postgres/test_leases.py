"""Fault 98: only one of several copies of a broker's data works on a database."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Never
from uuid import UUID, uuid4

import pytest

from tests.tx.postgres.support import check_of, identity_of, new_token, rows
from txmq.broker.data_directory.directory_id import NAME, directory_id
from txmq.broker.data_directory.stored_reports import StoredReports
from txmq.model.decider import DatabaseId
from txmq.model.message import ROLLBACK, UNKNOWN
from txmq.tx.postgres.blocking import enqueue, may_have_reported
from txmq.tx.postgres.brokers import DatabaseLease, registered, take_over
from txmq.tx.postgres.outbox import NewOutboxRow, SetAside
from txmq.tx.postgres.resolver import TokenResolver
from txmq.tx.postgres.session import connect

DIRECTORY, COPY = uuid4(), uuid4()


def resolver_of(
    database: str, log_id: UUID, boot_epoch: int, directory: UUID, data: Path | None = None
) -> TokenResolver:
    """Return the resolver of a broker that has just started.

    It remembers its reports in `data`.
    """
    lease = DatabaseLease(log_id, directory, boot_epoch)
    memory = None if data is None else StoredReports(data)
    resolver = TokenResolver(database, lease=lease, memory=memory)
    resolver.maintain(log_id, "b-1", lambda _database: None)
    return resolver


def works(database: str, resolver: TokenResolver) -> bool:
    """Return whether the resolver fences a token and fetches from the outbox."""
    assert resolver.lease is not None
    log_id, token = resolver.lease.log_id, new_token()
    with closing(connect(database, application_name="test")) as connection:
        enqueue(connection, [NewOutboxRow(log_id, token, None, "s", 1, [], b"content")])
    [answer] = resolver.resolve([check_of(database, token)._replace(log_id=log_id)])
    fetched = resolver.fetch(log_id, [], SetAside())
    fenced = rows(database, "SELECT FROM public.txmq_token WHERE tok = %s", str(token))
    if answer.verdict is UNKNOWN:
        assert (fetched, fenced, resolver.holds_lease) == (None, [], False)
        assert answer.reason == resolver.refusal != ""
        return False
    assert (answer.verdict, len(fenced), resolver.holds_lease) == (ROLLBACK, 1, True)
    assert fetched
    return True


def test_a_restart_takes_the_lease_with_it_at_once(database: str) -> None:
    log_id = uuid4()
    for boot_epoch in (3, 4, 9):
        with closing(resolver_of(database, log_id, boot_epoch, DIRECTORY)) as resolver:
            assert works(database, resolver)
    with closing(connect(database, application_name="test")) as connection:
        [found] = registered(connection)
        assert (found.boot_epoch, found.directory) == (9, str(DIRECTORY))
        assert may_have_reported(connection, log_id, 9)
        assert not may_have_reported(connection, log_id, 10)


def test_a_copied_directory_gets_the_lease_by_an_operators_word_only(database: str) -> None:
    log_id = uuid4()
    with (
        closing(resolver_of(database, log_id, 3, DIRECTORY)) as original,
        closing(resolver_of(database, log_id, 4, COPY)) as copied,
    ):
        assert works(database, original)
        assert not works(database, copied)
        assert f"--take-over {log_id} --directory {COPY}" in copied.refusal
        assert works(database, original)
        with closing(connect(database, application_name="test")) as connection:
            take_over(connection, log_id, COPY, "the original is lost")
        assert works(database, copied)
        assert not works(database, original)


def test_a_restored_directory_in_an_earlier_boot_epoch_gets_no_lease(database: str) -> None:
    log_id = uuid4()
    with (
        closing(resolver_of(database, log_id, 7, DIRECTORY)) as later,
        closing(resolver_of(database, log_id, 5, DIRECTORY)) as earlier,
    ):
        assert not works(database, earlier)
        assert "is in boot epoch 5, and was in 7" in earlier.refusal
        assert works(database, later)
        with closing(connect(database, application_name="test")) as connection:
            take_over(connection, log_id, DIRECTORY, "restored from Tuesday")
        assert works(database, earlier)


@pytest.mark.parametrize("change", ["UPDATE public.txmq_broker SET reports = 1", "DELETE"])
def test_a_database_without_the_last_report_is_taken_for_a_copy(database: str, change: str) -> None:
    log_id = uuid4()
    with closing(resolver_of(database, log_id, 3, DIRECTORY)) as resolver:
        resolver.maintain(log_id, "b-1", lambda _database: None)
        assert works(database, resolver)
        rows(database, change if change != "DELETE" else "DELETE FROM public.txmq_broker")
        assert not works(database, resolver)
        assert "it is a copy" in resolver.refusal
        with closing(connect(database, application_name="test")) as connection:
            take_over(connection, log_id, DIRECTORY, "a failover has lost commits")
        assert works(database, resolver)


def test_a_report_is_remembered_when_the_broker_starts_anew(database: str, tmp_path: Path) -> None:
    log_id = uuid4()

    def start(boot_epoch: int) -> TokenResolver:
        return resolver_of(database, log_id, boot_epoch, DIRECTORY, tmp_path)

    with closing(start(1)) as resolver:
        assert works(database, resolver)
        resolver.confirm()
    with closing(start(2)) as resolver:
        assert works(database, resolver)
    rows(database, "UPDATE public.txmq_broker SET reports = 2")  # a copy made before
    with closing(start(3)) as resolver:
        assert not works(database, resolver)
        assert "holds 2 reports of this broker, which has written 3" in resolver.refusal


def test_of_two_clones_of_a_data_directory_the_first_works(database: str, tmp_path: Path) -> None:
    """They have one directory id and one boot epoch, as clones of a volume do."""
    log_id, data, clone = uuid4(), tmp_path / "data", tmp_path / "clone"
    data.mkdir()

    def start(data: Path, boot_epoch: int) -> TokenResolver:
        return resolver_of(database, log_id, boot_epoch, DIRECTORY, data)

    with closing(start(data, 1)) as resolver:
        assert works(database, resolver)
    shutil.copytree(data, clone)
    with closing(start(data, 2)) as first, closing(start(clone, 2)) as second:
        assert works(database, first)
        assert not works(database, second)
        assert "was restored, or a clone of it runs" in second.refusal
        first.confirm()
        first.confirm()
    with closing(start(clone, 3)) as later, closing(start(data, 3)) as first:
        assert not works(database, later)
        assert works(database, first)
        with closing(connect(database, application_name="test")) as connection:
            take_over(connection, log_id, DIRECTORY, "the clone goes on")
        assert works(database, later)
        assert not works(database, first)


def test_a_backup_that_is_killed_at_each_try_gets_no_lease(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_id, data, backup = uuid4(), tmp_path / "data", tmp_path / "backup"
    data.mkdir()
    with closing(resolver_of(database, log_id, 1, DIRECTORY, data)) as resolver:
        assert works(database, resolver)
        shutil.copytree(data, backup)
        resolver.confirm()
        resolver.confirm()

    def killed(*_args: object) -> Never:
        raise SystemExit

    for epoch in range(2, 5):
        with monkeypatch.context() as patch:
            patch.setattr("txmq.tx.postgres.resolver.report_with_lease", killed)
            with pytest.raises(SystemExit):
                resolver_of(database, log_id, epoch, DIRECTORY, backup)
    with closing(resolver_of(database, log_id, 5, DIRECTORY, backup)) as resolver:
        assert not works(database, resolver)


@pytest.mark.parametrize("stored", [False, True])
def test_a_report_of_unknown_outcome_locks_nobody_out(
    database: str, tmp_path: Path, *, stored: bool
) -> None:
    log_id = uuid4()

    def start(boot_epoch: int) -> TokenResolver:
        return resolver_of(database, log_id, boot_epoch, DIRECTORY, tmp_path)

    for epoch in range(1, 4):
        with closing(start(epoch)) as resolver:
            assert works(database, resolver)
            found, memory = identity_of(database), StoredReports(tmp_path)
            of = DatabaseId(found.system_id, found.database_oid)
            memory.put(of, memory.get(of).begun())  # then it was killed
            if stored:
                rows(
                    database,
                    "UPDATE public.txmq_broker SET reports = reports + 1,"
                    " directory_reports = directory_reports + 1",
                )


def test_nothing_is_done_before_the_broker_has_reported(database: str) -> None:
    lease = DatabaseLease(uuid4(), DIRECTORY, 3)
    with closing(TokenResolver(database, lease=lease)) as resolver:
        assert not works(database, resolver)
        resolver.maintain(lease.log_id, "b-1", lambda _database: None)
        assert works(database, resolver)


def test_a_broker_of_an_older_version_leaves_its_row_to_the_first_that_comes(
    database: str,
) -> None:
    log_id = uuid4()
    insert = "INSERT INTO public.txmq_broker (log_id, name, reported_at) VALUES (%s, 'b-1', now())"
    rows(database, insert, str(log_id))
    with closing(resolver_of(database, log_id, 3, DIRECTORY)) as resolver:
        assert works(database, resolver)


def test_a_directory_keeps_its_id_and_a_copy_has_another(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    known = directory_id(data)
    assert directory_id(data) == known
    shutil.copytree(data, tmp_path / "copy")
    assert directory_id(tmp_path / "copy") not in (known, None)
    assert directory_id(data.rename(tmp_path / "moved")) == known
    (tmp_path / "moved" / NAME).write_text("torn")
    assert directory_id(tmp_path / "moved") != known
