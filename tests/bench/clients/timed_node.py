"""The program of txmq, for a node of a cluster that notes when it had what of the log.

    python -m tests.bench.clients.timed_node broker --config NODE.toml ...

When it ends it writes pairs of seconds (`time.monotonic`) and position to NODE.times: a
follower's are of what it has taken over, a leader's of what may be answered.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from unittest.mock import patch

from txmq.broker.cluster.replica import Replica
from txmq.store.shared.records import PartitionRecord
from txmq.store.shared.rules import Place
from txmq_command import main

NOTED: list[tuple[float, int]] = []
take_over, answer = Replica.counted, Replica.confirmed


def counted(replica: Replica, record: PartitionRecord, place: Place) -> None:
    take_over(replica, record, place)
    NOTED.append((time.monotonic(), place.end))


def confirmed(replica: Replica, position: int) -> None:
    NOTED.append((time.monotonic(), position))
    answer(replica, position)


if __name__ == "__main__":
    config = Path(sys.argv[sys.argv.index("--config") + 1])
    with patch.multiple(Replica, counted=counted, confirmed=confirmed):
        try:
            main()
        finally:
            config.with_suffix(".times").write_text(json.dumps(NOTED))
