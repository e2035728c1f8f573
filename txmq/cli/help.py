"""Options and arguments in the help of commands: names are never cut.

typer has a column for each kind of name, and cuts what does not fit into 80 columns.
Here the names of an option stand together; where they are long, its help follows below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import typer.rich_utils as typer_help
from typer.core import TyperArgument

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, RenderableType

NAMES_WIDTH: Final = 29  # of the column of names, where they fit into it


def install() -> None:
    """Have all commands print their options so."""
    typer_help._print_options_panel = _print_panel  # type: ignore[assignment]  # noqa: SLF001


def _print_panel(
    *,
    name: str,
    params: Iterable[Any],
    ctx: Any,
    markup_mode: Any,
    console: Console,  # noqa: ANN401  # typer does not export them
) -> None:
    from rich.console import Group
    from rich.panel import Panel

    rows = [row for param in params for row in _rows_of(param, ctx, markup_mode)]
    if rows:
        style = typer_help.STYLE_OPTIONS_PANEL_BORDER
        console.print(Panel(Group(*rows), title=name, title_align="left", border_style=style))


def _rows_of(param: Any, ctx: Any, markup_mode: Any) -> Iterable[RenderableType]:  # noqa: ANN401  # likewise
    from rich.text import Text

    names = _names_of(param, ctx)
    told = typer_help._get_parameter_help(param=param, ctx=ctx, markup_mode=markup_mode)  # noqa: SLF001
    mark = "* " if param.required else "  "
    shown = typer_help.highlighter(mark + names)
    if len(shown) <= NAMES_WIDTH:
        yield _row(shown, told)
        return
    yield shown
    yield _row(Text(), told)


def _names_of(param: Any, ctx: Any) -> str:  # noqa: ANN401  # likewise
    """Return the names of an option or argument, with the type of its value."""
    if isinstance(param, TyperArgument):
        several = "..." if param.metavar is None and param.nargs != 1 else ""
        return f"{param.display_name_raw}{several}"
    names = ", ".join([*param.opts, *param.secondary_opts])
    limits = param._get_number_range_help_str()  # noqa: SLF001
    among = f"[{limits}]" if limits else ""
    return " ".join(filter(None, (names, param.display_type_rich(ctx=ctx), among)))


def _row(names: RenderableType, told: RenderableType) -> RenderableType:
    from rich.table import Table

    row = Table.grid(padding=(0, 1), expand=True)
    row.add_column(width=NAMES_WIDTH, no_wrap=True)
    row.add_column(ratio=1)
    row.add_row(names, told)
    return row
