"""Forms of the console: check where one comes from, ask, act, and show the outcome."""

from __future__ import annotations

from base64 import b64decode
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qsl

from txmq.admin.console import registry
from txmq.admin.console.action import Action
from txmq.admin.console.actions import ACTIONS, CONTINUED
from txmq.admin.console.csrf import FIELD
from txmq.admin.console.page import PageRequest, Refused, View, answer_to, root_of
from txmq.errors import NotPermitted, RemoteProtocolError, RequestRejected, TxmqError
from txmq.errors.base import MAY_BE_DONE
from txmq.model.message_diff import Version, diff

if TYPE_CHECKING:
    from txmq.admin.console.csrf import CsrfTokens
    from txmq.admin.http_values import HttpForm
    from txmq.broker.access.guard import Rights
    from txmq.broker.service import BrokerParts

PATH = "/act/"
MAX_FIELDS = 1_000
SELECTION_S = 3.0  # for the letters of a selection; then the form asks to go on
MAX_REFUSED = 100  # letters that are shown with the reason
# fields of a form that are no arguments: the page that it is on, whether the user has
# been asked, and the reason
BACK, SURE, REASON = "back", "sure", "reason"
OPERATOR = "console"  # where the broker has no users
VIA = "console"  # how a call came, for the audit topic


class SentForm(NamedTuple):
    """A form that a page of this console has sent. `fields` are those of the call."""

    action: Action
    fields: dict[str, list[str]]
    back: str
    sure: bool
    reason: str


class FormHandler:
    """Handler of the forms of one broker's console."""

    def __init__(self, parts: BrokerParts, csrf: CsrfTokens) -> None:
        self._parts, self._csrf = parts, csrf

    async def act(self, form: HttpForm, request: PageRequest) -> View:
        """Return what a form shows: a question, an outcome, or an error."""
        back, rights = "", request.rights
        try:
            sent = self._read(form, rights)
            back = sent.back
            if form.part:  # it is shown within the page that sent it
                request.root = root_of(back.partition("?")[0])
            return await self._act(sent, rights)
        except Refused as refused:
            return _refusal(refused, back)
        except NotPermitted as denied:
            error = type(denied).__name__
            return _refusal(Refused(error, denied.message, denied.hint, 403), back)
        except RemoteProtocolError as wrong:
            hint = "correct the form"  # the broker's own hint is for clients
            return _refusal(Refused("BadRequest", wrong.message, hint, 400), back)
        except TxmqError as error:
            return _refusal(Refused(type(error).__name__, error.message, error.hint, 400), back)

    def _read(self, form: HttpForm, rights: Rights | None) -> SentForm:
        """Return a form that is one of our own. Raises Refused."""
        try:
            pairs = parse_qsl(
                form.body.decode("ascii"),
                keep_blank_values=True,
                errors="strict",
                max_num_fields=MAX_FIELDS,
            )
        except ValueError:
            message = f"this is not a form of at most {MAX_FIELDS} fields in UTF-8"
            raise Refused("BadRequest", message, "load the page again", 400) from None
        fields: dict[str, list[str]] = {}
        for name, value in pairs:
            fields.setdefault(name, []).append(value)
        user = None if rights is None else rights.user
        if not self._csrf.is_valid(user, _take(fields, FIELD), form.cookie):
            message = "this form is not of a page that you have loaded since the broker started"
            raise Refused("WrongOrigin", message, "load the page again, and repeat it there", 403)
        action = ACTIONS.get(form.path.removeprefix(PATH))
        if action is None:
            message = "the console has no such action"
            raise Refused("NotFound", message, "use the command line: txmq --help", 404)
        back, sure, reason = (_take(fields, name) for name in (BACK, SURE, REASON))
        if registry.find(back.partition("?")[0]) is None:
            back = ""
        return SentForm(action, fields, back, bool(sure), reason.strip())

    async def _act(self, sent: SentForm, rights: Rights | None) -> View:
        action = sent.action
        if "password" in sent.fields:  # its verifier takes milliseconds, for who may set it
            self._require(action.call, {"name": sent.fields.get("name", [""])[-1]}, rights)
        args = action.arguments(sent.fields, self._parts.engine.now())
        if action.has_operator:
            args["operator"] = OPERATOR if rights is None else rights.user
        if action.has_reason:
            args[REASON] = sent.reason
        asks = bool(action.ask) or action.must_say
        if asks and (not sent.sure or (action.must_say and not sent.reason)):
            self._require(action.call, args, rights)
            changes = await self._changes(args, rights) if action.call == "dlq.edit" else []
            return _question(sent, changes)
        if action.call in CONTINUED and "select" in args:
            return await self._act_on_selection(sent, args, rights)
        return _outcome(sent, await self._ask(action.call, args, rights))

    def _require(self, call: str, args: dict[str, Any], rights: Rights | None) -> None:
        """Raise Refused where the viewer may not make the call, before asking why. A
        denial is counted, and audited.
        """
        whole = args | ({REASON: "?"} if not args.get(REASON, "?") else {})
        if rights is not None and (need := self._parts.calls.missing(call, whole, rights)):
            raise self._parts.guard.denial(rights.user, need)

    async def _changes(self, args: dict[str, Any], rights: Rights | None) -> list[str]:
        """Return how an edit would change a letter, as the lines of a diff."""
        place = {name: args[name] for name in ("group", "topic", "partition", "offset")}
        shown = await self._ask("dlq.show", {**place, "bodies": True}, rights)
        before = Version(shown["headers"], b64decode(shown["body"]))
        if args.get("revert"):
            original = await self._ask("dlq.show", {**place, "bodies": True, "version": 0}, rights)
            after = Version(original["headers"], b64decode(original["body"]))
        else:
            body = b64decode(args["body"]) if "body" in args else before.body
            after = Version(args.get("headers", before.headers), body)
        edits = int(shown["edits"])
        return diff(before, after, (f"version {edits}", f"version {edits + 1}"))

    async def _act_on_selection(
        self, sent: SentForm, args: dict[str, Any], rights: Rights | None
    ) -> View:
        """Act on the letters of a selection, for a while, and sum up."""
        clock = self._parts.reactor
        until = clock.seconds() + SELECTION_S
        done, refused = 0, list[Any]()
        stopped: Refused | None = None
        following: str | None = None
        while True:
            try:
                reply = await self._ask(sent.action.call, args, rights)
            except Refused as error:
                if not (done or refused):
                    raise
                stopped = error  # what was done before is said, too
                break
            done += len(reply["done"])
            refused += reply["refused"]
            following = reply["next"]
            if following is None or clock.seconds() >= until:
                break
            args["cursor"] = following
            rights = self._renewed(rights)  # somebody may have taken them back meanwhile
        total = {"done": done, "refused": refused, "next": following}
        return _outcome(sent, total, stopped)

    def _renewed(self, rights: Rights | None) -> Rights | None:
        if rights is None:
            return None
        found = self._parts.guard.rights_of(rights.user)
        if found is None:
            message = f"user {rights.user} has been deleted"
            raise Refused("AccessDenied", message, "log in as another user", 403)
        return found

    async def _ask(self, call: str, args: dict[str, Any], rights: Rights | None) -> Any:  # noqa: ANN401  # each call has its own fields
        reply = await answer_to(self._parts, call, args, rights, MAY_BE_DONE, VIA)
        if isinstance(reply, RequestRejected):
            raise Refused(type(reply).__name__, reply.message, reply.hint, 409)
        return reply


