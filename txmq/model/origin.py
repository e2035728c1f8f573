"""Headers that txmq adds, above all those of the copy of a dead letter: where its
original is.
"""

from __future__ import annotations

from collections.abc import Mapping

from txmq.model.causation import CAUSATION, CORRELATION

TOPIC, PARTITION, OFFSET = "txmq-origin-topic", "txmq-origin-partition", "txmq-origin-offset"
GROUP, MESSAGE_ID = "txmq-origin-group", "txmq-origin-id"
REDRIVEN_BY, REDRIVES = "txmq-redriven-by", "txmq-redrives"
REDRIVE_TRACE = "txmq-redrive-traceparent"  # the context of the call, as W3C writes it
# Headers that txmq adds: they count for nobody's limits.
ADDED = frozenset(
    {"traceparent", "tracestate", TOPIC, PARTITION, OFFSET, GROUP, MESSAGE_ID}
    | {REDRIVEN_BY, REDRIVES, REDRIVE_TRACE, CAUSATION, CORRELATION}
)
MAX_REDRIVES = 16  # of a copy of a copy: a loop of topics has an end


def origin_headers(  # the headers
    headers: Mapping[str, str],
    *,
    topic: str,
    partition: int,
    offset: int,
    group: str,
    message_id: str,
    by: str,
    traceparent: str | None = None,
) -> dict[str, str]:
    """Return the headers of a message's copy.

    Those of a copy that died in its turn are replaced, and counted. `traceparent` is
    that of the redrive, where it is traced. Raises ValueError
    for the copy that is one too many.
    """
    before = headers.get(REDRIVES, "0")
    count = int(before) if before.isascii() and before.isdigit() and len(before) < 4 else 0
    if count >= MAX_REDRIVES:
        raise ValueError(f"it is the copy of a copy, {count} times over: header {REDRIVES!r}")
    kept = {name: text for name, text in headers.items() if name != REDRIVE_TRACE}
    traced = {} if traceparent is None else {REDRIVE_TRACE: traceparent}
    return {
        **kept,
        **traced,
        TOPIC: topic,
        PARTITION: str(partition),
        OFFSET: str(offset),
        GROUP: group,
        MESSAGE_ID: message_id,
        REDRIVEN_BY: by,
        REDRIVES: str(count + 1),
    }
