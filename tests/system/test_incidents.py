"""Eleven incidents of an operator, ended with the command line alone.

At each step, what the commands show is what is so, and an alarm or a hint leads on.
Brokers, consumers and producers are processes of their own.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from signal import SIGKILL
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import Result

import txmq
from tests.certificates import Authority
from tests.cli.support import run
from txmq.client.protocol import conversation
from txmq.model.units import HOUR
from txmq.testing.forked import run_source
from txmq.testing.own_broker import OwnBroker
from txmq.testing.ports import free_port
from txmq.testing.processes import Running, running, whole_lines
from txmq.testing.wait import PATIENCE_S, wait_until

SETTINGS = """
[consumers]
lost_connection_grace_s = 0.1
[alarms]
fence_s = 0.5
store_owner_s = 0.5
"""
# Fails with each message whose body has the text of the file `broken`, and writes down
# the others.
SERVICE = """
import json, sys
from pathlib import Path
import txmq

url, group, directory, options = sys.argv[1:]
broken, done = Path(directory, "broken"), Path(directory, "done").open("a", buffering=1)
options = json.loads(options)
options["retry"] = txmq.RetryPolicy(**options["retry"])

def handle(message):
    body = message.body.decode()
    if broken.exists() and broken.read_text() in body:
        raise ValueError("no such order")
    done.write(body + "\\n")

with txmq.connect(url, service=group) as client:
    with client.consumer(group, topics=["orders"], **options) as consumer:
        print("ready", flush=True)
        consumer.run(handle)
"""
SPOOLING = """
import sys, time
import txmq

with txmq.connect(sys.argv[1], service="shop", spool=sys.argv[2], timeout=0.2) as client:
    for number in range(5):
        assert client.send("orders", b"%d" % number, key="k").spooled
    print("spooled", flush=True)
    time.sleep(3_600)
