"""`txmq outbox`: commands for single rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg2
import pytest

from tests.cli.support import run
from tests.tx.postgres.support import rows
from txmq.batch import BatchView, encode, verify
from txmq.client.protocol.transaction.tokens import new_token
from txmq.model.message import Message
from txmq.tx.outbox_entry import OutboxEntry, pack_entries, unpack_entries
from txmq.tx.postgres.blocking import enqueue, insert_token
from txmq.tx.postgres.outbox import NewOutboxRow

Queue = Callable[[], UUID]


@pytest.fixture
def queue(database: str) -> Queue:
    """Commits a transaction with two messages into the outbox; gives its token."""

    def put() -> UUID:
        token, log_id = new_token(), uuid4()
        messages = [Message(body, "k", "red") for body in (b"one", b"\xff")]
        batch = encode(messages, producer_id=token.bytes, epoch=0, sequence=0, born_at=1)
        with closing(psycopg2.connect(database)) as connection, connection:
            insert_token(connection, token, [log_id])
            content = pack_entries([OutboxEntry("orders", None, "k", batch)])
            enqueue(connection, [NewOutboxRow(log_id, token, None, "shop", 2, [1], content)])
        return token

    return put


def command_json(*args: str) -> dict[str, Any]:
    result = run("outbox", *args, "--json")
    assert result.exit_code == 0, result.stderr
    shown: dict[str, Any] = json.loads(result.stdout)
    return shown


def seqs(database: str) -> list[int]:
    return [row["seq"] for row in command_json("list", database)["rows"]]


def test_rows_are_listed_in_the_order_of_their_publication_and_shown(
    database: str, queue: Queue
) -> None:
    tokens = [queue(), queue()]
    listed = command_json("list", database)["rows"]
    assert [row["token"] for row in listed] == [token.hex for token in tokens]
    first, second = seqs(database)
    assert first < second
    assert len(command_json("list", database, "--limit", "1")["rows"]) == 1
    shown = command_json("show", database, str(first), "--bodies")
    assert (shown["token"], shown["service"], shown["messages"]) == (tokens[0].hex, "shop", 2)
    [one, other] = shown["rows"]
    assert (one["topic"], one["key"], one["tag"], one["body"], other["size"]) == (
        "orders",
        "k",
        "red",
        "one",
        1,
    )


def test_a_row_is_taken_out_only_when_what_it_held_is_kept(
    database: str, queue: Queue, tmp_path: Path
) -> None:
    token, keep = queue(), tmp_path / "dropped.jsonl"
    [seq] = seqs(database)
    nowhere = run(
        "outbox", "drop", database, str(seq), "--keep", str(tmp_path), "--reason", "x", "--json"
    )
    assert json.loads(nowhere.stderr)["error"] == "ConfigError"
    assert seqs(database) == [seq]
    command_json(
        "drop",
        database,
        str(seq),
        "--keep",
        str(keep),
        "--reason",
        "no such topic",
        "--operator",
        "ada",
    )
    assert seqs(database) == []
    kept = json.loads(keep.read_text())
    assert (kept["token"], kept["operator"], kept["reason"]) == (token.hex, "ada", "no such topic")
    missing = run(
        "outbox", "drop", database, str(seq), "--keep", str(keep), "--reason", "again", "--json"
    )
    assert missing.exit_code == 1
    assert "no row" in json.loads(missing.stderr)["message"]


def test_a_row_older_than_outcomes_are_kept_gets_a_token_that_can_be_published(
    database: str, queue: Queue
) -> None:
    old = queue()
    [seq] = seqs(database)
    renewed = command_json("renew", database, str(seq))
    found: Any = rows(database, "SELECT tok, content FROM txmq_outbox")
    [(token, content)] = found
    assert (renewed["replaced"], renewed["token"]) == (old.hex, UUID(str(token)).hex)
    assert UUID(str(token)) > old
    [entry] = unpack_entries(bytes(content), token)
    assert verify(entry.batch).producer_id == UUID(str(token)).bytes
    assert list(BatchView(entry.batch).bodies) == [b"one", b"\xff"]
    states: Any = rows(database, "SELECT tok::text, state FROM txmq_token")
    assert dict(states) == {str(old): "R", str(token): "C"}
