"""Progress of Spark's stages, as `txmq-spark` tells it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from txmq.testing.wait import wait_until
from txmq_spark.session import progress


class Tracker:
    """A status tracker of Spark: two stages are at work, one has just ended."""

    def getActiveStageIds(self) -> list[int]:  # noqa: N802  # as of pyspark
        return [7, 4, 9]

    def getStageInfo(self, number: int) -> Any:  # noqa: N802
        if number == 9:
            return None
        return SimpleNamespace(numCompletedTasks=number, numTasks=40)


def test_a_job_tells_its_stages_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "TOLD_EVERY_S", 0.001)
    context = SimpleNamespace(statusTracker=Tracker)
    session: Any = SimpleNamespace(sparkContext=context)
    told = ""

    def is_told() -> bool:
        nonlocal told
        told += capsys.readouterr().err
        return "stage 4: 4 of 40 tasks; stage 7: 7 of 40 tasks" in told

    with progress.progress_told(session, "reconcile"):
        wait_until(is_told)
    assert told.startswith("reconcile: 0 s, stage 4")


def test_a_job_between_stages_says_so() -> None:
    idle = SimpleNamespace(getActiveStageIds=list)
    assert progress.stages_in_words(idle) == "between stages"
