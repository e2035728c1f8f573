"""Scans of parcels, sent without a transaction: what matters is that none is lost, and
that nobody waits for the broker.

While no broker answers, sends wait in a spool on local disk. A process that is killed
then leaves its spool to the next one, which sends what is in it first.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from threading import Event
from typing import Final

import txmq
from examples.order_flow.journal import Journal
from examples.order_flow.services.context import ServiceContext, on_term

TOPIC: Final = "parcel-scanned"
SCANNERS: Final = tuple(f"scanner-{number}" for number in range(5))
EVERY_S: Final = 0.05
SPOOLS: Final = "spools"  # in the directory for what is on local disk
# Lines "SCANNER NUMBER" of a journal of its own: scans about to be sent, and those with
# a receipt.
SENT, KEPT = "tracking.sent", "tracking.kept"
DRAIN_S: Final = 30.0


def run(context: ServiceContext) -> None:
    stop = Event()
    on_term(stop.set)
    sent, kept = (Journal(context.local / name) for name in (SENT, KEPT))
    numbers = Counter(dict(read_scans(context.local / SENT)))  # the last ones win
    with txmq.connect(context.broker, service="tracking", spool=context.local / SPOOLS) as client:
        while not stop.wait(EVERY_S):
            numbers.update(SCANNERS)
            for scanner in SCANNERS:
                sent.count(scanner, numbers[scanner])
            scans = [txmq.Message(b"%d" % numbers[one], key=one) for one in SCANNERS]
            receipts = client.send_batch(TOPIC, scans)
            for scanner in SCANNERS:
                kept.count(scanner, numbers[scanner])
            if spooled := sum(receipt.spooled for receipt in receipts):
                context.journal.count("spooled", spooled)
        client.spool.wait(DRAIN_S)


def read_scans(path: Path) -> list[tuple[str, int]]:
    """Return scanner and number of the scans in a journal."""
    lines = path.read_text("ascii").splitlines() if path.exists() else []
    return [(scanner, int(number)) for scanner, number in map(str.split, lines)]
