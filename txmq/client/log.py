"""The client's log: events with fields, sent to the log of the user's program.

Where the program has configured structlog, events go there. Otherwise they go to the
standard library's logger "txmq", which is silent until the program configures logging.
A library prints nothing by itself. A program that never loaded structlog has not
configured it: then nothing is loaded for it.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

LEVELS = logging.getLevelNamesMapping()
AGAIN_S = 60.0  # between two warnings of one trouble
STANDARD = logging.getLogger("txmq")
STANDARD.addHandler(logging.NullHandler())


class Logger:
    """Chooses the destination at each event: programs configure logging at any time."""

    def info(self, event: str, **fields: object) -> None:
        self._log("info", event, fields)

    def warning(
        self, event: str, *, exc_info: BaseException | None = None, **fields: object
    ) -> None:
        self._log("warning", event, fields, exc_info)

    def error(self, event: str, **fields: object) -> None:
        self._log("error", event, fields)

    def critical(self, event: str, **fields: object) -> None:
        self._log("critical", event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Log an error with the exception that is being handled."""
        self._log("error", event, fields, sys.exc_info()[1])

    def _log(
        self,
        level: str,
        event: str,
        fields: dict[str, Any],
        error: BaseException | None = None,
    ) -> None:
        """Log an event. What the program configured for that must not end its work."""
        try:
            _write(level, event, fields, error)
        except Exception:  # noqa: BLE001  # of a processor, filter or handler of the program
            if logging.raiseExceptions:
                traceback.print_exc()


def _write(level: str, event: str, fields: dict[str, Any], error: BaseException | None) -> None:
    structlog = sys.modules.get("structlog")
    if structlog is not None and structlog.is_configured():
        more = {} if error is None else {"exc_info": error}
        getattr(structlog.get_logger(), level)(event, **fields, **more)
    else:
        text = " ".join((event, *(f"{name}={value!r}" for name, value in fields.items())))
        STANDARD.log(LEVELS[level.upper()], "%s", text, exc_info=error)


class LastingTrouble:
    """Warnings of a trouble that lasts: at first, then once a minute, and its end."""

    def __init__(
        self, event: str, *, clock: Callable[[], float] = time.monotonic, **fields: object
    ) -> None:
        self._event, self._clock = event, clock
        self._fields: dict[str, Any] = fields
        self._began: float | None = None
        self._warned = 0.0

    def warn(self, error: BaseException) -> None:
        """Warn that the trouble is there, or goes on."""
        now = self._clock()
        if self._began is None:
            self._began = now
        elif now < self._warned + AGAIN_S:
            return
        self._warned = now
        lasted = round(now - self._began)
        get_logger().warning(self._event, **self._fields, error=str(error), for_s=lasted)

    def over(self) -> None:
        """Say that it is over, where it was there."""
        if self._began is not None:
            lasted, self._began = round(self._clock() - self._began), None
            get_logger().info(f"{self._event}_over", **self._fields, for_s=lasted)


def get_logger() -> Logger:
    """Return a logger for a module."""
    return Logger()
