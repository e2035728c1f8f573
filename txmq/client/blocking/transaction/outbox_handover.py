"""Handing a row of the outbox over to its broker, for a resolver that is a process of
its own.
"""

from __future__ import annotations

import time

from txmq.client.blocking.core import Core
from txmq.client.blocking.transaction.bundles import Storing
from txmq.errors import DigestMismatch, StaleTopic
from txmq.tx.outbox_entry import Shape, group_of, unpack
from txmq.tx.postgres.outbox import Queued


def hand_over(core: Core, row: Queued) -> None:
    """Returns once the messages are published, or wait for earlier ones of their keys.
    Twice does no harm.

    Raises as a call does.
    """
    entries = unpack(row.content)

    def shape(topic: str) -> Shape:
        known = core.topics.shape(topic)
        return Shape(known.partitions, known.epoch)

    for left in reversed(range(1 + core.settings.retries)):
        group = group_of(row.token, row.service, entries, shape)
        storing = Storing(core, [group], time.monotonic() + core.settings.timeout)
        storing.send()
        try:
            storing.receipt()
        except DigestMismatch:  # an earlier attempt stored it, when its topic had another shape
            return
        except StaleTopic as stale:
            if not left:
                raise
            core.topics.refresh(str(stale.detail.get("topic", "")))
        else:
            return
