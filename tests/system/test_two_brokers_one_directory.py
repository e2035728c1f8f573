"""Fault 142: two brokers on one data directory, whose lock file somebody removes."""

from __future__ import annotations

from pathlib import Path

import pytest

from txmq import connect
from txmq.errors import BrokerUnavailable, ConnectionLost, RequestTimeout
from txmq.testing.own_broker import OwnBroker
from txmq.testing.processes import running
from txmq.testing.wait import PATIENCE_S


def test_without_the_lock_file_a_second_broker_is_refused_and_the_first_goes_on(
    tmp_path: Path,
) -> None:
    with OwnBroker(tmp_path / "first") as broker, connect(broker.url, timeout=PATIENCE_S) as client:
        client.send("orders", b"1")
        (broker.data / "lock").unlink()
        arguments = (
            "broker",
            "--create-topics",
            "--data",
            str(broker.data),
            "--listen",
            "127.0.0.1:0",
        )
        with running(tmp_path / "second", *arguments) as second:
            assert second.status() == 1
        assert "in use by the process" in second.err.read_text()
        client.send("orders", b"2")
        broker.restart()
        client.send("orders", b"3")  # unlike a call, it waits for the new connection
        assert sum(client.call("topic.show", name="orders")["ends"]) == 3


def test_a_broker_whose_directory_was_taken_over_acknowledges_nothing_more(
    tmp_path: Path,
) -> None:
    """Elsewhere, where its flocks are not seen, another broker replaces the lock file
    first of all.
    """
    with OwnBroker(tmp_path / "first") as broker, connect(broker.url, timeout=PATIENCE_S) as client:
        client.send("orders", b"1")
        (tmp_path / "other").write_text("4711\n")
        (tmp_path / "other").rename(broker.data / "lock")
        with (
            connect(broker.url, timeout=1.0, retries=0) as hasty,
            pytest.raises((ConnectionLost, BrokerUnavailable, RequestTimeout)),
        ):
            hasty.send("orders", b"2")
        assert broker.process.status() != 0
        assert "taken over by the process 4711" in broker.log
        broker.start()
        assert client.send("orders", b"3").message_id
