"""The client's log: events with fields, to wherever the program that uses the client
wants them.

A program that has configured structlog finds them there; any other in the standard
library's logger "txmq", which says nothing until the program sets logging up. A library
prints nothing by itself.
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

LEVELS = logging.getLevelNamesMapping()
STANDARD = logging.getLogger("txmq")
STANDARD.addHandler(logging.NullHandler())


class Logger:
    """Looks at each event for where it is to go: programs set their logs up when they
    like.
    """

    def info(self, event: str, **fields: object) -> None:
        self._tell("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._tell("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._tell("error", event, fields)

    def critical(self, event: str, **fields: object) -> None:
        self._tell("critical", event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """An error, with the exception that is being handled."""
        self._tell("error", event, fields, exc_info=True)

    def _tell(
        self, level: str, event: str, fields: dict[str, Any], *, exc_info: bool = False
    ) -> None:
        if structlog.is_configured():
            more = {"exc_info": True} if exc_info else {}
            getattr(structlog.get_logger(), level)(event, **fields, **more)
        else:
            text = " ".join((event, *(f"{name}={value!r}" for name, value in fields.items())))
            STANDARD.log(LEVELS[level.upper()], "%s", text, exc_info=exc_info)


def get_logger() -> Logger:
    """The log of a module."""
    return Logger()
