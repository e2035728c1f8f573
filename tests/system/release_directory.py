"""A data directory with something of everything, made by a release, to be opened by
later ones.

    python -m tests.system.release_directory tests/golden/directory-0.1.zip

makes one by the checked-out version. The archive of a release stays as it is.
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import txmq
from tests.cli.peer import Peer, peer
from txmq.model.decider import ByChecker
from txmq.testing.processes import running
from txmq.testing.wait import wait_until
from txmq.wire.calls.users import VerifierArgs
from txmq.wire.data_requests import AckedRange
from txmq.wire.scram import make_verifier

SETTINGS = """
[broker]
data = "{data}"
create_topics = true
listen = "127.0.0.1:0"
preallocate_bytes = 4096
[checks]
first_s = 86400.0
[retention]
hours = 0
"""
SCHEMA = '{"type": "object"}'
ADMIN, PASSWORD = "root", "kept"
SHOWN = "shown.json"  # of the archive: what the release said of its directory
# what differs from one start to the next, or goes by the clock
CHANGING = {
    "boot_epoch", "idle_s", "age_us", "since", "next_check", "last_check", "session", "members",
    "bytes", "age_ms", "oldest_us", "history", "checks", "operations", "generation",
    "check_at", "check_reason", "checked_at", "checked_by", "tries", "in_doubt",
}  # fmt: skip


def main(archive: Path) -> None:
    """Make a directory and its archive."""
    with TemporaryDirectory() as place:
        directory = Path(place)
        shown = _fill(directory)
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr(SHOWN, json.dumps(shown, indent=1, sort_keys=True))
            for file in sorted((directory / "data").rglob("*")):
                if file.is_file() and not file.name.endswith((".lock", "lock.mdb")):
                    packed.write(file, file.relative_to(directory / "data"))


def serving(directory: Path) -> Any:
    """Return a context of a broker on the directory."""
    settings = directory / "txmq.toml"
    settings.write_text(SETTINGS.format(data=directory / "data"))
    return running(directory, "broker", "--config", str(settings))


def _fill(directory: Path) -> dict[str, Any]:
    with serving(directory) as process:
        url = process.first_line().removeprefix("ready ")
        with txmq.connect(url, service="shop") as client, peer(url) as connection:
            _topics(client)
            _groups(client, connection)
            _undecided(client, connection)
            _users(client)
        shown = views(_logged_in(url))
        process.terminate()
    return shown


def _topics(client: txmq.Client) -> None:
    client.call("topic.create", name="orders", partitions=2, retention_ms=86_400_000_000)
    client.call("topic.schema", name="orders", json_schema=SCHEMA)
    client.call("topic.create", name="events", partitions=1)
    client.call("topic.create", name="gone", partitions=1)
    client.call("topic.delete", name="gone", operator="ada", reason="a mistake")
    for number in range(40):
        client.send("orders", b'{"n": %d}' % number, key=f"k{number % 7}", headers={"n": "1"})
        client.send("events", b"e%d" % number, key=f"k{number % 3}", tag="even")
    client.send("events", b"later", delay=86_400.0 * 300)


def _groups(client: txmq.Client, connection: Peer) -> None:
    places = connection.dead_letters("billing", "events", 12)
    client.call("group.alter", group="billing", keep_until_exported=True, operator="ada")
    first, second, third = places[:3]
    args = {"group": "billing", "operator": "ada"}
    client.call("dlq.edit", **args, reason="a typo", edits=0, body="eA==", **_place(first))
    client.call("dlq.abandon", **args, reason="old", letters=[second])
    client.call("dlq.note", **args, fingerprint="f-1", text="the warehouse was away")
    client.call("dlq.save", name="mine", select={"text": "order"}, operator="ada")
    client.call("dlq.replay", **args, letters=[third])
    client.call("plan.create", name="p", select={}, settings={"canary": 2}, **args)
    wait_until(lambda: client.call("plan.show", name="p")["state"] != "searching")
    client.call("policy.set", group="billing", after_s=8_640_000.0, select={}, operator="ada")
    joined = connection.call(
        "consumer.join", group="shipping", member="m", instance="i", topics=["orders"],
        mode="ordered",
    )  # fmt: skip
    claim = {"group": "shipping", "member": "m", "generation": joined["generation"]}
    for chunk in connection.fetch(**claim):
        end = chunk.base_offset + chunk.first_row + max(chunk.rows // 2, 1)
        ranges = AckedRange("orders", chunk.partition, chunk.base_offset, end)
        connection.ack("shipping", "m", joined["generation"], ranges)
    connection.call("consumer.leave", group="shipping", member="m", instance="i")


def _place(place: tuple[str, int, int]) -> dict[str, object]:
    topic, partition, offset = place
    return {"topic": topic, "partition": partition, "offset": offset}


def _undecided(client: txmq.Client, connection: Peer) -> None:
    for number in range(3):
        decider = ByChecker(f"c{number}")
        connection.half("orders", b"{}", decider, check_after_us=86_400_000_000)
    token = connection.half("orders", b'{"half": 1}', ByChecker("d"), check_after_us=86_400_000_000)
    client.call("tx.decide", token=token, outcome="COMMIT", operator="ada", reason="it is paid")


def _users(client: txmq.Client) -> None:
    password = VerifierArgs.of(make_verifier(PASSWORD))
    client.call("user.set", name=ADMIN, roles=["admin"], password=password, new=True)


def _logged_in(url: str) -> str:
    return url.replace("txmq://", f"txmq://{ADMIN}:{PASSWORD}@")


def views(url: str) -> dict[str, Any]:
    """Return what a broker says of its directory."""
    with txmq.connect(url, service="operator") as client:
        call = client.call
        groups = [row["group"] for row in call("group.list")["groups"]]
        shown = {
            "topics": [
                call("topic.show", name=row["name"]) for row in call("topic.list")["topics"]
            ],
            "groups": {name: call("group.show", group=name) for name in groups},
            "transactions": call("tx.list", state="undecided"),
            "letters": {
                name: call("dlq.list", group=name, select={"states": ["open", "abandoned"]})
                for name in groups
            },
            "selections": call("dlq.saved"),
            "plans": call("plan.list"),
            "policies": call("policy.list"),
            "delayed": call("message.delayed"),
            "users": call("user.list"),
            "audit": call("audit.list"),
        }
    found: dict[str, Any] = lasting(json.loads(json.dumps(shown)))
    return found


def lasting(value: Any) -> Any:
    """Return a view without what changes with time or at a start."""
    if isinstance(value, dict):
        return {name: lasting(one) for name, one in value.items() if name not in CHANGING}
    return [lasting(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main(Path(sys.argv[1]))
