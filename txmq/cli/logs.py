"""The log of a broker's process: one JSON object a line on standard error, or text on a
terminal.

What belongs to users stays out of it: passwords, bodies, keys and headers of messages,
and the rows that PostgreSQL quotes in its errors. A transaction's token is no secret
but its name, and stays. Nothing that clients send can forge an event: what would begin
another line, or steer a terminal, is escaped.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from txmq.cli.output import printable

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

REDACTED = "[redacted]"
SECRET_NAMES = re.compile(
    r"(auth|authorization|body|bodies|credentials|dsn|headers|keys?|login|passw(or)?d|secret|.*_(password|secret|key|token))"
)
SECRET_PARTS = (
    (
        re.compile(r"(\b\w+://[^\s:@/]*:)[^\s@]*@"),
        rf"\1{REDACTED}@",
    ),  # postgresql://user:password@host
    (
        re.compile(r"(\bpassword\s*=\s*)('(?:[^'\\]|\\.)*'|[^\s&]+)", re.IGNORECASE),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(\bbearer\s+)\S+", re.IGNORECASE), rf"\1{REDACTED}"),
    (
        re.compile(r"^(DETAIL|CONTEXT|QUERY|STATEMENT|LINE \d+):.*$", re.MULTILINE),
        rf"\1: {REDACTED}",
    ),
)
TRACEBACKS = ("exception", "traceback")
INDENT = "\n    "
TWISTED_LEVELS = {
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "error": "error",
    "critical": "critical",
}


def configure(*, as_json: bool) -> None:
    """Set structlog up for this process; on a terminal it prints text unless JSON is
    asked for.
    """
    import structlog

    text = sys.stderr.isatty() and not as_json
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            redact,
            *_renderers(text=text),
        ],
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _renderers(*, text: bool) -> tuple[Processor, ...]:
    import structlog

    if text:
        return escape, structlog.dev.ConsoleRenderer(
            exception_formatter=structlog.dev.plain_traceback
        )
    return (structlog.processors.JSONRenderer(),)  # JSON escapes by itself


def redact(_logger: object, _method: str, event: EventDict) -> EventDict:
    """A processor: takes out what is secret by its name, and passwords and quoted rows
    in any text.
    """
    return {name: _clean(name, value) for name, value in event.items()}


def _clean(name: str, value: object) -> Any:  # whatever was logged
    if SECRET_NAMES.fullmatch(name.lower()):
        return REDACTED
    match value:
        case bytes() | bytearray() | memoryview():
            return f"{len(value)} bytes"
        case Mapping():
            return {str(inner): _clean(str(inner), item) for inner, item in value.items()}
        case list() | tuple():
            return [_clean(name, item) for item in value]
        case bool() | int() | float() | None:
            return value
    text = str(value)
    for pattern, replacement in SECRET_PARTS:
        text = pattern.sub(replacement, text)
    return text


def escape(_logger: object, _method: str, event: EventDict) -> EventDict:
    """A processor: escapes what is not printable; only tracebacks keep their lines,
    indented.
    """
    return {
        name: INDENT.join(map(printable, value.splitlines() if name in TRACEBACKS else [value]))
        if isinstance(value, str)
        else value
        for name, value in event.items()
    }


def bridge_twisted() -> None:
    """Pass what Twisted logs on to structlog, once in a process: nothing else of
    Twisted's log is printed then.
    """
    from typing import cast

    from twisted.logger import ILogObserver, globalLogBeginner

    observer = cast(
        "ILogObserver", observe
    )  # any callable is one, which zope's interfaces cannot tell mypy
    globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False)


def observe(event: dict[str, Any]) -> None:
    """An observer of Twisted's log."""
    import structlog
    from twisted.logger import formatEvent

    level = event["log_level"].name if event.get("log_level") is not None else "info"
    fields = {"text": formatEvent(event), "namespace": event.get("log_namespace", "")}
    failure = event.get("log_failure")
    if failure is not None:
        fields["exception"] = failure.getTraceback()
    getattr(structlog.get_logger(), TWISTED_LEVELS[level])("twisted", **fields)
