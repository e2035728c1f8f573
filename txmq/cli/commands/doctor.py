"""`txmq doctor`: checks of what a broker depends on, whether it runs or not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from txmq.cli.command import local_command
from txmq.cli.options import DataDir, SettingsPath, offline_settings
from txmq.cli.output import FAILED, Output

if TYPE_CHECKING:
    from txmq.cli.doctor.check_result import CheckResult
    from txmq.config.broker import SettingsFile

app = typer.Typer()


@local_command(app, "doctor", example="txmq doctor --config /etc/txmq/broker.toml")
def doctor(out: Output, *, data: DataDir = None, config: SettingsPath = None) -> None:
    """Check the machine and the disk of a broker, running or not, and with --config its
    databases and TLS. Exit status 1: something does not work.
    """
    from txmq.cli.doctor.check_result import Health

    results = list(_check_all(offline_settings(data, config)))
    failed = any(result.health is Health.FAILURE for result in results)
    out.show({"healthy": not failed, "checks": [result._asdict() for result in results]})
    if failed:
        raise typer.Exit(FAILED)


def _check_all(settings: SettingsFile) -> Iterator[CheckResult]:
    from txmq.cli.doctor.database import check_database
    from txmq.cli.doctor.machine import check_disk, check_machine
    from txmq.cli.doctor.tls import check_tls

    yield from check_machine()
    yield from check_disk(settings.broker.data, settings.disk)
    yield from check_tls(settings)
    for (name, dsn), uses in _databases(settings).items():
        yield from check_database(dsn, name, frozenset(uses))


def _databases(settings: SettingsFile) -> dict[tuple[str, str], set[str]]:
    """Return the databases of the settings, each once, with what they are for."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for resolver in settings.resolver:
        found[resolver.name, resolver.dsn].add("resolver")
    for database in settings.xa.database:
        found[database.name, database.dsn].add("xa")
    if settings.relay is not None:
        names = {dsn: name for name, dsn in found}
        found[names.get(settings.relay.dsn, "relay"), settings.relay.dsn].add("relay")
    return found
