"""The PostgreSQL servers of the tests: started, crashed, restarted and removed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

import txmq.testing.postgres_server as subject
from tests.tx.postgres.support import rows
from txmq.errors import ConfigError, DatabaseUnavailable, DirectoryInUse
from txmq.testing.postgres_binaries import Binaries, bundled, find_binaries
from txmq.testing.postgres_server import OwnServer, PostgresServer, any_server
from txmq.testing.wait import wait_until


@pytest.fixture
def own_directory() -> Path:
    # Not tmp_path: the user that the server runs as has no way into pytest's
    # directories.
    return Path(tempfile.mkdtemp(prefix=subject.PREFIX))


@pytest.mark.parametrize("way", ["fast", "immediate", "killed"])
def test_committed_rows_survive_a_restart(crashable_postgres: OwnServer, way: str) -> None:
    dsn = crashable_postgres.dsn(crashable_postgres.create_database())
    rows(dsn, "CREATE TABLE t AS SELECT 7 AS n")
    if way == "killed":
        crashable_postgres.kill_server()
        crashable_postgres.start()
    else:
        crashable_postgres.restart("fast" if way == "fast" else "immediate")
    assert rows(dsn, "SELECT n FROM t") == [(7,)]


def test_a_killed_server_leaves_no_process_behind(crashable_postgres: OwnServer) -> None:
    busy = crashable_postgres.connect()
    [(postmaster,)] = rows(
        crashable_postgres.dsn(),
        "SELECT split_part(pg_read_file('postmaster.pid'), E'\\n', 1)::int",
    )
    crashable_postgres.kill_server()
    for pid in (busy.info.backend_pid, postmaster):
        assert not Path(f"/proc/{pid}/cwd").exists()
    busy.close()
    crashable_postgres.start()


def test_killing_a_backend_ends_the_others_and_the_server_recovers(
    crashable_postgres: OwnServer,
) -> None:
    victim, other = crashable_postgres.connect(), crashable_postgres.connect()
    crashable_postgres.kill_backend(victim.info.backend_pid)
    wait_until(
        lambda: not Path(f"/proc/{other.info.backend_pid}/cwd").exists(),
        what="the other backend is gone",
    )
    wait_until(crashable_postgres.accepts_connections, what="the server accepts connections")
    victim.close()
    other.close()


def test_a_directory_keeps_its_server_and_one_owner(own_directory: Path) -> None:
    with OwnServer(own_directory).start() as first:
        rows(first.dsn(), "CREATE TABLE t AS SELECT 7 AS n")
        with pytest.raises(DirectoryInUse):
            OwnServer(own_directory)
    with OwnServer(own_directory, temporary=True).start() as second:
        assert rows(second.dsn(), "SELECT n FROM t") == [(7,)]
        second.stop()
        assert not own_directory.exists()


def test_an_abandoned_temporary_server_is_removed(own_directory: Path) -> None:
    abandoned = OwnServer(own_directory).start()
    pid = abandoned._process.pid if abandoned._process else 0
    abandoned._lock.close()  # what the kernel does when its owner is killed
    os.utime(own_directory, (0, 0))
    subject._remove_abandoned(own_directory.parent)
    # another run may have begun to remove it just before
    wait_until(lambda: not own_directory.exists(), what="its directory is gone")
    wait_until(lambda: not Path(f"/proc/{pid}/cwd").exists(), what="its process is gone")
    abandoned.stop()


def test_the_bundled_server_runs_where_none_is_installed(
    own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_bundled(copies: Path, *, major: int | None = None) -> Binaries:
        return next(bundled(copies))

    monkeypatch.setattr(subject, "find_binaries", only_bundled)
    with OwnServer(own_directory, temporary=True).start() as server:
        assert rows(server.dsn(), "SHOW max_prepared_transactions") == [("64",)]
        server.kill_server()
        server.start()
        assert rows(server.dsn(), "SHOW fsync") == [("on",)]  # unless one says otherwise


def test_an_inaccessible_package_of_programs_is_copied(
    own_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import txmq.testing.postgres_binaries as binaries

    own_directory.chmod(0o755)
    within_reach = binaries._major
    monkeypatch.setattr(
        binaries, "_major", lambda place: own_directory in place.parents and within_reach(place)
    )
    found = next(bundled(own_directory))
    assert own_directory in found.directory.parents
    assert found.major >= binaries.OLDEST
    shutil.rmtree(own_directory)


def test_a_configured_server_is_used_and_left_as_it_was(postgres: PostgresServer) -> None:
    with any_server({"TXMQ_TEST_DSN": postgres.dsn()}) as given:
        name = given.create_database()
        assert rows(given.dsn(name), "SELECT current_database()") == [(name,)]
    assert rows(postgres.dsn(), "SELECT FROM pg_database WHERE datname = %s", name) == []


def test_the_version_of_existing_data_decides_which_server_is_used(own_directory: Path) -> None:
    with pytest.raises(ConfigError, match="no server of PostgreSQL 9"):
        find_binaries(own_directory, major=9)
    own_directory.rmdir()


def test_a_start_that_fails_says_why_and_frees_the_directory(own_directory: Path) -> None:
    with pytest.raises(DatabaseUnavailable, match="no_such_setting"):
        OwnServer(own_directory, settings={"no_such_setting": "1"}).start()
    OwnServer(own_directory, temporary=True).stop()
