"""The duration of a rebalance, and its effect on other partitions."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.brokers import broker
from tests.bench.harness import measured, python
from tests.bench.rows import Row, Run, at_most, benchmark, row

PARTITIONS, MEMBERS, LEASE_S = 256, 8, 2.0


@benchmark("consumer.rebalance", "a rebalance after a kill")
def rebalance(run: Run) -> Iterator[Row]:
    with broker(run) as server:
        args = (server.address, PARTITIONS, MEMBERS, LEASE_S)
        result = measured(python("tests.bench.clients.rebalance", *args))
    where = (
        f"{PARTITIONS} partitions, {MEMBERS} members of an ordered group, leases of {LEASE_S:.0f} s"
    )
    what = (
        f"from a member's death until its {result['moved']:.0f} partitions are read again: {where}"
    )
    yield row("consumer.rebalance", what, "s", result["moved_s"], goal=at_most(LEASE_S + 1))
    others = "the longest delay of a message of another partition meanwhile, beside before the kill"
    yield row(
        "consumer.rebalance_others",
        others,
        "ms",
        result["others_ms"],
        yardstick=result["before_ms"],
    )
