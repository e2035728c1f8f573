"""Publication of outbox rows by `txmq resolver`, a process outside the broker."""

from __future__ import annotations

import time

from txmq.client.blocking.core import BlockingCore
from txmq.client.blocking.transaction.bundle_upload import BundleUpload
from txmq.errors import DigestMismatch, StaleTopic
from txmq.tx.outbox_entry import TopicPartitions, outbox_part, unpack_entries
from txmq.tx.postgres.outbox import OutboxRow


def publish_row(core: BlockingCore, row: OutboxRow) -> None:
    """Store a row as one bundle, and wait until it is published or waits for its keys.

    Repeating it is harmless. Raises as a call does.
    """
    entries = unpack_entries(row.content, row.token)

    def shape(topic: str) -> TopicPartitions:
        known = core.topics.get(topic)
        return TopicPartitions(known.partitions, known.epoch)

    for left in reversed(range(1 + core.settings.retries)):
        part = outbox_part(row.token, row.service, entries, shape)
        upload = BundleUpload(core, [part], time.monotonic() + core.settings.timeout)
        upload.send()
        try:
            upload.await_receipt()
        except DigestMismatch:
            return  # an earlier attempt has stored it, when its topic had fewer partitions
        except StaleTopic as stale:
            if not left:
                raise
            core.topics.refresh(str(stale.detail.get("topic", "")))
        else:
            return
