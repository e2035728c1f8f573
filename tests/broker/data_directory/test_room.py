"""Rows that wait to be written are bounded where background work makes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from twisted.internet.task import Clock

from tests.broker.support import at_once
from txmq.broker.data_directory import storage
from txmq.broker.data_directory.storage import StorageService, open_directory
from txmq.broker.engine.engine import Engine
from txmq.config.broker import BrokerSettings
from txmq.core.topics.topics import CreateTopic
from txmq.store.filesystem import RealFileSystem
from txmq.store.tables import LETTER_NOTES


def test_many_rows_are_written_before_background_work_makes_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "CROWDED_ROWS", 5)
    settings, fs, clock = BrokerSettings(data=tmp_path / "data"), RealFileSystem(), Clock()
    opened = open_directory(fs, settings, 1)
    engine = Engine(opened.log, opened.state, clock=clock, now=lambda: 1, in_thread=at_once)
    service = StorageService(fs, engine, opened.tables, settings, at_once)
    engine.boot("test")
    engine.submit(CreateTopic("t", 1), lambda _reply: None)
    for _ in range(5):
        clock.advance(0)
    assert service.has_room()
    refused = 0
    for _ in range(9):
        for number in range(5):
            opened.tables[LETTER_NOTES].put(bytes((number,)), (number,))
        refused += not service.has_room()
    assert refused == 9
    assert opened.tables.position == opened.log.durable
    service.close()
    opened.log.close()
