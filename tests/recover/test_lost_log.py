"""A broker with a new data directory, which does not know the old log's decisions."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

from structlog.testing import capture_logs

from tests.client.real import RealBroker
from tests.recover.world import SAFETY_S, RecoveryWorld
from txmq.client.blocking.connect import connect
from txmq.model.message import COMMIT
from txmq.tx.orphans import BranchAction, KnownOutcome


def test_nothing_is_concluded_from_a_log_that_was_replaced(
    two_dsns: dict[str, str], tmp_path: Path
) -> None:
    broker = RealBroker(tmp_path / "home")
    try:
        with closing(connect(broker.url, service="orders")) as client:
            world = RecoveryWorld([broker], [client], two_dsns)
            committed, undecided = (
                world.begin(stored=1, prepared=("a",)),
                world.begin(stored=1, prepared=("b",)),
            )
            recoverer = world.recoverer("b")
            recoverer.run_pass()
            world.decide(committed, COMMIT)
        broker.kill()
        shutil.rmtree(tmp_path / "home" / "data")
        broker.start()
        both = world.recoverer()
        with capture_logs() as logs:
            for _ in range(3):
                world.clock.now += SAFETY_S
                for one in (recoverer, both):
                    report = one.run_pass()
        found = {one.name: (one.outcome, one.action, one.needs_operator) for one in report.findings}
        left = (KnownOutcome.UNKNOWN_LOG, BranchAction.LEAVE, True)
        gids = {gid for name in two_dsns for gid in world.standing(name)}
        assert len(gids) == 2
        assert found == dict.fromkeys(gids, left)
        assert {log["what"] for log in logs if log["event"] == "xa.needs_operator"} == gids
        assert undecided.hex not in world.effects("b")
        for one in (recoverer, both):
            one.close()
    finally:
        broker.stop()
