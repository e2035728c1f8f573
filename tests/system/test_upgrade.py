"""Directories of releases, opened by this version: everything is there, and goes on."""

from __future__ import annotations

import json
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

import txmq
from tests.system import release_directory
from tests.system.release_directory import ADMIN, PASSWORD, SHOWN, lasting, serving, views
from txmq.broker.data_directory.storage import open_directory
from txmq.config.broker import load_broker
from txmq.core.events.base import EVENTS
from txmq.errors import UnsupportedFormat
from txmq.store.filesystem import RealFileSystem
from txmq.testing.wait import wait_until

BY = {"operator": ADMIN, "reason": "after the upgrade"}
RELEASES = sorted((Path(__file__).parents[1] / "golden").glob("directory-*.zip"))


def _unpack(archive: Path, directory: Path) -> dict[str, Any]:
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(directory / "data")
    shown: dict[str, Any] = lasting(json.loads((directory / "data" / SHOWN).read_text()))
    (directory / "data" / SHOWN).unlink()
    return shown


@pytest.mark.parametrize("archive", RELEASES, ids=lambda path: path.stem)
@pytest.mark.parametrize("index", ["with its index", "from its log"])
def test_a_directory_of_a_release_has_everything_and_goes_on(
    archive: Path, index: str, tmp_path: Path
) -> None:
    had = _unpack(archive, tmp_path)
    if index == "from its log":
        shutil.rmtree(tmp_path / "data" / "index")
    with serving(tmp_path) as process:
        url = process.first_line().replace("ready txmq://", f"txmq://{ADMIN}:{PASSWORD}@")
        assert _in_both(had, views(url)) == had
        with txmq.connect(url, service="shop") as client:
            _go_on(client)


def _go_on(client: txmq.Client) -> None:
    """Decide, replay and consume what the release has left."""
    tokens = [row["token"] for row in client.call("tx.list", state="undecided")["transactions"]]
    assert len(tokens) == 3
    for token in tokens:
        client.call("tx.decide", token=token, outcome="COMMIT", **BY)
    client.call("policy.set", group="billing", **BY)
    if client.call("plan.show", name="p")["state"] == "planned":
        client.call("plan.start", name="p", **BY)
    got: set[tuple[str, int, int]] = set()
    with client.consumer("billing", ["events"]) as consumer:
        for message in consumer:
            got.add((message.topic, message.partition, message.offset))
            consumer.ack(message)
            if len(got) == 40 - 1:  # one letter is abandoned
                break
    wait_until(lambda: client.call("plan.show", name="p")["state"] == "done", what="the plan")
    ends = client.call("topic.show", name="orders")["ends"]
    assert sum(ends) == 40 + 1 + len(tokens)


def _in_both(had: Any, has: Any) -> Any:
    """Return what this version shows, without fields that the release had not."""
    if isinstance(had, dict):
        return {name: _in_both(had[name], has[name]) for name in had}
    if isinstance(had, list) and len(had) == len(has):
        return [_in_both(one, other) for one, other in zip(had, has, strict=True)]
    return has


def test_an_older_version_refuses_what_it_cannot_read_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _unpack(RELEASES[-1], tmp_path)
    shutil.rmtree(tmp_path / "data" / "index")
    settings = load_broker(None, {"data": tmp_path / "data"}).broker
    [segment] = (tmp_path / "data" / "log").iterdir()
    before = segment.read_bytes()
    monkeypatch.delitem(EVENTS, 128)  # as if a plan were news
    with pytest.raises(UnsupportedFormat, match="run that version, or restore a backup"):
        open_directory(RealFileSystem(), settings, time.time_ns() // 1_000)
    assert segment.read_bytes() == before


def test_an_archive_is_made_by_the_same_program(tmp_path: Path) -> None:
    """So that the next release can have one."""
    release_directory.main(tmp_path / "directory.zip")
    assert {"topics", "groups", "plans", "users"} <= _unpack(
        tmp_path / "directory.zip", tmp_path
    ).keys()