def _take(fields: dict[str, list[str]], name: str) -> str:
    """Take a field that is no argument out of a form."""
    return fields.pop(name, [""])[-1]


def _question(sent: SentForm, changes: list[str]) -> View:
    hidden = [(name, value) for name, values in sent.fields.items() for value in values]
    is_edit = sent.action.call == "dlq.edit"
    return View(
        "question.html", {"sent": sent, "hidden": hidden, "changes": changes, "is_edit": is_edit}
    )


def _outcome(sent: SentForm, reply: Any, stopped: Refused | None = None) -> View:  # noqa: ANN401  # each call has its own fields
    fields = reply if isinstance(reply, dict) else {}
    refused = fields.get("refused", ())
    shown = {
        name: len(value) if isinstance(value, list | tuple) else value
        for name, value in fields.items()
        if name not in ("refused", "next", "scanned") and not isinstance(value, dict)
    }
    hidden = [
        (name, value)
        for name, values in sent.fields.items()
        if name != "cursor"
        for value in values
    ]
    following = fields.get("next") if sent.action.call in CONTINUED else None
    values = {
        "sent": sent,
        "shown": shown,
        "refused": [_refused_letter(one) for one in refused[:MAX_REFUSED]],
        "refused_count": len(refused),
        "next": following,
        "stopped": stopped,
        "hidden": hidden,
        "leads": sent.action.page_of(sent.fields),
    }
    return View("outcome.html", values)


def _refused_letter(one: Any) -> dict[str, Any]:  # noqa: ANN401  # as calls have it
    """Return a letter that was refused: topic, partition, offset and why."""
    *at, why = one
    return {"place": "/".join(map(str, at)), "why": why}


def _refusal(refused: Refused, back: str) -> View:
    return View("error.html", {"error": refused, "back": back}, refused.status)
