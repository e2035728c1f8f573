"""The consumers that docs/CONSUMERS.md has as programs, as they stand there."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable

from tests.client.real import RealBroker
from tests.document_examples import ROOT, blocks
from tests.tx.postgres.support import rows
from txmq.client.blocking.client import Client
from txmq.testing.postgres_server import postgres_url
from txmq.testing.wait import PATIENCE_S, wait_until

PAGE = "docs/CONSUMERS.md"


def program(url: str, number: int = 1) -> str:
    """Return a program of the page, for a broker."""
    [text] = [one.text for one in blocks(PAGE) if one[1:3] == ("python", number)]
    assert "txmq://127.0.0.1:7650" in text
    return text.replace("txmq://127.0.0.1:7650", url)


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


def test_the_consumer_on_asyncio_does_what_the_page_says(
    own_broker: RealBroker, connect: Callable[..., Client], database: str
) -> None:
    rows(database, "CREATE TABLE charges (message text)")
    sent = connect(own_broker.url).send("orders", first_body())
    text = program(own_broker.url, 2).replace("postgresql://app@db/shop", postgres_url(database))
    with subprocess.Popen([sys.executable, "-c", text]) as process:
        try:
            wait_until(
                lambda: rows(database, "SELECT FROM charges"), what="the message took effect"
            )
            process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)
        finally:
            process.kill()
    assert rows(database, "SELECT message FROM charges") == [(sent.message_id,)]


def test_the_consumer_on_twisted_does_what_the_page_says(
    own_broker: RealBroker, connect: Callable[..., Client]
) -> None:
    connect(own_broker.url).send("orders", first_body(), key="c-7")
    text = program(own_broker.url, 3)
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        try:
            assert ran.stdout.readline() == "charged c-7\n"
            ran.send_signal(signal.SIGINT)
            ran.wait(PATIENCE_S)
        finally:
            ran.kill()
