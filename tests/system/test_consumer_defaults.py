"""The broker's settings of new consumer groups act, and leave existing groups alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from txmq import connect
from txmq.client.blocking.client import Client
from txmq.config.broker import load_broker
from txmq.errors import ConfigError, GroupMismatch
from txmq.testing.own_broker import OwnBroker

SETTINGS = "[consumers]\nlease_s = {}\nsession_s = {}\n"


def times(client: Client, group: str, **options: Any) -> tuple[int, int]:
    """Return the lease and the session of a group, in milliseconds, after a member with
    these options has joined it.
    """
    with client.consumer(group, ["orders"], **options):
        settings = client.call("group.show", group=group)["settings"]
    return settings["lease_us"] // 1_000, settings["session_us"] // 1_000


def test_a_new_group_has_the_settings_of_the_broker_and_keeps_them(tmp_path: Path) -> None:
    with OwnBroker(tmp_path, SETTINGS.format(7, 9)) as broker:
        with connect(broker.url) as client:
            client.call("topic.create", name="orders", partitions=1)
            assert times(client, "plain") == (7_000, 9_000)
            assert times(client, "own", lease=20.0) == (20_000, 9_000)
            with pytest.raises(GroupMismatch):
                times(client, "own", lease=21.0)
        broker.stop()
        (tmp_path / "broker.toml").write_text(SETTINGS.format(8, 10))
        broker.start()
        with connect(broker.url) as client:
            assert times(client, "plain") == (7_000, 9_000)
            assert times(client, "own", lease=20.0) == (20_000, 9_000)
            assert times(client, "new") == (8_000, 10_000)


@pytest.mark.parametrize(("lease", "session"), [(0, 9), (43_201, 9), (7, 0), (7, 3_601)])
def test_times_that_no_group_may_have_are_refused(tmp_path: Path, lease: int, session: int) -> None:
    file = tmp_path / "broker.toml"
    file.write_text(SETTINGS.format(lease, session))
    with pytest.raises(ConfigError, match=r"consumers\.(lease|session)_s"):
        load_broker(file, {"data": tmp_path})
