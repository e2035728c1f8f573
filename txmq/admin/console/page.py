"""Pages of the console: their interface.

A page is an async function of a request. It asks the broker by control calls, as the
command line does, with the rights and bounds of the user who looks at it, its viewer.
It returns a template and the values that the template shows:

    async def topic(request: PageRequest) -> View:
        shown = await request.ask("topic.show", name=request.names[0])
        may_delete = request.may("topic.delete", name=request.names[0])
        return View("topic.html", {"topic": shown, "may_delete": may_delete})

    PAGES = (Page("topics/*", "Topic", topic),)

A module of pages has `PAGES`; `registry` lists the modules. A `*` in the path stands
for one name, which is in `request.names`. `nav` and `key` put a page into the
navigation: its text there, and the key that opens it behind `g`. For those who may not
make the call that the page `needs`, it is disabled there, and says why.

The template extends `base.html` and fills the block `live`. With `live`, an event
stream renders that block again every two seconds while somebody looks; it stands by
itself, so macros come from `ui`, which all templates have. Links begin with `{{ root
}}`, so that they hold behind a sub-path. A list shows `request.limit` rows at most, and
links to the next page.

`request.ask` raises Refused, and the viewer sees an error page with the broker's hint.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode

from twisted.internet.defer import Deferred
from twisted.internet.defer import TimeoutError as TimedOut

from txmq import errors
from txmq.admin.addresses import is_whole_number
from txmq.admin.console.actions import ACTIONS
from txmq.errors import RemoteProtocolError, RequestRejected, TxmqError
from txmq.model.units import SECOND

if TYPE_CHECKING:
    from txmq.admin.console.action import Action
    from txmq.admin.http_values import Query
    from txmq.broker.access.guard import Rights
    from txmq.broker.service import BrokerParts
    from txmq.model.access import Need

ROWS = 50  # of a list on one page
MAX_ROWS = 200
MAX_TEXT = 4_096  # of one value of a query
ANSWER_S = 10.0
TURN_S = 0.002  # of a page's calls in one turn of the reactor
NO_ANSWER = 504  # the status of a page whose broker did not answer in this time


class View(NamedTuple):
    """A template below `templates/console`, and its values."""

    template: str
    values: Mapping[str, Any] = {}
    status: int = 200


class Permission(NamedTuple):
    """Permission of the viewer to do something; `why` says what is missing."""

    allowed: bool
    why: str = ""


class Refused(TxmqError):
    """The broker refused a call, or did not answer it."""

    def __init__(self, error: str, message: str, hint: str = "", status: int = 404) -> None:
        super().__init__(message, hint=hint)
        self.error, self.status = error, status

    @property
    def kind(self) -> type[TxmqError] | None:
        """The class of the broker's error; None = the console has named its own."""
        found = getattr(errors, self.error, None)
        return found if isinstance(found, type) and issubclass(found, TxmqError) else None


