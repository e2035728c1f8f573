"""What an operator does about dead letters: reconcile in Spark, remove the cause, replay the plan, close the rest.

The jobs run as anybody would run them, each as a process of its own; they find broker and database in the environment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from examples.order_flow.processes import ROOT, Process
from examples.order_flow.screen import Screen
from examples.order_flow.services import payment, shipping
from examples.order_flow.stage import Stage
from txmq.testing.wait import wait_until

JOB_LIMIT_S: Final = 300.0
GROUPS: Final = (payment.GROUP, shipping.GROUP)
# Nobody will unblock the account, so that another try is of no use.
REFUSED: Final = f"{payment.PaymentRefused.__module__}.{payment.PaymentRefused.__qualname__}"
REASON: Final = "the customer's account is blocked: the money is collected by other means"


class Plan(NamedTuple):
    """A frozen plan, as the file of a reconciliation has it."""

    group: str
    file: Path
    header: dict[str, Any]
    entries: list[dict[str, Any]]

    @property
    def replays(self) -> int:
        """How many letters it replays."""
        return int(self.header["replays"])

    def places(self, cls: str) -> list[tuple[str, int, int]]:
        """Where the letters of a class are."""
        return [(one["topic"], one["partition"], one["offset"]) for one in self.entries if one["class"] == cls]


def reconcile(stage: Stage, screen: Screen) -> list[Plan]:
    """Both groups' letters against log and tables, at the same time: a plan and a page about each."""
    files = {group: stage.directory / f"{group}-plan.jsonl" for group in GROUPS}
    _run(stage, screen, [_reconcile_job(stage, group, file) for group, file in files.items()])
    for group in GROUPS:
        screen.event(f"report on {group}: {stage.directory / f'{group}.html'}")
    return [_read(group, file) for group, file in files.items()]


def _reconcile_job(stage: Stage, group: str, plan: Path) -> Process:
    command = [str(ROOT / "spark" / "reconcile.py"), f"--group={group}", f"--plan={plan}"]
    command += [f"--report={stage.directory / f'{group}.html'}", "--business=orders", "--business-key=customer_id"]
    return stage.fleet.start(
        f"reconcile-{group}", [*command, "--version-from=header:version", f"--poison-type={REFUSED}"]
    )


def _read(group: str, file: Path) -> Plan:
    header, *entries = (json.loads(line) for line in file.read_text("ascii").splitlines())
    return Plan(group, file, header, entries)


def fix(stage: Stage, screen: Screen) -> None:
    """Enters the customs codes that were missing."""
    statement = "UPDATE parts SET customs_code = 'HS-' || part_id WHERE customs_code IS NULL RETURNING part_id"
    screen.event(f"fixed: customs codes entered for {len(stage.query(statement))} parts", "green")


def replay(stage: Stage, screen: Screen, plans: Sequence[Plan]) -> int:
    """Runs the plans that replay anything; returns how many letters they do."""
    chosen = [plan for plan in plans if plan.replays]
    command = str(ROOT / "spark" / "replay.py")
    _run(
        stage,
        screen,
        [stage.fleet.start(f"replay-{plan.group}", [command, f"--plan={plan.file}"]) for plan in chosen],
    )
    return sum(plan.replays for plan in chosen)


def abandon(stage: Stage, screen: Screen, plans: Sequence[Plan]) -> int:
    """Closes the letters that nothing would come of; returns how many."""
    closed = 0
    with stage.client() as client:
        for plan in plans:
            if places := plan.places("poison"):
                named = {"group": plan.group, "letters": places, "operator": "order-flow", "reason": REASON}
                closed += len(client.call("dlq.abandon", **named)["done"])
    screen.event(f"abandoned: {closed} letters, because {REASON}")
    return closed


def _run(stage: Stage, screen: Screen, jobs: Sequence[Process]) -> None:
    """Waits for jobs and shows what they said."""

    def done() -> bool:
        for name, point in stage.fleet.tend():
            screen.event(f"{name} killed at {point}, started again", "red")
        return all(job.ended() == 0 for job in jobs)

    with screen.waiting(", ".join(job.name for job in jobs)):
        wait_until(done, JOB_LIMIT_S, what="the jobs are done")
    for job in jobs:
        screen.say(job.output())
