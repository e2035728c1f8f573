"""Writes arguments of control calls into docs/FORMATS.md: `python scripts/calls.py`.

A row of the table there is a call, its arguments and its reply. The arguments are those
of the registry; the reply is written by hand, and stays.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from txmq.wire.calls.consumers import FailureArgs, RetryArgs
from txmq.wire.calls.letters import SelectionArgs
from txmq.wire.calls.plans import PlanSettingsArgs
from txmq.wire.calls.registry import CALLS
from txmq.wire.calls.users import VerifierArgs

PAGE = Path(__file__).parents[1] / "docs" / "FORMATS.md"
ROW = re.compile(r"^\| (`[a-z_.]+`(?: · `[a-z.]+`)*) \|[^|]*\|", re.MULTILINE)
NAME = re.compile("`([a-z_.]+)`")
OPERATORS = ("operator", "reason")  # of so many calls that the page says it once
OBJECTS: dict[str, type[BaseModel]] = {
    "select": SelectionArgs,
    "settings": PlanSettingsArgs,
    "retry": RetryArgs,
    "error": FailureArgs,
    "password": VerifierArgs,
}


def choices(annotation: object) -> list[str]:
    """Return the texts that a field may have, where its type names them."""
    if get_origin(annotation) is Literal:
        return [json.dumps(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in choices(part)]


def arguments(model: type[BaseModel]) -> str:
    """Return the arguments of a call, those that may be left out last."""
    fields = sorted(model.model_fields.items(), key=lambda item: not item[1].is_required())
    told = [item for item in fields if item[0] not in OPERATORS or item[1].is_required()]
    return ", ".join(argument(name, field) for name, field in told)


def argument(name: str, field: FieldInfo) -> str:
    """Return an argument: `name?` may be left out, `name = 1` has that default."""
    default = field.get_default()
    if not field.is_required():
        plain = isinstance(default, BaseModel) or not default or default is PydanticUndefined
        name = f"{name}?" if plain else f"{name} = {json.dumps(default)}"
    found = choices(field.annotation)
    return f"{name} ({', '.join(found)})" if found else name


def row(cell: str) -> str:
    """Return the first two cells of the row of these calls, or of an object."""
    models = {**CALLS, **OBJECTS}
    (told,) = {arguments(models[name]) for name in NAME.findall(cell)}
    return f"| {cell} | {told} |"


def section(page: str) -> str:
    """Return the section of the page about control calls."""
    return page.partition("\n### 2.3 ")[2].partition("\n## 3. ")[0]


def names(page: str) -> list[str]:
    """Return the calls and objects that the page has, in order."""
    return [name for row in ROW.findall(section(page)) for name in NAME.findall(row)]


def rewritten(page: str) -> str:
    """Return the page with the arguments of the registry."""
    old = section(page)
    return page.replace(old, ROW.sub(lambda match: row(match[1]), old))


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text("utf-8")), "utf-8")
