"""Why a message failed, in a form that the broker keeps with it and groups by."""

from __future__ import annotations

import re
import traceback
from hashlib import blake2b
from pathlib import PurePath
from typing import NamedTuple

TYPE, TEXT = 256, 4_096  # bytes that the broker keeps
FRAMES = 3  # the innermost ones tell where it failed; line numbers would change with every edit
NORMALISED = 200
BASES = 16  # of its class that are told
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-fA-F]+|[0-9a-fA-F]{8}-[0-9a-fA-F-]{27}|\d+")
_SPACE = re.compile(r"\s+")


class Failure(NamedTuple):
    """`type` and `text` of an exception, and a `fingerprint` that the same failure of
    other messages has too.
    """

    type: str = ""
    text: str = ""
    fingerprint: str = ""
    bases: tuple[str, ...] = ()  # names of its class's bases: a retry policy may mean them


def failure_of(error: BaseException | str | None) -> Failure:
    """The failure that an exception, or a text, describes."""
    if error is None:
        return Failure()
    if isinstance(error, str):
        return Failure("", _sendable(error), _hash("", error))
    name = _name(type(error))
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    places = [f"{PurePath(frame.filename).name}:{frame.name}" for frame in frames]
    text = "".join(traceback.format_exception(error))
    bases = tuple(
        _name(base)[:TYPE]
        for base in type(error).__mro__[1:]
        if base not in (BaseException, object)
    )
    return Failure(name[:TYPE], _sendable(text), _hash(name, str(error), *places), bases[:BASES])


def _name(kind: type) -> str:
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _sendable(text: str) -> str:
    """As much of a text as is kept; of a long one its end, where a traceback says what
    happened.
    """
    return text.encode(errors="replace")[-TEXT:].decode(errors="ignore")


def _hash(name: str, text: str, *places: str) -> str:
    normal = _SPACE.sub(" ", _VARIABLE.sub("#", text)).strip().lower()[:NORMALISED]
    joined = "\n".join((name, normal, *places))
    return blake2b(joined.encode(errors="replace"), digest_size=8).hexdigest()
