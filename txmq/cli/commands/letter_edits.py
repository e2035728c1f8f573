"""`txmq dlq edit` gives a dead letter another body or other headers."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from base64 import b64decode, b64encode
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from txmq.cli.bodies import BodyFile, read_body
from txmq.cli.command import CommandSession
from txmq.cli.options import ByForReason, Group, Yes
from txmq.cli.parsers import MessagePlace, NameValue, parse_header, parse_place
from txmq.client.protocol.letter_edits import BodyCheck, check_body
from txmq.errors import ConfigError, MessagesDamaged
from txmq.model.message_diff import Version, diff
from txmq.model.printable import escape_unprintable

if TYPE_CHECKING:
    from pydantic import BaseModel

Letter = Annotated[
    MessagePlace,
    typer.Argument(
        parser=parse_place, metavar="TOPIC/PARTITION/OFFSET", help="Place of the message."
    ),
]
Headers = Annotated[
    list[NameValue] | None,
    typer.Option(
        "--header",
        parser=parse_header,
        metavar="NAME=VALUE",
        help="Header to set; can be repeated.",
    ),
]
Unset = Annotated[
    list[str] | None,
    typer.Option("--unset-header", metavar="NAME", help="Header to remove; can be repeated."),
]
Text = Annotated[str | None, typer.Option("--body", metavar="TEXT", help="The new body as text.")]
Editor = Annotated[
    bool, typer.Option("--editor", help="Edit the body in the program that $EDITOR names.")
]
Revert = Annotated[bool, typer.Option("--revert", help="Return to what was published.")]
AnyFormat = Annotated[
    bool,
    typer.Option("--any-format", help="Take a body that is no JSON though the former one is."),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:NAME",
        help="Check the new body by a pydantic model, or by a function that raises an exception.",
    ),
]


def edit(  # noqa: PLR0913  # its options
    session: CommandSession,
    group: Group,
    letter: Letter,
    *,
    file: BodyFile = None,
    body: Text = None,
    editor: Editor = False,
    header: Headers = None,
    unset_header: Unset = None,
    revert: Revert = False,
    model: Model = None,
    any_format: AnyFormat = False,
    by: ByForReason,
    yes: Yes = False,
) -> None:
    """Change the message of an open dead letter, or of one that waits for a retry, for
    this group only.

    It stays the same message: its id, key and place do not change, nor does the topic.
    What a consumer has in its local store is taken back from it.
    What was published is kept: `dlq show --diff`, and --revert.
    """
    if sum((file is not None, body is not None, editor, revert)) > 1:
        raise typer.BadParameter("use one of --file, --body, --editor and --revert")
    if revert and (header or unset_header):
        raise typer.BadParameter("--revert returns to the headers that were published")
    if not (revert or editor or header or unset_header) and file is None and body is None:
        raise typer.BadParameter(
            "nothing to change: use --body, --file, --editor, --header, --unset-header or --revert"
        )
    checked = None if model is None else import_model(model)
    place = {"group": group, **letter._asdict()}
    shown, before = _newest(session, place, revert=revert)
    if revert:
        after = version_of(session.client.call("dlq.show", **place, version=0))
    else:
        given = _edited(before.body) if editor else read_body(body, file)
        new = before.body if given is None else given
        after = Version(_changed(before.headers, header or [], unset_header or []), new)
    if after == before:
        raise typer.BadParameter("it has this body and these headers already")
    if checked is not None:
        check_body(after.body, checked)
    number = int(shown["edits"])
    lines = diff_lines(before, after, (f"version {number}", f"version {number + 1}"))
    if not session.out.as_json and not yes:
        typer.echo("\n".join(lines), err=True)
    session.out.confirm(f"Edit this message for group {group}?", yes=yes)
    changes: dict[str, Any] = {"revert": True}
    if not revert:
        changes = {
            "body": None if after.body == before.body else b64encode(after.body).decode(),
            "headers": None if after.headers == before.headers else dict(after.headers),
            "any_format": any_format,
        }
    reply = session.client.call("dlq.edit", **place, edits=number, **changes, **by._asdict())
    session.out.show(reply | {"diff": lines} if session.out.as_json else reply)


def _newest(
    session: CommandSession, place: dict[str, Any], *, revert: bool
) -> tuple[dict[str, Any], Version]:
    """Return a letter and its newest version. A damaged one need not be read to be
    left.
    """
    try:
        shown = session.client.call("dlq.show", **place)
    except MessagesDamaged as error:
        if not revert:
            raise
        shown = session.client.call("dlq.show", **place, bodies=False)
        before = Version({}, f"damaged: {error.message}".encode())
    else:
        before = version_of(shown)
    return shown, before


def diff_lines(before: Version, after: Version, names: tuple[str, str]) -> list[str]:
    """Return the lines of a diff for terminals: control characters are escaped."""
    return [escape_unprintable(line) for line in diff(before, after, names)]


def version_of(shown: dict[str, Any]) -> Version:
    """Return what an edit may change, of a letter that was shown with its body."""
    return Version(shown["headers"], b64decode(shown["body"]))


def import_model(path: str) -> type[BaseModel] | BodyCheck:
    """Return the model or the function at MODULE:NAME. Raises ConfigError.

    Modules are also found in the working directory, as with `python -m`.
    """
    module, _colon, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("--model", f"cannot import {path!r}: {error}", hint=MODEL) from None
    is_model = isinstance(found, type) and hasattr(found, "model_validate_json")
    if not is_model and (isinstance(found, type) or not callable(found)):
        raise ConfigError("--model", f"{path!r} is no pydantic model and no function", hint=MODEL)
    checked: type[BaseModel] | BodyCheck = found
    return checked


MODEL = "name a subclass of pydantic.BaseModel, or a function, as package.module:name"


def _changed(
    headers: Any,  # noqa: ANN401  # of a reply
    changed: list[NameValue],
    removed: list[str],
) -> dict[str, str]:
    for name in removed:
        if name not in headers:
            raise typer.BadParameter(f"the letter has no header {name!r}")
    kept = {name: value for name, value in headers.items() if name not in removed}
    return kept | dict(changed)


def _edited(before: bytes) -> bytes:
    program = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with TemporaryDirectory(prefix="txmq-") as directory:  # which nobody else can read
        path = Path(directory, "body")
        path.write_bytes(before)
        try:
            # the operator's own choice of a program
            ended = subprocess.run([*shlex.split(program), str(path)], check=False)  # noqa: S603
        except OSError as error:
            message = f"cannot run {program!r}: {error.strerror}"
            raise ConfigError("EDITOR", message, hint="name another editor") from None
        if ended.returncode:
            message = f"{program!r} ended with status {ended.returncode}"
            raise ConfigError("EDITOR", message, hint="nothing was changed")
        return path.read_bytes()
