"""A broker whose producers send more than its disk takes: decisions go first, memory is
bounded, and nothing is lost.
"""

from __future__ import annotations

from pathlib import Path

import txmq
from tests.bench.harness import rss_anon, sampled
from tests.bench.overload import flooding, halves, stored
from tests.system import slow_disk_broker
from txmq.testing.processes import running
from txmq.testing.wait import PATIENCE_S, wait_until

MAX_RSS = 250e6


def flushes(client: txmq.Client) -> int:
    count: int = client.call("broker.stats")["flush"]["count"]
    return count


def throttled(client: txmq.Client) -> dict[str, int]:
    shown: dict[str, int] = client.call("broker.show")["throttled"]
    return shown


def test_decisions_take_few_turns_of_the_disk_while_sends_wait(tmp_path: Path) -> None:
    where = (
        "broker",
        "--create-topics",
        "--data",
        str(tmp_path / "data"),
        "--listen",
        "127.0.0.1:0",
    )
    with running(tmp_path, "10", "24", *where, command=slow_disk_broker.run) as process:
        url = process.first_line().removeprefix("ready ")
        with txmq.connect(url, service="s") as client:
            some, turns = halves(client, 20), list[int]()
            pid = process.process.pid
            with sampled(lambda: float(rss_anon(pid))) as memory, flooding(url, 1) as flood:
                wait_until(lambda: throttled(client)["waited"] > 0, what="the disk is behind")
                for half in some:
                    start = flushes(client)
                    throttled(client)  # as long as any call takes that needs no disk
                    before = flushes(client)
                    assert half.commit().result(PATIENCE_S)
                    turns.append(flushes(client) - before - (before - start))
            assert sorted(turns)[len(turns) // 2] <= 3
            assert flood.failed == 0
            assert stored(client) == flood.acked
        assert max(memory) <= MAX_RSS
        assert process.terminate() == 0
