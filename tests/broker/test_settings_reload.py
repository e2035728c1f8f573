"""Settings that a running broker takes over, and those that wait for a start."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.broker.support import BrokerInMemory
from tests.cli.support import reply
from txmq.config.broker import load_broker
from txmq.errors import BadRequest
from txmq.model.message import Message
from txmq.testing.processes import running
from txmq.testing.wait import wait_until

FILE = """
[broker]
data = "{data}"
listen = "127.0.0.1:0"
partitions = {partitions}
[retention]
letters_hours = {hours}
every_s = {hours}
[alarms]
undecided_s = {hours}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "txmq.toml"
    _write(path)
    return path


def _write(path: Path, *, hours: int = 1, partitions: int = 8) -> None:
    path.write_text(FILE.format(data=path.parent / "data", hours=hours, partitions=partitions))


def test_what_may_change_is_in_force_and_the_rest_is_named(file: Path) -> None:
    broker = BrokerInMemory(settings=load_broker(file, {}))
    broker.assembly.reloading.load = lambda: load_broker(file, {})
    assert broker.ask("broker.reload") == {"changed": [], "restart": []}
    _write(file, hours=2, partitions=4)
    shown = broker.ask("broker.reload")
    assert shown == {
        "changed": ["alarms.undecided_s", "retention.letters_hours"],
        "restart": ["broker.partitions", "retention.every_s"],
    }
    assert broker.ask("broker.reload") == {
        "changed": [],
        "restart": ["broker.partitions", "retention.every_s"],
    }
    with file.open("a") as written:
        written.write('[tls]\ncert = "a"\nkey = "b"\n[[resolver]]\nname = "shop"\ndsn = "host=x"\n')
    restart = broker.ask("broker.reload")["restart"]
    assert restart == ["broker.partitions", "tls", "retention.every_s", "resolver"]


def test_an_alarm_goes_by_its_new_limit(file: Path) -> None:
    broker = BrokerInMemory(settings=load_broker(file, {}))
    broker.assembly.reloading.load = lambda: load_broker(file, {})
    broker.half(1, Message(b"x"))
    broker.pass_time(90)
    assert "transaction.oldest_undecided" in _alarms(broker)
    _write(file, hours=600)
    broker.ask("broker.reload")
    assert "transaction.oldest_undecided" not in _alarms(broker)


def _alarms(broker: BrokerInMemory) -> set[str]:
    return {one["name"] for one in broker.ask("broker.alarms")["alarms"]}


@pytest.mark.parametrize("text", ["[broker", "[retention]\nhours = -1\n"])
def test_a_file_with_a_mistake_changes_nothing(file: Path, text: str) -> None:
    broker = BrokerInMemory(settings=load_broker(file, {}))
    broker.assembly.reloading.load = lambda: load_broker(file, {})
    file.write_text(text)
    refused = broker.ask("broker.reload")
    assert type(refused) is BadRequest
    assert str(file) in f"{refused.message} {refused.hint}"


def test_a_broker_without_a_file_says_so() -> None:
    refused = BrokerInMemory().ask("broker.reload")
    assert (type(refused), refused.hint) == (BadRequest, "start it with --config FILE")


def test_a_process_takes_over_its_file_on_sighup(file: Path, tmp_path: Path) -> None:
    with running(tmp_path, "broker", "--config", str(file)) as process:
        url = process.first_line().removeprefix("ready ")
        _write(file, hours=3)
        os.kill(process.process.pid, signal.SIGHUP)
        wait_until(
            lambda: any(event["event"] == "settings.reloaded" for event in process.events()),
            what="the reload",
        )
        shown = reply("config", "reload", broker=url)
    assert shown == {"changed": [], "restart": ["retention.every_s"]}
