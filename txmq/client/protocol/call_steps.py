"""Work of several control calls, without I/O: a generator yields each call with its
arguments, and gets the reply or the error. Each face makes the calls in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from txmq.errors import TxmqError

T = TypeVar("T")
NamedCall = tuple[str, dict[str, Any]]
CallSteps = Generator[NamedCall, dict[str, Any], T]


class CallRun:
    """A run of such a generator: while `call` names one, `reply` or `fail` goes on;
    then `result` is there.
    """

    def __init__(self, steps: CallSteps[Any]) -> None:
        self._steps = steps
        self.call: NamedCall | None = None
        self.result: Any = None
        self._go_on(lambda: next(steps))

    def reply(self, reply: dict[str, Any]) -> None:
        """Take the reply to the call."""
        self._go_on(lambda: self._steps.send(reply))

    def fail(self, error: TxmqError) -> None:
        """Take the error of the call. Raises it where nobody expects it."""
        self._go_on(lambda: self._steps.throw(error))

    def _go_on(self, step: Callable[[], NamedCall]) -> None:
        try:
            self.call = step()
        except StopIteration as end:
            self.call, self.result = None, end.value


def run_calls(call: Callable[..., dict[str, Any]], steps: CallSteps[T]) -> T:
    """Make the calls one after the other by a blocking function, and return the
    result.
    """
    run = CallRun(steps)
    while run.call is not None:
        name, args = run.call
        try:
            reply = call(name, **args)
        except TxmqError as error:
            run.fail(error)
        else:
            run.reply(reply)
    result: T = run.result
    return result
