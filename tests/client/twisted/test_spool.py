"""Sends of a Twisted client with a spool that are cancelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twisted.internet.defer import CancelledError

import txmq.twisted
from tests.client.reactor_thread import InReactor
from txmq.recover.local.spools import KnownTopic, SpoolDirectory, scan


def test_to_cancel_a_send_takes_nothing_back(
    reactor: Any, in_reactor: InReactor, tmp_path: Path
) -> None:
    SpoolDirectory(str(tmp_path)).remember_topics({"left": KnownTopic(1, 1, 1)})

    async def scene() -> None:
        client = txmq.twisted.connect(reactor, "txmq://127.0.0.1:1", spool=tmp_path, timeout=2.0)
        sent = [client.send("left", b"%d" % n, key="k") for n in range(20)]
        sent[3].addErrback(lambda failure: failure.trap(CancelledError))
        sent[3].cancel()
        closed = client.close()
        assert all([(await one).spooled for at, one in enumerate(sent) if at != 3])
        await closed

    in_reactor(scene)
    assert [message.body for message in scan(str(tmp_path))] == [b"%d" % n for n in range(20)]
