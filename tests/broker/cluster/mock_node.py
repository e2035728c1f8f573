"""The program of txmq, for a node over a mock of Kafka: that describes no topic."""

from __future__ import annotations

from txmq.broker.cluster import own_node
from txmq_command import main

if __name__ == "__main__":
    own_node.check = lambda *_given: None  # type: ignore[attr-defined, assignment]
    main()
