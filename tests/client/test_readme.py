"""The README's first transaction, as it stands there."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.client.real import RealBroker
from tests.tx.postgres.support import rows
from txmq.testing.wait import PATIENCE_S, wait_until

README = Path(__file__).parents[2] / "README.md"


def block(language: str) -> str:
    """The first block of code in that language, in the first transaction's section."""
    section = README.read_text().partition("## A first transaction\n")[2]
    found = re.search(rf"```{language}\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_first_transaction_does_what_it_says(
    deciding: RealBroker, shared_database: str
) -> None:
    rows(shared_database, "DROP TABLE IF EXISTS orders, lines, charges CASCADE")
    rows(shared_database, block("sql"))
    program = block("python").replace("txmq://127.0.0.1:7650", deciding.url)
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
