"""A broker with a full disk ends in time, and reports that it owes replies."""

from __future__ import annotations

from pathlib import Path

import pytest

import txmq
from tests.cli.support import reply
from tests.system import full_disk_broker
from txmq.errors import TxmqError
from txmq.testing.processes import running
from txmq.testing.wait import PATIENCE_S, wait_until

SETTINGS = "[broker]\npreallocate_bytes = 4096\ndrain_s = 0.5\n"


def test_a_full_disk_does_not_keep_a_broker_from_ending(tmp_path: Path) -> None:
    flag, config = tmp_path / "full", tmp_path / "broker.toml"
    config.write_text(SETTINGS, "utf-8")
    where = (
        "broker",
        "--create-topics",
        "--config",
        str(config),
        "--data",
        str(tmp_path / "data"),
        "--listen",
        "127.0.0.1:0",
    )
    with running(tmp_path, str(flag), *where, command=full_disk_broker.run) as process:
        url = process.first_line().removeprefix("ready ")
        client = txmq.connect(url, service="s", delivery_timeout=1.0)
        client.send("t", b"first", partition=0)
        flag.touch()
        owed = client.send_async("t", bytes(50_000), partition=0)
        wait_until(lambda: client.call("broker.show")["read_only"], what="a broker that only reads")
        assert process.terminate() == 1  # or it would never end
        with pytest.raises(TxmqError):
            owed.result(PATIENCE_S)
        client.close()
    assert "broker.not_drained" in process.err.read_text()
    assert (
        process.err.read_text()
        .splitlines()[-1]
        .startswith("txmq: the broker ended before all was on disk")
    )
    flag.unlink()
    with running(tmp_path, *where) as process:
        found = reply(
            "tail", "t", "--no-follow", broker=process.first_line().removeprefix("ready ")
        )
        assert found["body"] == "first"
        assert process.terminate() == 0
