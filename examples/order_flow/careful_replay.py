"""A replay of letters whose cause may still be there: a few letters go first, and the
plan stops by itself where they fail as before. Then the cause is removed, and it goes
on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import txmq

OPERATOR: Final = "order-flow"
# The first letters are watched; more than half of them failing alike stops the plan.
SETTINGS: Final = {
    "rate": 200, "ramp_s": 2, "canary": 5, "stop_after": 5, "stop_share": 0.5, "in_flight": 200,
}  # fmt: skip
PATIENCE_S: Final = 120.0
STOPS: Final = 5  # that are answered; then the plan stays as it is


def follow(client: txmq.Client, name: str, mend: Callable[[], str]) -> txmq.PlanStatus:
    """Follow a plan to its end. When it stops for the first time, `mend` removes the
    cause and says what it did.

    A letter of the first few that has died again meanwhile is replayed once more.
    """
    plan = client.plan(name)
    stops = 0
    while (shown := plan.wait(PATIENCE_S)).state == "paused" and stops < STOPS:
        print(f"stopped: {name}: {shown.why}", flush=True)
        if not stops:
            print(f"mended: {mend()}", flush=True)
        stops += 1
        # its circuit breaker may have opened, and waits for a message that succeeds
        client.call("group.resume", group=shown.group, operator=OPERATOR, reason="mended")
        plan.resume(operator=OPERATOR, reason="the cause is removed")
    if not stops:
        print(f"mended: {mend()}", flush=True)
    died = [(one.topic, one.partition, one.offset) for one in plan.letters("died_again")]
    if died:
        again = client.replay_letters(
            shown.group, died, operator=OPERATOR, reason="it failed before the cause was removed"
        )
        print(f"replayed again: {len(again.done)} letters of {shown.group}", flush=True)
    return shown


def report(shown: txmq.PlanStatus) -> str:
    """Return what became of the letters of a plan."""
    outcomes = ("processed", "died_again", "skipped", "ended", "delivered", "planned")
    counts = {name.replace("_", " "): getattr(shown, name) for name in outcomes}
    words = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{shown.name} is {shown.state}: {words or 'no letters'}"
