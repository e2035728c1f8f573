"""Options and arguments in the help of commands: names are never cut.

typer has a column for each kind of name, and cuts what does not fit into 80 columns.
Here the names of an option stand together; where they are long, its help follows below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from typer.core import TyperArgument, TyperCommand, TyperGroup

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console, RenderableType

OfTyper: TypeAlias = Any  # which it does not export
NAMES_WIDTH: Final = 29  # of the column of names, where they fit into it


def install() -> None:
    """Have all commands print their options so."""
    TyperCommand.format_help = _format_help  # type: ignore[assignment,method-assign]
    TyperGroup.format_help = _format_help  # type: ignore[assignment,method-assign]


def _format_help(command: OfTyper, ctx: OfTyper, formatter: OfTyper) -> None:
    """Print the help of a command. What prints it takes long to import."""
    from typer import rich_utils

    del formatter
    rich_utils._print_options_panel = _print_panel  # noqa: SLF001
    rich_utils.rich_format_help(obj=command, ctx=ctx, markup_mode=command.rich_markup_mode)


def _print_panel(
    *,
    name: str,
    params: Iterable[OfTyper],
    ctx: OfTyper,
    markup_mode: OfTyper,
    console: Console,
) -> None:
    from rich.console import Group
    from rich.panel import Panel
    from typer.rich_utils import STYLE_OPTIONS_PANEL_BORDER

    rows = [row for param in params for row in _rows_of(param, ctx, markup_mode)]
    if rows:
        panel = Panel(
            Group(*rows), title=name, title_align="left", border_style=STYLE_OPTIONS_PANEL_BORDER
        )
        console.print(panel)


def _rows_of(param: OfTyper, ctx: OfTyper, markup_mode: OfTyper) -> Iterable[RenderableType]:
    from rich.text import Text
    from typer.rich_utils import _get_parameter_help, highlighter

    names = _names_of(param, ctx)
    told = _get_parameter_help(param=param, ctx=ctx, markup_mode=markup_mode)
    mark = "* " if param.required else "  "
    shown = highlighter(mark + names)
    if len(shown) <= NAMES_WIDTH:
        yield _row(shown, told)
        return
    yield shown
    yield _row(Text(), told)


def _names_of(param: OfTyper, ctx: OfTyper) -> str:
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
