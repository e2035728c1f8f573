"""Registration of commands: shared options, connections, and error reports."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, cast, get_type_hints

import typer

from txmq.cli.options import DEFAULT_BROKER, AsJson, BrokerUrl
from txmq.cli.output import Output
from txmq.model.message import Receipt

if TYPE_CHECKING:
    from txmq.client.protocol.letter_changes import ImportedLetters

P = ParamSpec("P")
PAGE = 1_000  # entries of a list that a command reads at once
MAX_INTEGER = (1 << 63) - 1
SHARED_DEFAULTS = {"broker": DEFAULT_BROKER, "as_json": False}


class CommandClient(Protocol):
    """The calls of a client that commands use."""

    def call(self, name: str, /, **args: object) -> dict[str, Any]: ...

    def send(
        self,
        topic: str,
        body: bytes,
        *,
        key: str | None = None,
        tag: str | None = None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
        deliver_at: int | datetime | None = None,
        delay: float | timedelta | None = None,
    ) -> Receipt: ...

    def import_letters(
        self, file: Path, *, to: str, operator: str, again: bool
    ) -> ImportedLetters: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CommandSession:
    """A connection to a broker, and the output of the command that uses it."""

    out: Output
    client: CommandClient
    url: str

    def show(self, call: str, *, columns: Sequence[str] = (), **args: object) -> None:
        """Make a call and print its reply.

        Tables of rows show only `columns`, where any are given.
        """
        self.out.show(self.client.call(call, **args), columns=columns)

    def show_list(
        self, call: str, field: str, *, columns: Sequence[str] = (), **args: object
    ) -> None:
        """Print the list `field` of the replies to a call, page by page."""
        self.out.show(self.read_pages(call, field, **args), columns=columns)

    def read_pages(self, call: str, field: str, **args: object) -> dict[str, Any]:
        """Return the reply to a call, with the list `field` of all pages."""
        shown = dict(self.client.call(call, limit=PAGE, **args))
        following = shown.pop("next", None)
        while following is not None:
            page = self.client.call(call, limit=PAGE, after=following, **args)
            shown[field] = [*shown[field], *page[field]]
            following = page["next"]
        return shown


def connect(url: str) -> CommandClient:
    """Return a client of the broker at `url`."""
    from txmq.client.blocking.connect import connect as blocking

    return blocking(url, service="txmq-cli")


def local_command(
    app: typer.Typer, name: str, *, example: str
) -> Callable[[Callable[Concatenate[Output, P], None]], Callable[..., None]]:
    """Register a command that needs no broker; its function receives an Output
    first. Its help ends with the example.
    """

    def register(function: Callable[Concatenate[Output, P], None]) -> Callable[..., None]:
        def run(as_json: bool, **arguments: Any) -> None:  # noqa: ANN401, FBT001  # values of the command line
            _require_sound_numbers(arguments)
            out = Output(as_json=as_json)
            with out.reporting_errors():
                function(out, **_gathered(groups, arguments))  # type: ignore[call-arg]  # passed by keyword

        groups = _give_signature(run, function, {"as_json": AsJson})
        _add(app, name, run, example)
        return function

    return register


def broker_command(
    app: typer.Typer, name: str, *, example: str
) -> Callable[[Callable[Concatenate[CommandSession, P], None]], Callable[..., None]]:
    """Register a command that calls a broker; its function receives a CommandSession
    first. Its help ends with the example.
    """

    def register(function: Callable[Concatenate[CommandSession, P], None]) -> Callable[..., None]:
        def run(as_json: bool, broker: str, **arguments: Any) -> None:  # noqa: ANN401, FBT001
            _require_sound_numbers(arguments)
            with open_session(Output(as_json=as_json), broker) as session:
                function(session, **_gathered(groups, arguments))  # type: ignore[call-arg]  # passed by keyword

        groups = _give_signature(run, function, {"broker": BrokerUrl, "as_json": AsJson})
        _add(app, name, run, example)
        return function

    return register


@contextmanager
def open_session(out: Output, url: str) -> Iterator[CommandSession]:
    """Connect to a broker; errors end the command."""
    with out.reporting_errors():
        client = connect(url)
        try:
            yield CommandSession(out, client, url)
        finally:
            client.close()


def _require_sound_numbers(arguments: Mapping[str, object]) -> None:
    """Raise BadParameter for numbers that neither JSON nor 64 bits hold."""
    for name, value in arguments.items():
        if isinstance(value, float) and not isfinite(value):
            raise typer.BadParameter(f"invalid number {value} for {name}: use a finite one")
        if isinstance(value, int) and value > MAX_INTEGER:
            raise typer.BadParameter(f"invalid number for {name}: use at most {MAX_INTEGER}")


def _add(app: typer.Typer, name: str, run: Callable[..., None], example: str) -> None:
    """Add a command. A list of commands shows the first sentence of its help."""
    first = re.split(r"(?<=\.) ", (run.__doc__ or "").partition("\n")[0], maxsplit=1)[0]
    app.command(name, short_help=first, epilog=f"Example: {example}")(run)


def _unwrapped(text: str) -> str:
    """Return text with each paragraph on one line, except those that are indented."""
    return "\n\n".join(
        paragraph if paragraph.startswith(" ") else paragraph.replace("\n", " ")
        for paragraph in text.split("\n\n")
    )


def _give_signature(
    run: Callable[..., None], function: Callable[..., None], shared: Mapping[str, object]
) -> dict[str, Any]:
    """Give `run` the signature and the docstring that typer reads.

    It has the parameters of `function` without the first one, and the shared options.
    A parameter of a NamedTuple's type stands for the options that are its fields;
    return these types by the names of their parameters.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for own in list(inspect.signature(function).parameters.values())[1:]:
        hint = hints[own.name]
        if isinstance(hint, type) and hasattr(hint, "_fields"):
            groups[own.name] = group = cast("Any", hint)
            of_fields = get_type_hints(group, include_extras=True)
            parameters += [
                own.replace(
                    name=field,
                    annotation=of_fields[field],
                    default=group._field_defaults.get(field, inspect.Parameter.empty),
                )
                for field in group._fields
            ]
        else:
            parameters.append(own.replace(annotation=hint))
    parameters += [
        inspect.Parameter(
            option, inspect.Parameter.KEYWORD_ONLY, default=SHARED_DEFAULTS[option], annotation=hint
        )
        for option, hint in shared.items()
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions accept attributes
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    # A list of commands would keep the lines of the docstring.
    run.__doc__ = _unwrapped(inspect.getdoc(function) or "")
    return groups


def _gathered(groups: Mapping[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with the options of each group as one value."""
    for name, group in groups.items():
        arguments[name] = group(*[arguments.pop(field) for field in group._fields])
    return arguments
