"""Edits of dead letters by services, without I/O."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel, ValidationError

from txmq.errors import LocalProtocolError
from txmq.errors.validation import first_mistake
from txmq.model.tracebacks import text_of

if TYPE_CHECKING:
    from txmq.client.protocol.letters import DeadLetter

MAX_REASON = 1_000  # characters: some validators repeat all that they have seen


class BodyCheck(Protocol):
    """Raises an exception for a body that consumers would not understand, such as a
    validator of a JSON Schema does.
    """

    def __call__(self, body: bytes) -> object: ...


def check_body(body: bytes, model: type[BaseModel] | BodyCheck) -> None:
    """Check a body against a pydantic model of its JSON, or by a function.

    Raises LocalProtocolError, which names the first mistake.
    """
    try:
        if isinstance(model, type) and issubclass(model, BaseModel):
            model.model_validate_json(body)
        else:
            model(body)
    except ValidationError as error:
        where, reason = first_mistake(error, unit="field")
        message = f"the body is no {error.title}: {'.'.join(where) or 'the whole'}: {reason}"
        raise LocalProtocolError(message, hint="nothing was sent: mend the body") from None
    except Exception as error:
        message = f"the body is invalid: {type(error).__name__}: {text_of(error)[:MAX_REASON]}"
        raise LocalProtocolError(message, hint="nothing was sent: mend the body") from error


def edit_args(  # what an edit is
    letter: DeadLetter,
    *,
    body: bytes | None,
    headers: Mapping[str, str] | None,
    model: type[BaseModel] | BodyCheck | None,
    any_format: bool,
    operator: str,
    reason: str,
) -> dict[str, object]:
    """Return the arguments of dlq.edit, once the body is checked."""
    if body is not None and model is not None:
        check_body(body, model)
    changes = {
        "body": None if body is None else b64encode(body).decode(),
        "headers": None if headers is None else dict(headers),
        "any_format": any_format,
    }
    return _place(letter) | changes | {"operator": operator, "reason": reason}


def revert_args(letter: DeadLetter, *, operator: str, reason: str) -> dict[str, object]:
    """Return the arguments of dlq.edit that give a letter what was published again."""
    return _place(letter) | {"revert": True, "operator": operator, "reason": reason}


def _place(letter: DeadLetter) -> dict[str, object]:
    names = ("group", "topic", "partition", "offset", "edits")
    return {name: getattr(letter, name) for name in names}
