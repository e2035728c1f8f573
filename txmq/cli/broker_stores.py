"""Stores of consumers as the broker knows them, for `txmq recover`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from txmq.cli.local_recovery import wire_entry
from txmq.cli.rows import with_decoded_body
from txmq.errors import StoreError

if TYPE_CHECKING:
    from txmq.cli.command import CommandSession
    from txmq.recover.local import Scanned, StoreIdentity

PER_CALL = 1_000  # messages of a call, and entries of a page: the broker's limit
ADOPTION_S = 60.0  # that `adopt` waits for the last step
POLL_S = 0.05


def list_stores(session: CommandSession, group: str | None) -> Iterator[dict[str, Any]]:
    """Yield the stores with messages, of one group or of all."""
    after: str | None = ""
    while after is not None:
        page = session.client.call("recover.list", group=group, after=after, limit=PER_CALL)
        yield from page["stores"]
        after = page["next"]


def list_stored(
    session: CommandSession, of_store: dict[str, Any], *, limit: int | None = None, bodies: bool
) -> Iterator[dict[str, Any]]:
    """Yield messages of a store, at most `limit`, with decoded bodies."""
    pages = _pages(session, of_store, size=min(limit or PER_CALL, PER_CALL), bodies=bodies)
    rows = (row for page in pages for row in page)
    yield from map(with_decoded_body, islice(rows, limit))


def _pages(
    session: CommandSession, of_store: dict[str, Any], *, size: int = PER_CALL, bodies: bool
) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages of a store, page by page, as the broker has them."""
    after = None
    while True:
        page = session.client.call(
            "recover.show", **of_store, after=after, limit=size, bodies=bodies
        )
        yield page["list"]
        after = page["next"]
        if after is None:
            return


def report_copy(
    session: CommandSession,
    identity: StoreIdentity,
    copy: Iterable[Scanned],
    args: dict[str, Any],
) -> dict[str, int]:
    """Report to the broker what a copy knows; return the number of each verdict."""
    verdicts = Counter[str]()
    rows = (wire_entry(identity, scanned) for scanned in copy)
    while entries := list(islice(rows, PER_CALL)):
        reply = session.client.call("recover.tell", **args, entries=entries)
        verdicts.update(reply["verdicts"])
    return dict(verdicts)


def wait_for_adoption(session: CommandSession, of_store: dict[str, Any]) -> int:
    """Wait for the last step of an adoption; return the number of messages left."""
    until = time.monotonic() + ADOPTION_S
    while True:
        stores = list_stores(session, of_store["group"])
        left = next((one for one in stores if one["store"] == of_store["store"]), None)
        if left is None or left["state"] != "being adopted":
            return 0
        if time.monotonic() >= until:
            return int(left["messages"])
        time.sleep(POLL_S)


def export_lines(session: CommandSession, of_store: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of an export, made of the broker's own copies."""
    from txmq.recover.local.export import FORMAT, VERSION

    log_id = session.client.call("broker.show")["log_id"]
    ordered = session.client.call("group.show", group=of_store["group"])["mode"] == "ordered"
    count, topic_id = 0, None
    for page in _pages(session, of_store, bodies=True):
        for row in page:
            if topic_id is None:
                topic_id = row["topic_id"]
                store = {
                    "id": of_store["store"],
                    "group": of_store["group"],
                    "topic": row["topic"],
                    "topic_id": topic_id,
                    "log_id": log_id,
                    "ordered": ordered,
                }
                yield json.dumps({"format": FORMAT, "version": VERSION, "store": store})
            if row["topic_id"] == topic_id:
                yield json.dumps(_export_line(row))
                count += 1
    if topic_id is None:
        raise StoreError(
            f"store {of_store['store']} has no messages at the broker",
            hint="list the stores with messages: txmq recover list",
        )
    yield json.dumps({"end": count})


def _export_line(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "partition": row["partition"],
        "offset": row["offset"],
        "key": row["key"],
        "state": "stored",
        "attempt": row["attempts"],
        "due": row["due"],
        "first_at": row["first_failed_at"],
        "told": True,
        "generation": 0,
        "failure": [row["error_type"], row["error_text"], row["fingerprint"], []],
        "message_id": row["message_id"],
        "tag": row["tag"],
        "headers": row["headers"],
        "born_at": row["born_at"],
        "stored_at": row["stored_at"],
        "epoch": row["epoch"],
        "body": row["body"],
    }
