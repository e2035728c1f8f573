"""The way from a reactor to an event loop of asyncio, and back.

On the reactor of asyncio the two are one. Beside any other reactor the loop runs in a
daemon thread, one for all clients of the process. The reactor's thread may wait for the
loop, which never waits for the reactor but in coroutines. What the loop calls of the
user's there, such as a partitioner, may use what waits for nothing.
"""

from __future__ import annotations

import asyncio
import os
from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import copy_context
from functools import partial
from inspect import isawaitable
from threading import Thread, current_thread, get_ident
from typing import Any, Final, TypeAlias, TypeVar

from twisted.internet.asyncioreactor import AsyncioSelectorReactor
from twisted.internet.defer import CancelledError, Deferred

from txmq.client.aio.core import finish
from txmq.client.aio.loop import cancelled
from txmq.errors import LocalProtocolError

T = TypeVar("T")
Reactor: TypeAlias = Any  # several of Twisted's interfaces at once


class Answer(Deferred[T]):
    """The end of work on the loop. To cancel it cancels the work; it fires when the
    work has ended.
    """

    def __init__(self, cancel_work: Callable[[], None]) -> None:
        super().__init__()
        self._cancel_work = cancel_work

    def cancel(self) -> None:
        """Ask the work to end."""
        if self.called:
            super().cancel()
        else:
            self._cancel_work()


