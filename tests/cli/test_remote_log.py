"""The log of a broker, copied through it."""

from __future__ import annotations

from pathlib import Path

import pytest

import txmq
from txmq.broker.data_directory.storage import open_directory
from txmq.cli.running_log import remote_log
from txmq.config.broker import BrokerSettings
from txmq.errors import BadRequest
from txmq.model.units import MIB
from txmq.store.filesystem import RealFileSystem
from txmq.store.log.log import lock_directory
from txmq.store.log.segment import list_segments
from txmq.store.log_copy import copy_log
from txmq.store.snapshot import snapshot_positions
from txmq.testing.broker_thread import BrokerThread
from txmq.testing.wait import wait_until

FS = RealFileSystem()
SMALL = {"segment_bytes": MIB, "snapshot_bytes": MIB, "preallocate_bytes": 4_096}


class Unwatched:
    """A watch that does nothing."""

    def begin(self, total: int) -> None: ...
    def passed(self, read: int) -> None: ...


def test_a_log_is_copied_through_its_broker(tmp_path: Path) -> None:
    data, new = tmp_path / "data", tmp_path / "new"
    with BrokerThread(data, settings={"broker": SMALL}) as broker:
        with txmq.connect(broker.url) as client:
            for number in range(4):
                client.send("orders", bytes(700_000), key=str(number))
        wait_until(lambda: snapshot_positions(FS, str(data)), what="there is a snapshot")
        lock = lock_directory(FS, str(new))
        with remote_log(broker.url) as source:
            end = copy_log(FS, source, str(new), Unwatched())
            with pytest.raises(BadRequest, match="hold the log again"):
                source.open("snapshot/00000000000000000005.snap").size()
        lock.release()
        theirs, ours = list_segments(FS, str(data)), list_segments(FS, str(new))
        assert len(ours) > 2
        for one, other in zip(ours, theirs, strict=False):
            bound = min(one.end, end) - one.first
            same = [Path(found.path).read_bytes()[:bound] for found in (one, other)]
            assert same[0] == same[1]
    opened = open_directory(FS, BrokerSettings(data=new, preallocate_bytes=4_096), 1)
    assert opened.log.end == end
    assert "orders" in opened.state.topics
    opened.tables.close()
    opened.log.close()
