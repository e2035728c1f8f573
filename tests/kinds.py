"""Which tests `make test` runs, and which it leaves to `make deep`.

`make test` has to end within eight minutes on two cores. It needs no program of the
machine, and no package that only a framework needs. A test is deep if DEEP has its
folder, its file, its function or itself, unless STORIES have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import PurePosixPath
from typing import Final

# For each kind of thing that users have: one story of it, from end to end.
STORIES: Final = {
    "a producer killed at a crash point": (
        "tests/system/test_transaction_kills.py::test_services_killed_at_every_crash_point"
    ),
    "a broker killed under load": (
        "tests/system/test_broker_kill.py"
        "::test_a_broker_killed_under_load_keeps_all_acknowledged_messages"
    ),
    "consumers with an inbox killed in their handlers": (
        "tests/system/test_inbox_end_to_end.py::test_consumers_killed_in_their_handlers[concurrent]"
    ),
    "a handler that ends the transaction of its message": (
        "tests/client/blocking/test_inbox_misuse.py"
        "::test_a_handler_that_ends_the_transaction_of_its_message_has_failed"
        "[psycopg2-with_connection-False]"
    ),
    "an XA transaction cut in two": (
        "tests/client/blocking/test_xa_crashes.py::test_a_coordinator_that_dies_anywhere"
        "_leaves_rows_and_messages_that_recovery_makes_agree[None]"
    ),
    "a local store over a restart": (
        "tests/client/faces/test_local_store.py"
        "::test_the_next_process_goes_on_with_what_is_stored[blocking]"
    ),
    "a page of the console": (
        "tests/admin/test_letter_pages.py::test_a_letter_shows_its_life_and_pages_go_on"
    ),
    "a service of the examples, killed and stopped": (
        "tests/demo/test_five_services.py::test_a_killed_payment_charges_once_and_ends_in_order"
    ),
    "letters reconciled and replayed by Spark": (
        "tests/spark/test_reconcile.py::test_a_plan_is_replayed_once_by_the_command"
    ),
}
DEEP: Final = {
    "Spark, in a Java machine": (
        "tests/spark",
        "tests/test_java.py",
        "tests/test_java_archive.py",
    ),
    "frameworks, by their packages": (
        "tests/frameworks",
        "tests/broker/monitoring/test_spans.py",
        "tests/client/aio/test_sqlalchemy.py",
        "tests/client/blocking/test_conformance.py",
        "tests/client/blocking/test_django.py",
        "tests/client/blocking/test_frameworks.py",
        "tests/client/blocking/test_green_threads.py",
        "tests/client/blocking/test_sqlalchemy.py",
        "tests/client/test_document_examples.py",
        "tests/client/test_phantom.py",
        "tests/client/test_telemetry.py",
        "tests/test_public_names.py",
    ),
    "programs of the machine": (
        "tests/admin/test_console.py",
        "tests/admin/test_monitoring_files.py",
        "tests/broker/cluster/test_failover.py",
        "tests/broker/cluster/test_kafka.py",
        "tests/broker/cluster/test_upgrade.py",
        "tests/client/blocking/test_pgbouncer.py",
        "tests/tx/postgres/test_pgbouncer.py",
        "tests/test_browser.py",
        "tests/test_deployment.py",
    ),
    "packages, benchmarks and other tools": (
        "tests/checkers",
        "tests/test_bench_against.py",
        "tests/test_bench_harness.py",
        "tests/test_bench_letters.py",
        "tests/test_bench_yardsticks.py",
        "tests/test_debian_package.py",
        "tests/test_extras.py",
        "tests/test_packaging.py",
        "tests/testing/test_plugin.py",
    ),
    "processes killed in series, and long lives": (
        "tests/demo",
        "tests/system",
        "tests/broker/cluster/test_copies.py",
        "tests/broker/cluster/test_frozen_leader.py",
        "tests/broker/cluster/test_operated_nodes.py",
        "tests/broker/cluster/test_replaced_nodes.py",
        "tests/client/aio/test_kills.py",
        "tests/client/blocking/test_inbox_identity.py",
        "tests/client/blocking/test_inbox_resets.py",
        "tests/client/blocking/test_local_store_kills.py",
        "tests/client/blocking/test_process_end.py",
        "tests/client/blocking/test_restored_log.py",
        "tests/client/blocking/test_spool_kills.py",
        "tests/recover/test_copied_database.py",
        "tests/recover/test_killed_recoverers.py",
        "tests/recover/test_several_recoverers.py",
        "tests/relay/test_relay.py",
        "tests/relay/test_restored_database.py",
    ),
    "every place, many seeds, and races": (
        "tests/broker/requests/test_changes_between_steps.py::test_reads_end_whatever_changes",
        "tests/broker/data_directory/test_index_crash.py",
        "tests/client/aio/test_inbox_misuse.py",
        (
            "tests/client/blocking/test_caller_misuse.py::"
            "test_they_agree_however_the_transaction_begins_and_ends"
        ),
        "tests/client/blocking/test_inbox_misuse.py",
        (
            "tests/client/blocking/test_xa_misuse.py::"
            "test_they_agree_however_the_branch_begins_and_ends"
        ),
        "tests/core/consumers/test_simulation.py",
        "tests/recover/local/test_crash.py",
        "tests/recover/spool/test_spool_simulation.py",
        (
            "tests/simulation/test_replicas.py::"
            "test_a_planted_bug_of_replicas_is_found[forgets_what_snapshots_need]"
        ),
        "tests/simulation/test_simulation.py::test_every_invariant_holds_for_every_seed",
        "tests/simulation/test_simulation.py::test_every_invariant_holds_with_slow_handlers",
        "tests/store/index/test_environment.py",
        "tests/store/index/test_lmdb_tables.py::TestBeside::runTest",
        "tests/tx/postgres/test_inbox_compaction_race.py",
        "tests/tx/postgres/test_token_fence.py",
    ),
}
_DEEP: Final = frozenset(place for places in DEEP.values() for place in places)
_QUICK: Final = frozenset(STORIES.values())
_WITH_STORIES: Final = frozenset(story.partition("::")[0] for story in _QUICK)


def is_deep(test: str) -> bool:
    """Return whether a test, or all tests of a file, are left to `make deep`."""
    return _QUICK.isdisjoint(places := set(_places(test))) and not _DEEP.isdisjoint(places)


def is_needed(file: str) -> bool:
    """Return whether `make test` needs the file of tests."""
    return file in _WITH_STORIES or not is_deep(file)


def _places(test: str) -> Iterator[str]:
    """Yield the folders, the file and the function of a test, and the test."""
    yield from _folders_and_file(test.partition("::")[0])
    yield from (test.partition("[")[0], test)


@cache
def _folders_and_file(file: str) -> tuple[str, ...]:
    return (*map(str, PurePosixPath(file).parents), file)