"""


@dataclass
class Operator:
    """Somebody who has commands, and the address of a broker."""

    url: str
    directory: Path  # of services

    def run(self, *words: str) -> Result:
        """Run a command, as a process that has met no broker before."""
        with patch.multiple(conversation, _newest_epochs={}, _incarnations={}):
            return run(*words, "--broker", self.url)

    def shown(self, *words: str, status: int = 0) -> str:
        """Return what a command prints for people."""
        result = self.run(*words)
        assert result.exit_code == status, result.stdout + result.stderr
        return result.stdout + result.stderr

    def told(self, *words: str, status: int = 0) -> Any:
        """Return what a command tells programs."""
        result = self.run(*words, "--json")
        assert result.exit_code == status, result.stdout + result.stderr
        return json.loads(result.stdout or result.stderr)

    def alarms(self) -> dict[str, dict[str, Any]]:
        """Return the alarms by their names, of which the exit status tells."""
        result = self.run("alarms", "--json")
        raised = {one["name"]: one for one in json.loads(result.stdout)["alarms"]}
        assert result.exit_code == bool(raised)
        return raised

    def alarm(self, name: str) -> dict[str, Any]:
        """Wait for an alarm."""
        wait_until(lambda: name in self.alarms(), what=f"alarm {name}")
        return self.alarms()[name]

    def quiet(self) -> None:
        """Wait until no alarm holds."""
        wait_until(lambda: not self.alarms(), what="the end of all alarms")
        assert self.shown("alarms") == "no alarms\n"

    def group(self, **expected: int) -> None:
        """Wait until the list of groups has these numbers of the only one."""

        def found() -> dict[str, int]:
            [row] = self.told("group", "list")["groups"]
            return {name: row[name] for name in expected}

        wait_until(lambda: found() == expected, what=f"{expected}")

    def send(self, bodies: dict[str, int], first: int = 0) -> None:
        """Have so many messages of each key sent, in turns, with numbers."""
        with txmq.connect(self.url, service="shop", timeout=PATIENCE_S) as client:
            if not client.call("topic.list")["topics"]:
                client.call("topic.create", name="orders", partitions=1)
            for number in range(max(bodies.values())):
                for key in [key for key in bodies if number < bodies[key]]:
                    client.send("orders", f"{key} {first + number}".encode(), key=key)

    def done(self) -> list[str]:
        """Return the bodies that services have processed, in this order."""
        return whole_lines(self.directory / "done")

    def break_for(self, text: str) -> None:
        """Have services fail with the messages that have this text."""
        (self.directory / "broken").write_text(text)

    def mend(self) -> None:
        (self.directory / "broken").unlink()

    @contextmanager
    def service(self, group: str = "billing", **options: Any) -> Iterator[Running]:
        """Run a consumer for the block, without an end of its own."""
        retry = {"delays": [0.05], "retries": 0}
        given = json.dumps({"retry": retry, "mode": "ordered", "flood_keys": 0} | options)
        place = self.directory / f"process-{options.get('member', group)}"
        arguments = (SERVICE, self.url, group, str(self.directory), given)
        with running(place, *arguments, command=run_source) as process:
            process.first_line()
            yield process


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    with OwnBroker(tmp_path / "broker", SETTINGS) as broker:
        yield Operator(broker.url, tmp_path)


def in_order(bodies: list[str]) -> bool:
    """Return whether the bodies of each key have come in their order."""
    by_key = groupby(sorted(bodies, key=lambda body: body.split()[0]), lambda b: b.split()[0])
    return all(one == sorted(one) for one in (list(of_key) for _key, of_key in by_key))


def test_1_all_at_once_become_dead_letters(operator: Operator) -> None:
    """Nothing is left to deliver, and nothing was processed."""
    operator.send({f"k{number}": 10 for number in range(20)})
    operator.break_for("")
    with operator.service():
        operator.group(unprocessed=200, letters=20, parked=180, unsettled=0)
        alarm = operator.alarm("group.letters")
        assert "group billing: 20, by error: ValueError" in alarm["text"]
        assert "(20); keys that stand behind letters or retries: 20, as orders/0/" in alarm["text"]
        assert "txmq dlq stats billing" in alarm["action"]
        [kind] = operator.told("dlq", "stats", "billing")["fingerprints"]
        assert (kind["error_type"], kind["letters"]) == ("ValueError", 20)
        assert operator.done() == []
        operator.mend()
        operator.told("dlq", "replay", "billing", "--all", "--reason", "mended")
        operator.group(unprocessed=0, letters=0, parked=0)
        operator.quiet()
    assert len(operator.done()) == 200
    assert in_order(operator.done())


def test_2_the_host_of_a_consumer_is_lost(operator: Operator) -> None:
    """Its failed messages are on its disk, where nobody gets them."""
    operator.send({"a": 3})
    operator.break_for("")
    store = str(operator.directory / "store")
    local: dict[str, Any] = {"on_failure": "local", "local_store": store, "mode": "concurrent"}
    local["retry"] = {"delays": [3_600.0]}
    with operator.service(member="lost", **local) as host:
        operator.group(unprocessed=3, at_consumers=3, letters=0)
        assert operator.alarms() == {}
        host.terminate(SIGKILL)
    shutil.rmtree(store)
    alarm = operator.alarm("store.no_owner")
    assert alarm["severity"] == "critical"
    assert "group billing without an owner: 1, with 3 messages" in alarm["text"]
    assert "last reported by lost" in alarm["text"]
    assert "txmq recover adopt billing STORE" in alarm["action"]
    operator.group(unprocessed=3, at_consumers=3, members=0)
    operator.mend()
    [lost] = operator.told("recover", "list", "billing")["stores"]
    assert (lost["state"], lost["messages"]) == ("no owner", 3)
    with operator.service(**local):
        operator.told("recover", "adopt", "billing", lost["store"], "--yes")
        operator.group(unprocessed=0, at_consumers=0)
        operator.quiet()
    assert operator.done() == ["a 0", "a 1", "a 2"]


def test_3_a_message_is_retried_for_hours(operator: Operator) -> None:
    """It is no letter, its key stands, and it can be seen, mended and hastened."""
    operator.send({"a": 3})
    operator.break_for("a 0")
    with operator.service(retry={"delays": [7_200.0], "retries": 5}):
        operator.group(unprocessed=3, retrying=1, parked=2, letters=0)
        alarm = operator.alarm("fence.old")
        assert "txmq group show billing names the keys" in alarm["action"]
        [listed] = operator.told("dlq", "list", "billing", "--where", "state:retrying")["letters"]
        assert (listed["state"], listed["error_type"]) == ("retrying", "ValueError")
        refused = operator.shown("dlq", "replay", "billing", "orders/0/0", status=1)
        assert "txmq retry" in refused
        [waiting] = operator.told("retry", "list", "billing")["letters"]
        assert waiting["next_at"] > time.time_ns() // 1_000 + HOUR
        edited = ("--body", "a mended", "--reason", "typo", "--yes")
        operator.told("retry", "edit", "billing", "orders/0/0", *edited)
        operator.told("retry", "now", "billing", "orders/0/0", "--reason", "mended")
        operator.group(unprocessed=0, retrying=0, parked=0)
        operator.quiet()
    assert operator.done() == ["a mended", "a 1", "a 2"]


def test_4_the_disk_is_lost_and_there_is_a_backup(tmp_path: Path) -> None:
    settings = f"{SETTINGS}backup_s = 0.5\n"
    with OwnBroker(tmp_path / "broker", settings) as broker:
        operator, backup = Operator(broker.url, tmp_path), str(tmp_path / "backup")
        assert operator.alarm("log.backup_old")["text"] == "the log was never backed up"
        operator.send({"a": 2})
        operator.told("log", "backup", backup)
        alarm = operator.alarm("log.backup_old")
        assert "the newest backup of the log is 0:" in alarm["text"]
        assert "txmq log backup" in alarm["action"]
        operator.send({"b": 2})
        broker.kill()
        shutil.rmtree(broker.data)
        assert run("log", "backup", backup, "--verify").exit_code == 0
        restored = run("log", "restore", backup, "--data", str(broker.data))
        assert restored.exit_code == 0
        assert "txmq log lost DSN" in restored.stderr
        broker.start()
        alarm = operator.alarm("log.restored")
        assert (alarm["severity"], "is lost" in alarm["text"]) == ("critical", True)
        assert "txmq log lost" in alarm["action"]
        assert operator.told("log", "lost", status=1)["transactions"] == []
        [topic] = operator.told("topic", "list")["topics"]
        assert topic["messages"] == 2
        operator.told("log", "lost", "--accept", "--reason", "b is known to be lost")
        assert "log.restored" not in operator.alarms()
        refused = operator.shown("log", "backup", backup, status=1)
        assert "incarnation" in refused
        operator.told("log", "backup", str(tmp_path / "next"))
        [entry] = operator.told("audit", "--call", "log.")["entries"]
        assert (entry["call"], entry["reason"]) == ("log.accept", "b is known to be lost")


def test_5_a_certificate_ends(tmp_path: Path) -> None:
    """Its renewal is half done at first, and needs no restart in the end."""
    authority, data = Authority(tmp_path), tmp_path / "data"
    files, config = authority.sign("broker", days=10), tmp_path / "broker.toml"
    config.write_text(
        f'[broker]\ndata = "{data}"\nlisten = "127.0.0.1:{free_port()}"\n'
        f'[tls]\ncert = "{files.cert}"\nkey = "{files.key}"\n'
    )
    with running(tmp_path / "broker", "broker", "--config", str(config)) as process:
        url = process.first_line().removeprefix("ready ")
        operator = Operator(f"{url}/?ca={authority.ca}", tmp_path)
        alarm = operator.alarm("certificate.ends")
        assert (alarm["severity"], f"{files.cert} ends in 9 days" in alarm["text"]) == (
            "warning",
            True,
        )
        renewed = authority.sign("renewed", days=90)
        shutil.copy(renewed.cert, files.cert)
        wait_until(
            lambda: "its new file is not used" in operator.alarm("certificate.ends")["text"],
            what="that the key is the old one",
        )
        shutil.copy(renewed.key, files.key)
        operator.quiet()
        assert process.alive


def test_6_a_broker_is_killed_and_started_again(tmp_path: Path) -> None:
    """What was wrong before is known after it: alarms, letters, what was done."""
    with OwnBroker(tmp_path / "broker", SETTINGS) as broker:
        operator = Operator(broker.url, tmp_path)
        operator.send({"a": 2, "b": 2})
        operator.break_for("")
        with operator.service():
            operator.group(unprocessed=4, letters=2, parked=2)
        operator.told("dlq", "abandon", "billing", "orders/0/0", "--reason", "a test order")
        operator.alarm("group.letters")
        before = operator.told("trace", "--key", "a")["events"]
        broker.restart()
        alarm = operator.alarm("group.letters")
        assert "group billing: 1, by error: ValueError" in alarm["text"]
        [entry] = operator.told("audit", "--group", "billing", "--call", "dlq.")["entries"]
        assert (entry["call"], entry["reason"]) == ("dlq.abandon", "a test order")
        after = operator.told("trace", "--key", "a")["events"]
        assert [one["what"] for one in after] == [one["what"] for one in before]
        assert {"sent", "failed", "dead letter", "dlq.abandon"} <= {one["what"] for one in after}


def test_7_somebody_asks_for_an_order(operator: Operator) -> None:
    """By its key: where it is, who had it, and why it does not go on."""
    operator.send({"order-17": 2, "order-18": 1})
    operator.break_for("order-17 0")
    with operator.service():
        operator.group(unprocessed=2, letters=1, parked=1)
    life = operator.told("trace", "--key", "order-17")
    assert [one["offset"] for one in life["messages"]] == [0, 2]
    first, second = (message["life"]["groups"][0]["state"] for message in life["messages"])
    assert (first, second) == ("dead", "parked behind its key")
    text = operator.shown("trace", "--key", "order-17")
    assert "no such order" in text
    [found] = operator.told("message", "find", "orders", "--key", "order-18")["messages"]
    shown = operator.told("message", "show", found["message_id"])
    assert (shown["topic"], shown["offset"]) == ("orders", 1)


def test_8_a_message_is_poison(operator: Operator) -> None:
    """It alone is dead, and is mended, tried by one member, and replayed."""
    operator.send({"a": 1, "b": 1, "c": 1})
    operator.break_for("b 0")
    with operator.service(mode="concurrent", member="billing-1"):
        operator.group(unprocessed=1, letters=1)
        assert sorted(operator.done()) == ["a 0", "c 0"]
        shown = operator.shown("dlq", "show", "billing", "orders/0/1", "--body")
        assert "no such order" in shown
        assert "b 0" in shown
        tried = ("dlq", "try", "billing", "orders/0/1", "--member", "billing-1")
        assert operator.told(*tried, status=1)["outcome"] == "died again"
        edited = ("--body", "b mended", "--reason", "amount was a text", "--yes")
        operator.told("dlq", "edit", "billing", "orders/0/1", *edited)
        assert operator.told(*tried)["outcome"] == "processed"
        operator.group(unprocessed=0, letters=0)
        operator.quiet()
    assert operator.done()[-1] == "b mended"
    calls = [one["call"] for one in operator.told("audit", "--group", "billing")["entries"]]
    assert calls.count("dlq.try") == 2
    assert "dlq.edit" in calls


def test_9_a_plan_stops_by_itself_and_waits_behind_its_canary(operator: Operator) -> None:
    operator.send({f"k{number}": 1 for number in range(12)})
    operator.break_for("")
    with operator.service(mode="concurrent"):
        operator.group(unprocessed=12, letters=12)
        create = ("plan", "create", "billing", "--all", "--rate", "0", "--ramp", "0")
        canary = ("--canary", "3", "--pause")
        operator.told(*create, *canary, "--name", "early")
        operator.told("plan", "start", "early")
        alarm = operator.alarm("plan.paused")
        assert "as early of group billing" in alarm["text"]
        assert "3 of the last 3 failed again" in alarm["text"]
        assert "txmq plan show PLAN; mend the cause" in alarm["action"]
        assert operator.told("plan", "show", "early")["died_again"] == 3
        operator.told("plan", "cancel", "early", "--reason", "not mended", "--yes")
        operator.mend()
        operator.told(*create, *canary, "--name", "mended")
        operator.told("plan", "start", "mended")
        alarm = operator.alarm("plan.waiting")
        assert "wait to be resumed: 1, as mended of group billing" in alarm["text"]
        assert "plan.paused" not in operator.alarms(), "there is nothing to mend"
        operator.group(unprocessed=9, letters=9)
        operator.told("plan", "resume", "mended")
        operator.group(unprocessed=0, letters=0)
        wait_until(lambda: operator.told("plan", "show", "mended")["state"] == "done")
        operator.quiet()


def test_10_so_many_wait_behind_a_key_that_all_stand(operator: Operator) -> None:
    operator.send({"a": 1})
    operator.break_for("a 0")
    with operator.service(max_parked=3):
        operator.group(letters=1)
        operator.send({"a": 5, "b": 1}, first=1)
        alarm = operator.alarm("fence.full")
        assert alarm["severity"] == "critical"
        assert "orders/0 for group billing: 3 messages parked behind" in alarm["text"]
        assert "txmq group alter --max-parked" in alarm["action"]
        assert "parked" in operator.shown("group", "show", "billing")
        operator.told("group", "alter", "billing", "--max-parked", "100")
        operator.group(unprocessed=6, letters=1, parked=5)
        wait_until(lambda: operator.alarms().keys() == {"group.letters", "fence.old"})
        operator.told("dlq", "abandon", "billing", "orders/0/0", "--reason", "a test order")
        operator.group(unprocessed=0, letters=0, parked=0)
        operator.quiet()
    assert sorted(operator.done()) == [*(f"a {number}" for number in range(1, 6)), "b 1"]
    assert in_order(operator.done())


def test_11_the_broker_is_away(tmp_path: Path) -> None:
    """Commands say so at once; a producer with a spool goes on, also where it dies."""
    with OwnBroker(tmp_path / "broker", SETTINGS) as broker:
        operator, spool = Operator(broker.url, tmp_path), str(tmp_path / "spool")
        operator.send({"a": 1})
        broker.kill()
        refused = operator.shown("alarms", status=1)
        assert "no broker answered" in refused
        with running(tmp_path / "shop", SPOOLING, broker.url, spool, command=run_source) as shop:
            shop.first_line()
            shop.terminate(SIGKILL)
        [waiting] = json.loads(run("recover", "list", "--data", spool, "--json").stdout)["spools"]
        assert waiting["messages"] == 5
        broker.start()
        operator.told("recover", "drain", "--data", spool)
        [topic] = operator.told("topic", "list")["topics"]
        assert topic["messages"] == 6
        operator.quiet()
