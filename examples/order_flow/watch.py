"""The watch over dead letters while the services work: alerts in a topic and a table.

It is killed once, between the table and the topic, and started again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from examples.order_flow.services import payment, shipping

ALERTED: Final = "SELECT DISTINCT consumer_group FROM alerts"
NAME: Final = "watch"
TOPIC: Final = "alerts"
TABLE: Final = "alerts"
GROUPS: Final = (payment.GROUP, shipping.GROUP)
EVERY_S: Final = 2
# A flood is ten letters within five seconds, and one of a hundred messages.
RULES: Final = ("--flood=10", "--window=5", "--share=1", "--age=5")


def command(checkpoint: str) -> Sequence[str]:
    """Return the arguments for Python; the environment names broker and database."""
    groups = [f"--group={group}" for group in GROUPS]
    places = [f"--alerts={TOPIC}", f"--alerts-table={TABLE}", f"--checkpoint={checkpoint}"]
    return ["-m", "txmq_spark", "watch", *groups, *places, f"--every={EVERY_S}", *RULES]
