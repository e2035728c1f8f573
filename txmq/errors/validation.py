"""What is wrong with input that pydantic has refused, in words for whoever sent it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pydantic import ValidationError


class Mistake(NamedTuple):
    """`where`: the path of the wrong value, in parts; `why` begins where a sentence
    about it goes on.
    """

    where: tuple[str, ...]
    why: str


def first_mistake(error: ValidationError, *, unit: str) -> Mistake:
    """The first of them; a `unit` is what the values are called. The value itself is
    not told: it may be a secret.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    where = tuple(map(str, first["loc"]))
    match first["type"]:
        case "value_error":
            return Mistake(where, str(first["ctx"]["error"]))
        case "missing":
            return Mistake(where, "is missing")
        case "extra_forbidden":
            return Mistake(where, f"there is no such {unit}")
    return Mistake(where, first["msg"])
