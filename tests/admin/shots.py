"""Pictures of the console: `make shots` writes them below docs.

A broker gets an hour's worth of a shop's life in some seconds: orders, a group that
fails for some keys, transactions without a decision, and what operators did.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from threading import Event, Thread
from typing import Any

import txmq
from tests.admin.test_pages import start
from tests.cli.peer import peer
from tests.fixtures_browser import Browser, found_programs, start_browser
from txmq.model.decider import ByChecker
from txmq.model.retry import RetryPolicy

WIDTH, HEIGHT = 1240, 1000
LIFE_S = 150.0  # of traffic, for the charts
# file below docs, page, dark
SHOTS = (
    ("console.png", "", False),
    ("pictures/console-group.png", "groups/billing", False),
    ("pictures/console-letters.png", "letters/refunds", False),
    ("pictures/console-messages.png", "topics/orders/messages", True),
)


def main() -> None:
    """Write the pictures below the directory named on the command line."""
    target, programs = Path(sys.argv[1]), found_programs()
    if programs is None:
        sys.exit("no chromium or chromedriver on PATH: install Debian's packages")
    with (
        tempfile.TemporaryDirectory() as scratch,
        start_browser(*programs) as browser,
    ):
        for _process, url, http in start(Path(scratch)):
            with shop(url):
                for name, page, dark in SHOTS:
                    shoot(browser, http + page, target / name, dark=dark)


def shoot(browser: Browser, address: str, target: Path, *, dark: bool) -> None:
    """Write a picture of a page."""
    driver = browser.driver
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    driver.set_window_size(WIDTH, HEIGHT)
    page = browser.open(address)
    assert page.errors == [], page.errors
    target.parent.mkdir(parents=True, exist_ok=True)
    size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.save_screenshot(str(target))
    sys.stdout.write(f"{target}\n")


@contextmanager
def shop(url: str) -> Iterator[None]:
    """A shop that has sold, billed and failed for a while, and goes on."""
    ended = Event()
    with txmq.connect(url, service="shop") as client, peer(url) as halves:
        for topic in ("orders", "payments", "shipments"):
            client.call("topic.create", name=topic, partitions=4)
        for number in range(12):
            client.send("payments", b'{"refund": %d}' % number, key=f"r-{number}", tag="refund")
        halves.dead_letters("refunds", "payments", 12)
        for _ in range(3):
            halves.half("payments", b"{}", ByChecker("shop"))
        work = [
            Thread(target=consume, args=(url, name, topics, ended))
            for name, topics in (("billing", ["orders"]), ("shipping", ["orders", "payments"]))
        ]
        work.append(Thread(target=sell, args=(client, ended)))
        for thread in work:
            thread.start()
        try:
            time.sleep(LIFE_S)
            yield
        finally:
            ended.set()
            for thread in work:
                thread.join()


def sell(client: txmq.Client, ended: Event) -> None:
    """Send orders, now more and now less of them."""
    random, number = Random(7), 0
    while not ended.wait(0.25):
        for _ in range(random.randint(10, 60)):
            number += 1
            customer = random.randint(1, 400)
            order = {
                "order": number,
                "customer": f"c-{customer}",
                "items": [{"sku": f"s-{customer % 17}", "count": number % 4 + 1}],
                "total": f"{number % 90 + 10}.50",
            }
            body, key = json.dumps(order).encode(), f"c-{customer}"
            headers = {"content-type": "application/json"}
            client.send_async("orders", body, key=key, tag="placed", headers=headers)
            client.send_async("payments", body, key=key, headers=headers)
        client.flush()


def consume(url: str, group: str, topics: list[str], ended: Event) -> None:
    """Consume; the orders of some customers fail for good in the group `billing`."""

    def handle(message: Any) -> None:
        if group == "billing" and message.key in ("c-13", "c-113", "c-213"):
            raise ValueError(f"customer {message.key} has no address")

    retry = RetryPolicy((0.2,))
    with txmq.connect(url, service=group) as client:
        consumer = client.consumer(
            group, topics=topics, mode="ordered", member=f"{group}-1", version="4.2.0", retry=retry
        )
        with closing(consumer):
            consumer.run(handle, stop=ended)


if __name__ == "__main__":
    main()
