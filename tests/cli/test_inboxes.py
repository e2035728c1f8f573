"""`txmq inbox`: what was stored by names, for an operator to decide."""

from __future__ import annotations

import json
from typing import Any

from tests.cli.support import run
from tests.tx.postgres.support import LOG, rows

ROW = (
    "INSERT INTO txmq_inbox_by_name (grp, topic, partition, epoch, applied)"
    " VALUES ('billing', %s, 0, 1, '{[0,5)}')"
)


class Broker:
    """A client whose broker knows one group."""

    def call(self, name: str, /, **args: object) -> dict[str, Any]:
        place: dict[str, Any] = {"topic": "orders", "topic_id": 7, "partition": 0, "epoch": 1}
        if name == "group.show":
            return {"positions": [place]}
        return {"log_id": str(LOG)}

    def close(self) -> None:
        pass


def test_inboxes_stored_by_name_are_listed_adopted_and_discarded(
    database: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("txmq.cli.command.connect", lambda _url: Broker())
    for topic in ("orders", "gone"):
        rows(database, ROW, topic)
    listed = json.loads(run("inbox", "list", database, "--json").stdout)["rows"]
    assert [(row["topic"], row["applied"]) for row in listed] == [
        ("gone", "{[0,5)}"),
        ("orders", "{[0,5)}"),
    ]
    adopted = run("inbox", "adopt", database, "billing", "orders", "--yes", "--json")
    assert json.loads(adopted.stdout)["partitions"] == [{"partition": 0, "result": "adopted"}]
    assert rows(database, "SELECT grp, topic_id, applied::text FROM txmq_inbox") == [
        ("billing", 7, "{[0,5)}")
    ]
    refused = run("inbox", "adopt", database, "billing", "oders", "--yes")
    assert (refused.exit_code, "does not read topic oders" in refused.stderr) == (1, True)
    discarded = run("inbox", "discard", database, "billing", "gone", "--yes", "--json")
    assert json.loads(discarded.stdout)["discarded"] == 1
