"""`txmq alarms`, against a broker that runs."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.peer import peer
from tests.cli.support import reply, run
from txmq.model.decider import ByChecker
from txmq.testing.own_broker import OwnBroker
from txmq.testing.wait import wait_until


def test_alarms_are_shown_and_make_the_status_1(tmp_path: Path) -> None:
    with OwnBroker(tmp_path, "[alarms]\nundecided_s = 0.2\n") as broker:
        assert reply("alarms", broker=broker.url) == {"alarms": []}
        assert run("alarms", "--broker", broker.url).stdout == "no alarms\n"
        reply("topic", "create", "halves", "--partitions", "1", broker=broker.url)
        with peer(broker.url) as shop:
            token = shop.half("halves", b"lost", ByChecker("shop"))
        wait_until(lambda: run("alarms", "--broker", broker.url).exit_code == 1, what="an alarm")
        [alarm] = json.loads(run("alarms", "--json", "--broker", broker.url).stdout)["alarms"]
        assert (alarm["name"], alarm["severity"]) == ("transaction.oldest_undecided", "warning")
        assert token in alarm["text"]
        assert "txmq tx show" in alarm["action"]
        reply("tx", "rollback", token, "--reason", "lost", broker=broker.url)
        assert reply("alarms", broker=broker.url) == {"alarms": []}
        assert broker.stop() == 0
    assert broker.log.count("alarm.raised") == broker.log.count("alarm.cleared") == 1
