"""Recoverers killed at each crash point; the next one finishes their work."""

from __future__ import annotations

import json

from tests.recover.world import RecoveryWorld
from txmq.testing.processes import run_script

POINTS = (
    "recovery.before_outcome",
    "recovery.after_outcome",
    "recovery.before_finish",
    "recovery.after_finish",
)
RECOVERERS = """
import json, os, sys
from uuid import UUID
from txmq.recover.recoverer import XaRecoverer
from txmq.config.broker import XaDatabaseSettings, XaSettings
from txmq.crashpoints import VARIABLE
plan = json.loads(sys.argv[1])
databases = tuple(XaDatabaseSettings(name=name, dsn=dsn) for name, dsn in plan["dsns"].items())
for point in plan["points"]:
    pid = os.fork()
    if not pid:
        os.environ[VARIABLE] = point
        settings = XaSettings(database=databases, safety_s=0.001)
        recoverer = XaRecoverer(settings, plan["urls"], since=UUID(plan["since"]))
        while True:
            recoverer.run_pass()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9, point
"""


def test_a_recoverer_that_dies_anywhere_leaves_the_rest_to_the_next(world: RecoveryWorld) -> None:
    tokens = [world.begin() for _ in POINTS]
    plan = {
        "points": POINTS,
        "dsns": world.dsns,
        "urls": [broker.url for broker in world.brokers],
        "since": str(world.since),
    }
    run_script(RECOVERERS, json.dumps(plan))
    assert "ROLLED_BACK" in {world.state(token) for token in tokens}
    recoverer = world.recoverer(safety_s=0.001)
    recoverer.run_pass()
    world.clock.now += 1.0
    recoverer.run_pass()
    assert {world.state(token) for token in tokens} == {"ROLLED_BACK"}
    assert world.standing("a") == world.standing("b") == []
    world.audit()
