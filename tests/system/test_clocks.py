"""A broker's machine whose clock is days ahead: for a moment, or at a start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg2
import pytest

import txmq
from tests.cli.support import reply, run
from tests.system import set_clock_broker
from txmq.model.units import DAY
from txmq.testing.processes import Running, running
from txmq.testing.wait import wait_until

AHEAD = 30 * DAY
SETTINGS = """
[[resolver]]
name = "shop"
dsn = "{dsn}"
[retention]
hours = 240
every_s = 0.1
"""


class ClockedBroker:
    """A broker, the clock of its machine, and a service with a database."""

    def __init__(self, directory: Path, dsn: str) -> None:
        self._directory, self._dsn = directory, dsn
        self._wrong, self._config = directory / "wrong", directory / "broker.toml"
        self._config.write_text(SETTINGS.format(dsn=dsn), "utf-8")
        self.set_clock(0)
        self.url = ""

    def set_clock(self, wrong: int) -> None:
        """Let the machine's clock be wrong by so many microseconds."""
        new = self._wrong.with_suffix(".new")
        new.write_text(str(wrong), "utf-8")
        new.rename(self._wrong)

    @contextmanager
    def serving(self) -> Iterator[Running]:
        where = ("--config", str(self._config), "--data", str(self._directory / "data"))
        command = ("broker", "--create-topics", *where, "--listen", "127.0.0.1:0")
        with running(
            self._directory, str(self._wrong), *command, command=set_clock_broker.run
        ) as process:
            self.url = process.first_line().removeprefix("ready ")
            yield process
            assert process.terminate() == 0

    def commit(self, *bodies: str) -> None:
        """Commit a transaction with these messages."""
        with (
            closing(psycopg2.connect(self._dsn)) as connection,
            txmq.connect(self.url, service="shop") as client,
            client.transaction(connection) as transaction,
        ):
            for body in bodies:
                transaction.send("t", body.encode(), key="k")

    def bodies(self) -> list[str]:
        return [line["body"] for line in reply("tail", "t", "--no-follow", broker=self.url)]

    def alarms(self) -> set[str]:
        with txmq.connect(self.url) as client:
            return {alarm["name"] for alarm in client.call("broker.alarms")["alarms"]}

    def pass_retention(self) -> None:
        """Wait until retention has gone round with the clock as it is."""
        with txmq.connect(self.url) as client:
            before = client.call("clock.show")["broker_at"]
            wait_until(
                lambda: client.call("clock.show")["broker_at"] > before + 500_000,
                what="some rounds of retention",
            )


@pytest.fixture
def machine(database: str, tmp_path: Path) -> ClockedBroker:
    return ClockedBroker(tmp_path, database)


def test_a_broker_whose_clock_is_days_ahead_for_a_moment_loses_and_refuses_nothing(
    machine: ClockedBroker,
) -> None:
    with machine.serving():
        machine.commit("1")
        machine.set_clock(AHEAD)
        wait_until(lambda: "clock.jumped" in machine.alarms(), what="an alarm")
        machine.commit("2")
        machine.pass_retention()
        machine.set_clock(0)
        wait_until(lambda: not machine.alarms(), what="an end of the alarms")
        machine.commit("3")
    with machine.serving():
        machine.commit("4")
        machine.pass_retention()
        assert machine.bodies() == ["1", "2", "3", "4"]
        assert machine.alarms() == set()


def test_a_broker_that_starts_days_ahead_loses_and_refuses_nothing(machine: ClockedBroker) -> None:
    with machine.serving():
        machine.commit("1")
    machine.set_clock(AHEAD)
    with machine.serving():
        assert machine.alarms() >= {"clock.doubted"}
        machine.commit("2")
        machine.pass_retention()
    with machine.serving():  # a restart ends no doubt
        assert machine.alarms() >= {"clock.doubted"}
        machine.pass_retention()
    machine.set_clock(0)
    with machine.serving():
        wait_until(lambda: machine.alarms() >= {"clock.jumped", "clock.doubted"}, what="the alarms")
        machine.commit("3")
        machine.pass_retention()
        assert run("clock", "--broker", machine.url).exit_code == 1
        shown = reply("clock", "--confirm", "--reason", "looked at it", broker=machine.url)
        assert shown["believed"]
        assert abs(shown["broker_at"] - shown["machine_at"]) < DAY
        machine.commit("4")
        wait_until(lambda: not machine.alarms(), what="an end of the alarms")
        assert machine.bodies() == ["1", "2", "3", "4"]
    with machine.serving():
        machine.commit("5")
        assert machine.alarms() == set()
