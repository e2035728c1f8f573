"""The client's log: events with fields, sent to the log of the user's program.

Where the program has configured structlog, events go there. Otherwise they go to the
standard library's logger "txmq", which is silent until the program configures logging.
A library prints nothing by itself. A program that never loaded structlog has not
configured it: then nothing is loaded for it.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

LEVELS = logging.getLevelNamesMapping()
STANDARD = logging.getLogger("txmq")
STANDARD.addHandler(logging.NullHandler())


class Logger:
    """Chooses the destination at each event: programs configure logging at any time."""

    def info(self, event: str, **fields: object) -> None:
        self._log("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._log("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._log("error", event, fields)

    def critical(self, event: str, **fields: object) -> None:
        self._log("critical", event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Log an error with the exception that is being handled."""
        self._log("error", event, fields, exc_info=True)

    def _log(
        self, level: str, event: str, fields: dict[str, Any], *, exc_info: bool = False
    ) -> None:
        structlog = sys.modules.get("structlog")
        if structlog is not None and structlog.is_configured():
            more = {"exc_info": True} if exc_info else {}
            getattr(structlog.get_logger(), level)(event, **fields, **more)
        else:
            text = " ".join((event, *(f"{name}={value!r}" for name, value in fields.items())))
            STANDARD.log(LEVELS[level.upper()], "%s", text, exc_info=exc_info)


def get_logger() -> Logger:
    """Return a logger for a module."""
    return Logger()
