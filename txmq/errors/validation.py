"""Mistakes that pydantic has found in input, in words for the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pydantic import ValidationError


class Mistake(NamedTuple):
    """The path of a wrong value, and the end of a sentence that begins with it."""

    where: tuple[str, ...]
    why: str


def first_mistake(error: ValidationError, *, unit: str) -> Mistake:
    """Return the first mistake; `unit` is the noun for the values ("setting").

    The value itself is left out: it may be a secret.
    """
    return mistake_of(error.errors(include_url=False, include_input=False)[0], unit=unit)


def mistake_of(found: Mapping[str, Any], *, unit: str) -> Mistake:
    """Return one of the mistakes that pydantic has found."""
    where = tuple(map(str, found["loc"]))
    match found["type"]:
        case "value_error":
            return Mistake(where, str(found["ctx"]["error"]))
        case "missing":
            return Mistake(where, "is missing")
        case "extra_forbidden":
            return Mistake(where, f"there is no such {unit}")
    return Mistake(where, found["msg"])
