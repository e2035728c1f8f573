"""A node in a process of its own that leads and appends until it has ended.

    python -m tests.broker.cluster.writing_node SERVERS TOPIC

It prints what was confirmed so far after each append, and at last why it ended.
"""

from __future__ import annotations

import sys

from tests.broker.cluster.loop import Loop
from tests.broker.cluster.obedient_nodes import ObedientNode
from txmq.broker.cluster.kafka_client import KafkaAddress
from txmq.broker.cluster.kafka_partition import KafkaPartition
from txmq.testing.wait import PATIENCE_S


def main(servers: str, topic: str) -> None:
    loop = Loop()
    partition = KafkaPartition(loop, KafkaAddress(servers), topic, report_within_s=PATIENCE_S)
    node = ObedientNode(partition, "writer")
    loop.run_until(node.claim, "it claims")
    loop.run_until(lambda: node.leads_on, "it leads")
    while node.leads_on:
        node.append(b"%d " % len(node.log))
        loop.run_until(lambda: node.is_decided, "it knows what counts")
        tell(node.promised.decode())
    tell(str(node.end))
    partition.close()


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
