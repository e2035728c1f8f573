"""The root of the tree, and errors of settings, protocols and connections."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

Outcome = Literal["not done", "unknown"]
MAY_BE_DONE: Final = "it may have been done: look before you do it again"


class TxmqError(Exception):
    """Root of the tree. `hint` says what to do about it; the text of the error ends
    with it.

    `advice` is the hint of an error that was raised without.
    """

    advice: ClassVar[str] = ""
    retriable: ClassVar[bool] = False
    outcome: Outcome = "not done"

    def __init__(self, message: str, *, hint: str = "") -> None:
        hint = hint or self.advice
        super().__init__(f"{message} ({hint})" if hint else message)
        self.message = message
        self.hint = hint


class ConfigError(TxmqError):
    """A setting is missing or wrong. `path` names it within the settings file."""

    def __init__(self, path: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{path}: {message}", hint=hint)
        self.path = path


class ProtocolError(TxmqError):
    """The conversation broke a rule of the protocol."""


class LocalProtocolError(ProtocolError):
    """We tried something the protocol forbids: a bug on this side, or input out of
    range.
    """


class InvalidSelector(LocalProtocolError):
    """A selector that is none; `position` is where in its text, from 0."""

    def __init__(self, message: str, position: int, *, hint: str = "") -> None:
        super().__init__(f"in the selector, at {position}: {message}", hint=hint)
        self.position = position


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; the connection is of no more use and is closed."""

    advice = "compare the versions of txmq on both sides"


class BrokerUnavailable(TxmqError):
    """No connection to any broker could be made within the time allowed."""

    advice = "nothing was done: try again once a broker answers there"
    retriable = True


class LogChanged(TxmqError):
    """The broker has another log than before: nothing that this client knows of it
    holds any more.
    """


class ConnectionLost(TxmqError):
    """The connection ended while the request was under way: it may have been carried
    out.
    """

    advice = MAY_BE_DONE
    retriable = True
    outcome = "unknown"


class RequestTimeout(TxmqError):
    """No reply within the time allowed: the request may have been carried out."""

    advice = MAY_BE_DONE
    retriable = True
    outcome = "unknown"


class ClientClosed(TxmqError):
    """The client, consumer or transaction was closed before this call."""

    advice = "make another one"
