"""An action of the console: a control call that a form makes.

It says which fields of a form become which arguments, what it does, and what is asked
before: with `ask`, or where the call has to have a reason, the first POST shows a form
that asks, and the second one acts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from txmq.admin.console.fields import REPEATED, SAYING, Parse
from txmq.admin.console.words import label
from txmq.errors import LocalProtocolError
from txmq.wire.calls.registry import CALLS

Form = Mapping[str, Sequence[str]]
DANGEROUS = frozenset({
    "topic.grow", "topic.delete", "group.reset", "group.delete", "user.delete", "tx.decide",
    "xa.forget", "dlq.abandon", "retry.skip", "plan.cancel", "plan.abandon", "plan.delete",
    "clock.confirm",
})  # fmt: skip


class WrongForm(LocalProtocolError):
    """A form has a field that it should not have, or a wrong value."""

    advice = "load the page again, and send its form"


class Action(NamedTuple):
    """A call, the fields of its form, what it does, and what is asked before.

    `title` is what people read: its first word is a verb. What it does is said by
    `ask`, which is a question, or by `does`. `leads` is the page of what it made,
    with names of fields in braces. `has_reason` and `must_say`: whether the call keeps
    a reason, and refuses an empty one. `danger`: it takes away what cannot be had
    again, or moves keys for good, and its buttons look so.
    """

    call: str
    title: str
    fields: Mapping[str, Parse]
    ask: str = ""
    makes: Callable[[dict[str, Any], int], dict[str, Any]] | None = None
    does: str = ""
    leads: str = ""

    @property
    def says(self) -> str:
        return self.ask or self.does

    @property
    def danger(self) -> bool:
        return self.call in DANGEROUS

    @property
    def has_reason(self) -> bool:
        return "reason" in CALLS[self.call].model_fields

    @property
    def must_say(self) -> bool:
        return self.has_reason and CALLS[self.call].model_fields["reason"].is_required()

    @property
    def has_operator(self) -> bool:
        return "operator" in CALLS[self.call].model_fields

    def page_of(self, form: Form) -> str:
        """Return the path of what a form has made; "" = there is none."""
        named = {name: quote(values[-1], safe="") for name, values in form.items()}
        return self.leads.format(**named)

    def arguments(self, form: Form, now: int) -> dict[str, Any]:
        """Return the arguments in a form; empty fields are left out. Raises WrongForm,
        and InvalidFilter.
        """
        found: dict[str, Any] = {}
        for name, values in form.items():
            parse = self.fields.get(name)
            if parse is None:
                raise WrongForm(f"{self.call} has no field {name[:64]!r}")
            if len(values) > 1 and parse not in REPEATED:
                raise WrongForm(f"the field {name!r} is there {len(values)} times")
            try:
                if parse in REPEATED:
                    found[name] = [parse(value) for value in values if value]
                elif values[0].strip() or parse in SAYING:
                    found[name] = parse(values[0])
            except ValueError as error:
                raise WrongForm(f"{label(name)}: {error}", hint="correct the field") from None
        return found if self.makes is None else self.makes(found, now)
