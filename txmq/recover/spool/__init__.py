"""The producer's spool: sends that wait on local disk until the broker is back
(docs/FORMATS.md 10).

`directory` finds and takes the spools below a directory, `spool` is one of them,
`records` and `refused` are what it has on disk, `view` reads it beside its owner.
"""

from txmq.recover.spool.directory import KnownTopic, Opened, SpoolDirectory, retry_refused
from txmq.recover.spool.records import UNROUTED, SpooledBatch
from txmq.recover.spool.refused import Refusal
from txmq.recover.spool.spool import Spool, SpoolReport, ToSend
from txmq.recover.spool.view import (
    SpooledMessage,
    SpoolSummary,
    drop_refused,
    scan,
    spools_below,
)

__all__ = [
    "UNROUTED",
    "KnownTopic",
    "Opened",
    "Refusal",
    "Spool",
    "SpoolDirectory",
    "SpoolReport",
    "SpoolSummary",
    "SpooledBatch",
    "SpooledMessage",
    "ToSend",
    "drop_refused",
    "retry_refused",
    "scan",
    "spools_below",
]
