"""The failure of a message, in the form in which the broker stores and groups it."""

from __future__ import annotations

import re
import traceback
from hashlib import blake2b
from pathlib import PurePath

from txmq.model.retry import FailureReport
from txmq.model.tracebacks import text_of, trace

MAX_TYPE, MAX_TEXT = 256, 4_096  # characters and bytes that the broker stores
FINGERPRINT_FRAMES = 3  # innermost stack frames; without line numbers, which edits change
FINGERPRINT_TEXT = 200  # characters of the error's text
MAX_BASES = 16  # names of base classes that are sent
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-fA-F]+|[0-9a-fA-F]{8}-[0-9a-fA-F-]{27}|\d+")
_SPACE = re.compile(r"\s+")


def describe_failure(error: BaseException | str | None) -> FailureReport:
    """Return the report of an exception or a text."""
    if error is None:
        return FailureReport()
    if isinstance(error, str):
        return FailureReport("", _sendable(error), _hash("", error))
    name = _name(type(error))
    frames = traceback.extract_tb(error.__traceback__)[-FINGERPRINT_FRAMES:]
    places = [f"{PurePath(frame.filename).name}:{frame.name}" for frame in frames]
    kind, *bases = error_classes(error)
    fingerprint = _hash(name, text_of(error), *places)
    return FailureReport(
        kind, _sendable(text_of(error, trace)), fingerprint, tuple(bases[:MAX_BASES])
    )


def error_classes(error: BaseException) -> list[str]:
    """Return the names of an error's class and of its bases, the nearest first."""
    return [
        _name(kind)[:MAX_TYPE]
        for kind in type(error).__mro__
        if kind is type(error) or kind not in (BaseException, object)
    ]


def _name(kind: type) -> str:
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _sendable(text: str) -> str:
    """Return the end of a text that is too long: a traceback ends with the error."""
    return text.encode(errors="replace")[-MAX_TEXT:].decode(errors="ignore")


def _hash(name: str, text: str, *places: str) -> str:
    normal = _SPACE.sub(" ", _VARIABLE.sub("#", text)).strip().lower()[:FINGERPRINT_TEXT]
    joined = "\n".join((name, normal, *places))
    return blake2b(joined.encode(errors="replace"), digest_size=8).hexdigest()
