"""Processes killed at every crash point of their spool: each message that had a receipt
is at the broker once, in the order of its key, or among the refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.client.real import RealBroker
from txmq.client.blocking.client import Client
from txmq.recover.local.spools import scan
from txmq.recover.spool_drain import drain_spools
from txmq.testing.forked import run_source
from txmq.testing.processes import run_script, running
from txmq.testing.wait import PATIENCE_S, wait_until

Connect = Callable[..., Client]
KEYS = 3
# The places at which a process dies: without a broker, and with one.
OFFLINE = ("spool.created", "spool.before_write", "spool.after_write:3")
DRAINING = (
    "spool.before_mark",
    "spool.after_mark",
    "spool.after_split",
    "spool.before_refuse",
    "spool.after_refuse",
    "spool.after_skip",
    "spool.before_remove",
)
# Each child sends without a broker, notes the messages that have receipts, and drains.
CHILDREN = """
import json, os, sys, time
from pathlib import Path
import txmq
from txmq.crashpoints import VARIABLE
from txmq.testing.wait import wait_until
url, root, points, keys = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
pids = {}
for point in points:
    pids[point] = os.fork()
    if pids[point]:
        continue
    os.environ[VARIABLE] = point
    directory = root / point
    acked = open(root / f"{point}.acked", "ab", buffering=0)
    client = txmq.connect(url, service="spoolers", spool=directory)
    topic = point.replace(":", "-")
    for number in range(10):
        batch = [txmq.Message(b"%d.%d" % (key, number), key=str(key)) for key in range(keys)]
        for sent in batch[:1] if number % 2 else ():
            client.send(topic, sent.body, key=sent.key)
            acked.write(sent.body + b"\\n")
            batch = batch[1:]
        client.send_batch(topic, batch)
        acked.write(b"".join(one.body + b"\\n" for one in batch))
        if number == 5 and point != "spool.before_remove":
            client.send(topic, b"refused", partition=99)
    (root / f"{point}.offline").touch()
    client.spool.wait(120)
    client.close()
    os._exit(0)
for point, pid in pids.items():
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9, point
"""

RETRY = """
import os, sys
from txmq.crashpoints import VARIABLE
from txmq.recover.local.spools import retry_refused
if not (pid := os.fork()):
    os.environ[VARIABLE] = "spool.after_retry"
    retry_refused(sys.argv[1])
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
"""


def learn_and_grow(
    connect: Connect, broker: RealBroker, root: Path, points: tuple[str, ...]
) -> None:
    """Let each child know its topic as it was before it grew."""
    for point in points:
        topic = point.replace(":", "-")
        with connect(broker.url, spool=root / point) as client:
            client.call("topic.create", name=topic, partitions=2)
            client.send_async(topic, b"first", key="first").result(PATIENCE_S)
            client.call("topic.grow", name=topic, partitions=5)


def check(broker: RealBroker, root: Path, point: str) -> None:
    acked = (root / f"{point}.acked").read_text().split()
    found = broker.read(point.replace(":", "-"))
    bodies = [one.body.decode() for one in found]
    assert len(set(bodies)) == len(bodies), f"{point}: doubled"
    assert set(acked) <= set(bodies), f"{point}: lost {set(acked) - set(bodies)}"
    for key in range(KEYS):
        own = [body for body in bodies if body.startswith(f"{key}.")]
        assert own == sorted(own), f"{point}: order of the key {key}"


def check_retry(broker: RealBroker, directory: Path) -> None:
    """A refused message that is tried again stays one, whenever the process dies."""
    run_script(RETRY, str(directory))
    for _time in range(2):
        result = drain_spools(broker.url, str(directory), timeout=PATIENCE_S, refused=True)
        assert result[:3] == (0, 0, 1)
    assert [message.body for message in scan(str(directory))] == [b"refused"]


def test_a_process_killed_at_each_point_loses_and_doubles_nothing(
    own_broker: RealBroker, connect: Connect, tmp_path: Path
) -> None:
    root = tmp_path / "spools"
    root.mkdir()
    points = (*OFFLINE, *DRAINING)
    learn_and_grow(connect, own_broker, root, points)
    own_broker.kill()
    arguments = (own_broker.url, str(root), json.dumps(points), str(KEYS))
    with running(tmp_path, CHILDREN, *arguments, command=run_source) as children:
        offline = [root / f"{point}.offline" for point in DRAINING]
        wait_until(lambda: all(path.exists() for path in offline))
        own_broker.start()
        assert children.status(PATIENCE_S) == 0, children.unexpected_end()
    refused = {}
    for point in points:
        client = connect(own_broker.url, spool=root / point)
        client.spool.wait(PATIENCE_S)
        client.close()
        refused[point] = [message.body for message in scan(str(root / point))]
        check(own_broker, root, point)
    check_retry(own_broker, root / "spool.after_mark")
    gets_there = (*OFFLINE, "spool.before_remove")
    assert refused == {point: [] if point in gets_there else [b"refused"] for point in points}
