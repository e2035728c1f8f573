"""Prints the arguments of control calls: `python scripts/calls.py [CALL]`.

docs/FORMATS.md 2.3 has the replies.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from txmq.wire.calls.registry import CALLS


def choices(annotation: object) -> list[str]:
    """Return the texts that a field may have, where its type names them."""
    if get_origin(annotation) is Literal:
        return [json.dumps(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in choices(part)]


def models(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models of the objects that a field may have."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models(part)


def arguments(model: type[BaseModel]) -> str:
    """Return the arguments of a call, those that may be left out last."""
    fields = sorted(model.model_fields.items(), key=lambda item: not item[1].is_required())
    return ", ".join(argument(name, field) for name, field in fields)


def argument(name: str, field: FieldInfo) -> str:
    """Return an argument: `name?` may be left out, `name = 1` has that default."""
    default = field.get_default()
    if not field.is_required():
        plain = isinstance(default, BaseModel) or not default or default is PydanticUndefined
        name = f"{name}?" if plain else f"{name} = {json.dumps(default)}"
    inner = [f"{{{arguments(model)}}}" for model in models(field.annotation)]
    found = inner or choices(field.annotation)
    return f"{name} ({', '.join(found)})" if found else name


def told(call: str) -> str:
    """Return what a call is about, and its arguments."""
    about = (inspect.getdoc(CALLS[call]) or "").replace("\n", "\n    ")
    return f"{call}: {arguments(CALLS[call])}\n    {about}"


if __name__ == "__main__":
    for name in sys.argv[1:] or CALLS:
        print(told(name))
