"""The example of the hook that lies, as its users run it."""

from __future__ import annotations

import subprocess
import sys

import txmq
from tests.client.real import ROOT, RealBroker

FOUND = """\
way                       the end             rows  messages
SQLAlchemy, after_commit  returns             0     1
SQLAlchemy, txmq          TransactionAborted  0     0
Django, on_commit         returns             0     1
Django, txmq              TransactionAborted  0     0
"""


def test_hooks_publish_a_phantom_and_txmq_does_not(
    deciding: RealBroker, shared_database: str
) -> None:
    command = [sys.executable, "-m", "examples.phantom", shared_database, deciding.url]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (found.stdout, found.returncode) == (FOUND, 0), found.stderr
    with txmq.connect(deciding.url, service="test") as client:
        names = [topic["name"] for topic in client.call("topic.list")["topics"]]
    assert [name for name in names if name.startswith("phantom-")] == []
