"""How long a rebalance takes, and who notices."""

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
        told = measured(python("tests.bench.clients.rebalance", *args))
    where = f"{PARTITIONS} partitions over {MEMBERS} members of an ordered group, one killed, leases of {LEASE_S:.0f} s"
    what = f"until the {told['moved']:.0f} partitions of the dead one are read again: {where}"
    yield row("consumer.rebalance", what, "s", told["moved_s"], goal=at_most(LEASE_S + 1))
    others = (
        "the longest that a message of another partition takes meanwhile, against before the kill"
    )
    yield row(
        "consumer.rebalance_others", others, "ms", told["others_ms"], yardstick=told["before_ms"]
    )