class PageRequest:
    """A request for a page, with the rights of the viewer.

    `names` are those in the path. `root` leads from the path to the console's own one.
    """

    def __init__(
        self,
        parts: BrokerParts,
        rights: Rights | None,
        path: str,
        names: tuple[str, ...],
        query: Query,
    ) -> None:
        self.rights, self.path, self.names = rights, path, names
        self.root = root_of(path)
        self.csrf = ""  # the token of forms, when the page is rendered
        self._parts = parts
        self._query = _texts(query)
        self._turn_began = parts.reactor.seconds()

    @property
    def user(self) -> str | None:
        """The name of the user; None = the broker has no users."""
        return None if self.rights is None else self.rights.user

    @property
    def now(self) -> int:
        """The broker's time, in microseconds."""
        return self._parts.engine.now()

    def text(self, name: str, default: str = "") -> str:
        """Return a value of the query, without spaces around it."""
        return self._query.get(name, default).strip()

    def number(self, name: str, default: int | None = None) -> int | None:
        """Return a whole number of the query; `default` where it is empty. Raises
        Refused for others.
        """
        text = self.text(name)
        if not text:
            return default
        if not is_whole_number(text):
            message = f"{name}: {text[:64]!r} is not a whole number"
            raise Refused("BadRequest", message, "use decimal digits", 400)
        return int(text)

    def time(self, name: str) -> int | None:
        """Return a time of the query, in UTC, as microseconds; None where it is empty.
        A browser's field gives 2026-01-31T12:00. Raises Refused for others.
        """
        text = self.text(name)
        if not text:
            return None
        try:
            at = datetime.fromisoformat(text)
        except ValueError:
            message = f"{name}: {text[:64]!r} is not a time"
            raise Refused("BadRequest", message, "use 2026-01-31T12:00", 400) from None
        return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()) * SECOND

    @property
    def limit(self) -> int:
        """The rows of a list on this page."""
        return max(1, min(self.number("limit") or ROWS, MAX_ROWS))

    def link(self, **changes: object) -> str:
        """Return the query of this page with changes, beginning with `?`. None leaves a
        parameter out.
        """
        changed = {**self._query, **changes}
        return "?" + urlencode({name: value for name, value in changed.items() if value})

    def may(self, call: str, /, **args: object) -> Permission:
        """Return whether the viewer may make this call. Nothing is audited."""
        if self.rights is None:
            return Permission(True)
        return self._permission(self._parts.calls.missing(call, args, self.rights))

    def action(self, call: str) -> Action:
        """Return the action that makes a call, for its button."""
        return ACTIONS[call]

    def may_act(self, call: str, fields: Mapping[str, object]) -> Permission:
        """Return whether the viewer may send a form with these fields, as far as they
        tell: what others may be added is judged when the form is sent.
        """
        if self.rights is None:
            return Permission(True)
        form = {
            name: [str(each) for each in value] if isinstance(value, list) else [str(value)]
            for name, value in fields.items()
        }
        try:
            args = ACTIONS[call].arguments(form, self._parts.engine.now())
            missing = self._parts.calls.lacks(call, args, self.rights)
        except (TxmqError, AttributeError, TypeError, ValueError):
            return Permission(True)  # too little is known
        return self._permission(missing)

    def _permission(self, missing: Need | None) -> Permission:
        if missing is None:
            return Permission(True)
        return Permission(
            False,
            f"user {self.user} may not {missing.verb} {missing.resource}; an admin can allow it:"
            f" txmq acl grant {self.user} {missing.verb} {missing.resource}",
        )

    async def ask(self, call: str, /, **args: object) -> Any:  # noqa: ANN401  # each call has its own fields
        """Make a call that only reads, and return its reply. Raises Refused."""
        hint = "its disk may be full or slow: see its log, and `txmq alarms`"
        await self._let_others_in()
        try:
            reply = await answer_to(self._parts, call, args, self.rights, hint)
        except RemoteProtocolError as error:
            raise Refused("BadRequest", error.message, error.hint, 400) from None
        if isinstance(reply, RequestRejected):
            raise Refused(type(reply).__name__, reply.message, reply.hint)
        return reply

    async def _let_others_in(self) -> None:
        """Go on in another turn of the reactor, where this one has taken its time: most
        calls are answered at once, so that a page of several is one turn else.
        """
        clock = self._parts.reactor
        if clock.seconds() - self._turn_began >= TURN_S:
            turn: Deferred[None] = Deferred()
            clock.callLater(0, turn.callback, None)
            await turn
            self._turn_began = clock.seconds()


async def answer_to(
    parts: BrokerParts,
    call: str,
    args: dict[str, object],
    rights: Rights | None,
    hint: str,
    via: str = "",
) -> Any:  # noqa: ANN401  # each call has its own fields
    """Return the broker's reply to a call, or a RequestRejected. Raises Refused, with
    the hint, where none comes in time.
    """
    waiting: Deferred[Any] = Deferred()
    parts.calls.ask(call, args, waiting.callback, rights, via)
    waiting.addTimeout(ANSWER_S, parts.reactor)
    try:
        return await waiting
    except TimedOut:
        message = f"the broker has not answered {call} for {ANSWER_S:.0f} s"
        raise Refused("NoAnswer", message, hint, NO_ANSWER) from None


class Page(NamedTuple):
    """A page at a path below the console's, "" for the first."""

    path: str
    title: str
    render: Callable[[PageRequest], Coroutine[Any, Any, View]]
    nav: str = ""
    key: str = ""
    live: bool = True
    needs: str = ""


def root_of(path: str) -> str:
    """Return the way from a path of the console to its root."""
    return "../" * path.count("/") or "./"


def _texts(query: Query) -> dict[str, str]:
    """Return the values of a query by name; of repeated ones the last. Raises
    Refused.
    """
    found: dict[str, str] = {}
    for name, values in query.items():
        try:
            found[name.decode()] = values[-1].decode()
        except UnicodeDecodeError:
            raise Refused("BadRequest", "the address is not UTF-8", "", 400) from None
        if len(values[-1]) > MAX_TEXT:
            raise Refused("BadRequest", "a value in the address is too long", "", 400)
    return found
