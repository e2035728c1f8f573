"""The consumer that docs/CONSUMERS.md begins with, as it stands there."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.client.real import RealBroker
from txmq.client.blocking.client import Client
from txmq.testing.wait import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "CONSUMERS.md"


def program(url: str) -> str:
    """Return the page's first program, for a broker."""
    found = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert found is not None
    assert "txmq://127.0.0.1:7650" in found[1]
    return found[1].replace("txmq://127.0.0.1:7650", url)


def first_body() -> bytes:
    """Return what README's first transaction sends, which the program gets first."""
    found = re.search(
        r"tx\.send\(\"orders\", b'(.*)', key=\"c-7\"\)", (ROOT / "README.md").read_text("utf-8")
    )
    assert found is not None
    assert '"amount"' in found[1]  # what the program reads: else it retries, and prints nothing
    return found[1].encode()


def test_the_first_consumer_does_what_the_page_says(
    own_broker: RealBroker, connect: Callable[..., Client]
) -> None:
    client = connect(own_broker.url)
    for key, body in (("c-7", first_body()), ("c-8", b'{"amount": 9000}'), ("c-9", b"no")):
        client.send("orders", body, key=key)
    with subprocess.Popen(
        [sys.executable, "-c", program(own_broker.url)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "charged c-7 9\n"
            wait_until(
                lambda: len([*client.letters("billing")]) == 2, what="two messages are dead letters"
            )
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
    errors = {letter.key: letter.error_type for letter in client.letters("billing", bodies=True)}
    assert errors == {"c-8": "__main__.CardRefused", "c-9": "json.decoder.JSONDecodeError"}
