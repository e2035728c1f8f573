"""Log of a broker, relay, resolver or recovery: JSON lines on standard error, or text
on a terminal.

The log holds no passwords, no bodies, keys or headers of messages, and no rows that
PostgreSQL quotes in its errors. The token of a transaction is its name, not a secret.
Line breaks and control characters are escaped, so that clients cannot forge events.
"""

from __future__ import annotations

import json
import re
import select
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from select import PIPE_BUF
from typing import TYPE_CHECKING, Any, cast

from txmq.model.printable import escape_unprintable

if TYPE_CHECKING:
    from typing import TextIO

    from structlog.typing import EventDict, Processor

PATIENCE_S = 0.02  # with a reader that is behind, before lines are lost
REDACTED = "[redacted]"
SECRET_NAMES = re.compile(
    r"(auth|authorization|body|bodies|credentials|dsn|headers|keys?|login|passw(or)?d|secret|.*_(password|secret|key|token))"
)
SECRET_PARTS = (
    # postgresql://user:password@host: up to the last @, which a password may have, too
    (re.compile(r"(\b\w+://[^\s:@/]*:)\S*@"), rf"\1{REDACTED}@"),
    # of libpq, with its escapes, of variables, and of dicts: sslpassword=, PGPASSWORD=
    (
        re.compile(
            r"""(\b\w*passw(?:or)?d(?:\s*=|["']\s*:)\s*)('(?:[^'\\]|\\.)*'?|"(?:[^"\\]|\\.)*"?|(?:\\.|[^\s&\\])+)""",
            re.IGNORECASE,
        ),
        rf"\1{REDACTED}",
    ),
    # libpq reads pass%77ord= in a URL
    (re.compile(r"([?&][^\s=&%]*%[^\s=&]*=)[^\s&]+"), rf"\1{REDACTED}"),
    # a token for HTTP, wherever it was put: as a user's name, into an address
    (re.compile(r"\btxmq_[\w-]{43}"), REDACTED),
    (re.compile(r"(\b(?:bearer|authorization:\s*basic)\s+)\S+", re.IGNORECASE), rf"\1{REDACTED}"),
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


class LossyStream:
    """A stream that loses lines rather than raise an error or wait.

    Its disk may be full, or nobody reads the pipe any more, or for now: a log viewer
    that is stopped, a terminal after Ctrl-S. An error would end what whoever logs is
    about, such as a timer or a request, and a wait would be everybody's.

    The first line that can be written again comes before the number of lost ones.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost = 0
        self._is_torn = False  # the last line that was begun
        self._room: select.poll | None = None
        with suppress(OSError, ValueError):  # it is no file, as in tests
            room = select.poll()
            room.register(stream.fileno(), select.POLLOUT)
            self._room = room

    def write(self, line: str) -> None:
        """Write a line, if it can be written."""
        try:
            self._put(line)
            if self._lost:
                lost, self._lost = self._lost, 0
                self._put(_lines_lost(lost))
        except (OSError, ValueError):  # ValueError: the stream is closed
            self._lost += 1

    def _put(self, line: str) -> None:
        text = "\n" + line if self._is_torn else line
        for start in range(0, len(text), PIPE_BUF):
            wait_s = 0.0 if self._lost else PATIENCE_S
            if self._room is not None and not self._room.poll(wait_s * 1_000):
                raise BlockingIOError
            self._stream.write(text[start : start + PIPE_BUF])
            self._stream.flush()
            self._is_torn = True
        self._is_torn = False

    def flush(self) -> None:
        """Do nothing: each line is flushed when it is written."""


def _lines_lost(lines: int) -> str:
    event = {
        "lines": lines,
        "event": "log.lines_lost",
        "level": "warning",
        "timestamp": datetime.now(UTC).isoformat(),
    }
    return json.dumps(event) + "\n"


def configure(*, as_json: bool) -> None:
    """Set structlog up for this process. Without `as_json` a terminal gets text."""
    import structlog

    text = sys.stderr.isatty() and not as_json
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            redact_event,
            *_renderers(text=text),
        ],
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", LossyStream(sys.stderr))),
    )


def _renderers(*, text: bool) -> tuple[Processor, ...]:
    import structlog

    if text:
        return escape_event, structlog.dev.ConsoleRenderer(
            exception_formatter=structlog.dev.plain_traceback
        )
    return (structlog.processors.JSONRenderer(),)  # JSON escapes by itself


def redact_event(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Remove secrets from an event: a processor of structlog.

    Fields are recognized by their names. Passwords and quoted rows are removed from all
    texts.
    """
    return {name: _redact_value(name, value) for name, value in event.items()}


def _redact_value(name: str, value: object) -> Any:  # noqa: ANN401  # any logged value
    if SECRET_NAMES.fullmatch(name.lower()):
        return REDACTED
    match value:
        case bytes() | bytearray() | memoryview():
            return f"{len(value)} bytes"
        case Mapping():
            return {str(inner): _redact_value(str(inner), item) for inner, item in value.items()}
        case list() | tuple():
            return [_redact_value(name, item) for item in value]
        case bool() | int() | float() | None:
            return value
    text = str(value)
    for pattern, replacement in SECRET_PARTS:
        text = pattern.sub(replacement, text)
    return text


def escape_event(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Escape unprintable characters of an event: a processor of structlog.

    Only tracebacks keep their lines, indented.
    """
    return {
        name: INDENT.join(
            map(escape_unprintable, value.splitlines() if name in TRACEBACKS else [value])
        )
        if isinstance(value, str)
        else value
        for name, value in event.items()
    }


def redirect_twisted() -> None:
    """Send the log of Twisted to structlog, once in a process."""
    from typing import cast

    from twisted.logger import ILogObserver, globalLogBeginner

    # zope's interfaces hide from mypy that any callable is an observer
    observer = cast("ILogObserver", observe_twisted)
    globalLogBeginner.beginLoggingTo([observer], redirectStandardIO=False)


def observe_twisted(event: dict[str, Any]) -> None:
    """Log an event of Twisted with structlog."""
    import structlog
    from twisted.logger import formatEvent

    level = event["log_level"].name if event.get("log_level") is not None else "info"
    # "SessionFactory starting on 7650" and the like: the broker says it otherwise
    if level == "info" and event.get("log_namespace") == "log_legacy":
        return
    fields = {"text": formatEvent(event), "namespace": event.get("log_namespace", "")}
    failure = event.get("log_failure")
    if failure is not None:
        fields["exception"] = failure.getTraceback()
    getattr(structlog.get_logger(), TWISTED_LEVELS[level])("twisted", **fields)
