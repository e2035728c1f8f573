"""Threads that gevent or eventlet have replaced are refused, before anything hangs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from txmq.testing.wait import PATIENCE_S

PROGRAM = """
import {module}
{patch}
import txmq
from txmq.errors import ConfigError
try:
    txmq.connect("txmq://127.0.0.1:7650").close()
except ConfigError as refused:
    print(refused.message)
else:
    print("connected")
"""
REFUSED = "has replaced threads or select of this process, and calls would hang"


@pytest.mark.parametrize(
    ("module", "patch", "told"),
    [
        ("gevent.monkey", "gevent.monkey.patch_all()", f"gevent {REFUSED}"),
        ("gevent.monkey", "gevent.monkey.patch_all(thread=False, socket=False)", "connected"),
        ("eventlet", "eventlet.monkey_patch()", f"eventlet {REFUSED}"),
        ("eventlet", "eventlet.monkey_patch(thread=False)", f"eventlet {REFUSED}"),
        ("eventlet", "eventlet.monkey_patch(time=True)", "connected"),
        ("eventlet", "", "connected"),
    ],
)
def test_threads_that_are_replaced_are_refused(module: str, patch: str, told: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM.format(module=module, patch=patch)],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert ran.stdout.strip().rpartition(": ")[2] == told
