"""The README's first transaction, as it stands there."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.client.real import RealBroker
from tests.document_examples import blocks
from tests.tx.postgres.support import rows
from txmq.testing.wait import PATIENCE_S, wait_until


def block(language: str, number: int) -> str:
    """Return a block of README."""
    [text] = [one.text for one in blocks("README.md") if one[1:3] == (language, number)]
    return text


def test_the_first_transaction_does_what_it_says(
    deciding: RealBroker, shared_database: str
) -> None:
    rows(shared_database, "DROP TABLE IF EXISTS orders, lines, charges CASCADE")
    rows(shared_database, block("sql", 1))
    program = block("python", 2).replace("txmq://127.0.0.1:7650", deciding.url)
    with subprocess.Popen(
        [sys.executable, "-c", f"DSN = {shared_database!r}\n{program}"],
        stderr=subprocess.PIPE,
    ) as process:
        try:
            wait_until(
                lambda: rows(shared_database, "SELECT FROM charges"),
                what="the order is charged",
            )
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=PATIENCE_S)[1] == b""
            assert process.returncode == 0
        finally:
            process.kill()
    assert rows(shared_database, "SELECT id, customer FROM orders") == [(1, "c-7")]
    rows(shared_database, "DROP TABLE orders, charges")
