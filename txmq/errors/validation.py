"""Mistakes that pydantic has found in input, in words for the user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from txmq.errors.base import ConfigError

if TYPE_CHECKING:
    from pydantic import ValidationError

M = TypeVar("M", bound=Mapping[str, Any])


class Mistake(NamedTuple):
    """The path of a wrong value, and the end of a sentence that begins with it."""

    where: tuple[str, ...]
    why: str


def first_mistake(error: ValidationError, *, unit: str) -> Mistake:
    """Return the first mistake; `unit` is the noun for the values ("setting").

    The value itself is left out: it may be a secret.
    """
    found = error.errors(include_url=False, include_input=False)
    first = most_telling(found)
    mistake = mistake_of(first, unit=unit)
    if first["type"] != "extra_forbidden":
        return mistake
    *beside, name = first["loc"]
    missing = [
        str(one["loc"][-1])
        for one in found
        if one["type"] == "missing" and list(one["loc"][:-1]) == beside
    ]
    return mistake._replace(why=mistake.why + did_you_mean(str(name), missing))


def most_telling(found: Sequence[M]) -> M:
    """Return the first mistake; what is missing may be there, misspelt."""
    return next((one for one in found if one["type"] != "missing"), found[0])


def check_options(of: str, given: Iterable[str], known: AbstractSet[str]) -> None:
    """Raises ConfigError for an option that does not exist, with the one that may have
    been meant. `of`: what the options are of, such as "consumer".
    """
    if unknown := set(given) - known:
        name, names = min(unknown), sorted(known)
        raise ConfigError(
            of,
            f"there is no option {name!r}{did_you_mean(name, names)}",
            hint=f"the options are {', '.join(names)}",
        )


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return which name may have been meant by one that does not exist; "" = none."""
    from difflib import get_close_matches  # noqa: PLC0415  # for those who err

    close = get_close_matches(name, list(names), n=1)
    return f": did you mean {close[0]}?" if close else ""


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
