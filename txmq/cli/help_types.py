"""Types of arguments and options in help, in words of users.

typer shows the names of Python's types: `<list[MessagePlace]>` for places of messages,
`<bool>` for an option without a value. An argument's name says what it is, and an
option without a value has no type.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperArgument, TyperOption

TYPES = {
    "str": "TEXT", "list[str]": "TEXT", "int": "NUMBER", "list[int]": "NUMBER",
    "int range": "NUMBER", "float": "NUMBER", "float range": "NUMBER", "path": "PATH",
}  # fmt: skip


def show_types_in_words() -> None:
    """Have the help of all commands show types so."""
    TyperOption.display_type_rich = _of_option  # type: ignore[assignment,method-assign]
    TyperArgument.display_type_rich = _of_argument  # type: ignore[assignment,method-assign]


def _of_option(option: TyperOption, ctx: Any) -> str | None:  # noqa: ANN401  # typer does not export it
    if option.is_bool_flag:
        return None
    if option.metavar is not None:
        return option.metavar
    name = option.display_type(ctx).strip("<>")
    return TYPES.get(name, name)


def _of_argument(argument: TyperArgument, ctx: Any) -> None:  # noqa: ANN401  # likewise
    del argument, ctx
