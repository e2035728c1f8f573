"""Refusal of threads that are none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from txmq.errors import ConfigError

# modules of the libraries, and the question to each whether it has patched threads
_QUESTIONS: dict[str, Callable[[Any], bool]] = {
    "gevent.monkey": lambda monkey: monkey.is_module_patched("threading"),
    "eventlet.patcher": lambda patcher: (
        # with select it takes poll away
        patcher.is_monkey_patched("thread") or patcher.is_monkey_patched("select")
    ),
}


def require_threads() -> None:
    """Require the threads, sockets and poll of the system. Raises ConfigError.

    With those of gevent and eventlet, calls wait for what nobody does, and time-outs of
    sockets are ignored.
    """
    for name, is_patched in _QUESTIONS.items():
        module = sys.modules.get(name)
        if module is not None and is_patched(module):
            library = name.partition(".")[0]
            raise ConfigError(
                "connect",
                f"{library} has replaced threads or select of this process, and calls would hang",
                hint="use workers that are threads or processes, such as gunicorn's gthread and"
                " Celery's prefork or threads, or patch without threads, sockets and select",
            )