class Bridge:
    """The reactor and the loop of one client, beside a loop in a thread.

    Its methods are for the reactor's thread, but for `in_reactor`. `at_once` also works
    in another one.
    """

    def __init__(
        self, reactor: Reactor, before_stop: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """`before_stop` is awaited where the reactor stops while the client is open."""
        self._reactor, self._before_stop = reactor, before_stop
        self._at_shutdown: object = None
        self._closing = False
        self._calls: list[Callable[[], None]] = []  # of this turn of the reactor
        self._thread: int | None = None  # the reactor's, once it is known
        (reactor.callFromThread if reactor.running else reactor.callWhenRunning)(self._note_thread)

    def _note_thread(self) -> None:
        self._thread = get_ident()

    @property
    def _is_elsewhere(self) -> bool:
        """True in a thread that is known not to be the reactor's."""
        return self._thread not in (None, get_ident())

    @property
    def _loop(self) -> AbstractEventLoop:
        return _loop_in_thread()

    def defer(self, begin: Callable[[], Awaitable[T]]) -> Deferred[T]:
        """Begin work on the loop. Works of one turn of the reactor begin together.

        Raises LocalProtocolError in another thread than the reactor's, which would
        sleep on.
        """
        if self._is_elsewhere:
            raise LocalProtocolError(
                f"a client of Twisted is used in thread {current_thread().name}, "
                "and its reactor runs in another one",
                hint='call it there: blockingCallFromThread(reactor, client.send, "t", b"x")',
            )
        self._watch_shutdown()
        context, tasks = copy_context(), list[asyncio.Task[T]]()

        async def work() -> T:
            try:
                return await begin()
            except asyncio.CancelledError as error:
                raise CancelledError(*error.args) from error  # which has the outcome

        def start() -> None:
            task = self._loop.create_task(work(), context=context)
            tasks.append(task)
            task.add_done_callback(lambda _task: self._back(end))

        def end() -> None:
            [task] = tasks
            if task.cancelled():
                answer.errback(_not_begun())
            elif (error := task.exception()) is not None:
                answer.errback(error)
            else:
                answer.callback(task.result())

        def cancel() -> None:
            tasks[0].cancel()

        answer = Answer[T](lambda: self._post(cancel))
        self._post(start)
        return answer

    def at_once(self, function: Callable[[], T]) -> T:
        """Return what a function returns on the loop, after all that has begun."""
        if _is_running(self._loop):
            return function()
        self._watch_shutdown()
        self._send_calls()
        context, found = copy_context(), Future[T]()

        def call() -> None:
            try:
                found.set_result(context.run(function))
            except BaseException as error:  # noqa: BLE001  # the caller's
                found.set_exception(error)

        self._loop.call_soon_threadsafe(call)
        return found.result()

    async def in_reactor(self, function: Callable[..., object], *args: object) -> Any:  # noqa: ANN401  # the user's
        """Call a function of the user in the reactor's thread. Return its result, or
        that of the Deferred, coroutine or asyncio future that it returns.

        A cancellation goes to the Deferred, and comes back when that has ended.
        """
        loop, context = self._loop, copy_context()
        ended: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()
        begun: list[Deferred[None]] = []

        async def call() -> None:
            found, error = None, None
            try:
                found = await _result_of(function(*args))
            except BaseException as failure:  # noqa: BLE001  # the caller's
                error = failure
            loop.call_soon_threadsafe(ended.set_result, (found, error))

        def begin() -> None:
            begun.append(context.run(Deferred.fromCoroutine, call()))

        def cancel() -> None:
            begun[0].cancel()

        self._reactor.callFromThread(begin)
        try:
            found, error = await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._reactor.callFromThread(cancel)
            await finish(ended)
            raise
        if error is not None:
            raise error
        return found

    @asynccontextmanager
    async def block(self, work: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        """Return a block of the loop as one of the reactor."""
        entered = await self.defer(work.__aenter__)
        try:
            yield entered
        except BaseException as error:
            raised = error
            if not await self.defer(
                lambda: work.__aexit__(type(raised), raised, raised.__traceback__)
            ):
                raise
        else:
            await self.defer(lambda: work.__aexit__(None, None, None))

    def close(self, close: Callable[[], Awaitable[None]]) -> Deferred[None]:
        """Close the client. The reactor does not wait for it any more."""
        self._closing = True
        if self._at_shutdown is not None:
            self._reactor.removeSystemEventTrigger(self._at_shutdown)
            self._at_shutdown = None
        return self.defer(close)

    def before_shutdown(self, close: Callable[[], Deferred[None]]) -> None:
        """Have the reactor wait for this when it stops."""
        self._reactor.addSystemEventTrigger("before", "shutdown", close)

    def _watch_shutdown(self) -> None:
        if self._at_shutdown is None and not self._closing:
            self._at_shutdown = self._reactor.addSystemEventTrigger(
                "before", "shutdown", self._stopping
            )

    def _stopping(self) -> Deferred[None]:
        self._at_shutdown, self._closing = None, True
        return self.defer(self._before_stop)

    def _post(self, call: Callable[[], None]) -> None:
        """Make a call on the loop, together with others of this turn of the reactor."""
        if not self._calls:
            unknown = self._thread is None  # then this may be another thread
            later = self._reactor.callFromThread if unknown else partial(self._reactor.callLater, 0)
            later(self._send_calls)
        self._calls.append(call)

    def _send_calls(self) -> None:
        calls, self._calls = self._calls, []
        if calls:
            self._loop.call_soon_threadsafe(_make, calls)

    def _back(self, call: Callable[[], None]) -> None:
        """Make a call in the reactor's thread."""
        self._reactor.callFromThread(call)


class OneLoop(Bridge):
    """The reactor of asyncio, whose loop the client uses as well."""

    @property
    def _loop(self) -> AbstractEventLoop:
        loop: AbstractEventLoop = self._reactor._asyncioEventloop  # noqa: SLF001  # nothing public tells
        return loop

    @property
    def _is_elsewhere(self) -> bool:
        return self._loop.is_running() and not _is_running(self._loop)

    def at_once(self, function: Callable[[], T]) -> T:
        """Return what a function returns on the loop, which may not run yet."""
        self._watch_shutdown()
        if self._loop.is_running():
            return function()

        async def call() -> T:
            return function()

        return self._loop.run_until_complete(call())

    def _post(self, call: Callable[[], None]) -> None:
        call()

    def _back(self, call: Callable[[], None]) -> None:
        call()


def bridge_of(reactor: Reactor, before_stop: Callable[[], Coroutine[Any, Any, None]]) -> Bridge:
    """Return the bridge of a new client."""
    kind = OneLoop if isinstance(reactor, AsyncioSelectorReactor) else Bridge
    return kind(reactor, before_stop)


_loops: Final[dict[int, AbstractEventLoop]] = {}  # a child has no threads of its parent


def _loop_in_thread() -> AbstractEventLoop:
    """Return the loop of this process, in a thread of its own."""
    pid = os.getpid()
    if pid not in _loops:
        loop = asyncio.new_event_loop()
        if _loops.setdefault(pid, loop) is loop:
            Thread(target=_run, args=(loop,), name="txmq-loop", daemon=True).start()
        else:  # of another reactor, in its thread
            loop.close()
    return _loops[pid]


def _is_running(loop: AbstractEventLoop) -> bool:
    """Return whether the loop has called this."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _run(loop: AbstractEventLoop) -> None:
    while True:
        try:
            loop.run_forever()
        except BaseException:  # noqa: BLE001, S112  # SystemExit of a handler; its task has it, too
            continue


def _make(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _not_begun() -> CancelledError:
    """Return the error of work that was cancelled before it began."""
    cause = asyncio.CancelledError()
    cancelled(cause, "not done", "a call")
    error = CancelledError()
    error.__cause__ = cause
    return error


async def _result_of(answer: object) -> object:
    """Return what a Deferred, coroutine or asyncio future ends with."""
    if asyncio.isfuture(answer):
        return await Deferred.fromFuture(answer)
    return await answer if isawaitable(answer) else answer
