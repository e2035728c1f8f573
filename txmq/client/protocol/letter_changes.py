"""Changes of dead letters by services: replays, copies, ends, trials and files, by
control calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from txmq.client.protocol.calls import Calls
from txmq.client.protocol.letter_file import LetterWriter
from txmq.client.protocol.letters import DeadLetter, LetterOptions, selection_args
from txmq.crashpoints import crashpoint
from txmq.errors import LocalProtocolError

Place = tuple[str, int, int]  # topic, partition, offset
PER_CALL = {"dlq.redrive": 500}  # letters: the limits of the broker
MOST_PER_CALL = 1_000  # of other calls
PAGE = 1_000
NUMBERED = ("topic", "partition", "offset", "number", "edits")
NO_ANSWER = "no answer yet"
TRIAL_POLL_S = 0.2  # between two looks for the outcome
IMPORT_EXPIRES_S = 86_400.0  # until what an interrupted import has stored is dropped


class RefusedLetter(NamedTuple):
    """A letter that was not changed, and the reason."""

    topic: str
    partition: int
    offset: int
    why: str


class ChangedLetters(NamedTuple):
    """Places of the letters that were changed, with partition and offset of the copy
    behind where there is one; and those that were not.
    """

    done: list[tuple[Any, ...]]
    refused: list[RefusedLetter]


class Trial(NamedTuple):
    """The outcome of a trial: "processed", "died again" with the error, "ended" or
    "unknown" with the reason in `why`, or "no answer yet". A letter that was changed
    since is "abandoned" or "at a consumer". `dead_at` is in microseconds.
    """

    outcome: str
    why: str = ""
    consumer: str = ""
    error_type: str = ""
    error_text: str = ""
    dead_at: int = 0

    @property
    def is_processed(self) -> bool:
        """True if the member has processed the letter."""
        return self.outcome == "processed"


class ExportedLetters(NamedTuple):
    """Number of letters in a file, of those that are damaged at the broker, and of
    those that were marked as exported; and those that could not be marked.
    """

    letters: int
    damaged: int
    marked: int
    refused: list[RefusedLetter]


class ImportedLetters(NamedTuple):
    """Number of messages of a file that were sent, and of damaged letters, which have
    none. `repeated`: another import of the file has sent them, and this one nothing.
    """

    messages: int
    damaged: int
    repeated: bool = False


async def change_letters(
    call: Calls,
    name: str,
    group: str,
    letters: Sequence[Place | DeadLetter] | None,
    saved: str | None,
    selection: LetterOptions,
    **args: object,
) -> ChangedLetters:
    """Change letters by their places, or all of a selection: those that were there when
    the first call began.
    """
    if letters is None:
        if saved is None and not selection:
            raise LocalProtocolError(
                "neither letters nor a selection",
                hint="name letters or properties, such as states=['open'] or ['retrying']",
            )
        portions = [selection_args(saved, selection)]
    else:
        if saved is not None or selection:
            raise LocalProtocolError(
                "letters that are both named and selected",
                hint="give either `letters` or properties",
            )
        portions = portions_of(name, [place_of(letter) for letter in letters])
    return await change_portions(call, name, portions, group=group, **args)


def portions_of(call: str, places: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the arguments that name letters, in as many portions as the broker
    demands.
    """
    most = PER_CALL.get(call, MOST_PER_CALL)
    return [{"letters": places[at : at + most]} for at in range(0, len(places), most)]


async def change_portions(
    call: Calls, name: str, portions: Iterable[Mapping[str, Any]], **args: object
) -> ChangedLetters:
    """Make a call for each portion of letters, and again for those that it leaves."""
    done: list[tuple[Any, ...]] = []
    refused: list[RefusedLetter] = []
    for portion in portions:
        more: Mapping[str, Any] | None = portion
        while more is not None:
            reply = await call(name, {**more, **args})
            done += [tuple(place) for place in reply["done"]]
            refused += [RefusedLetter(*one) for one in reply["refused"]]
            more = None
            if reply.get("left"):  # there was no room for them
                more = {"letters": reply["left"]}
            elif reply.get("next") is not None:
                more = {**portion, "cursor": reply["next"]}
            if more is not None:
                crashpoint("letters.between_calls")
    return ChangedLetters(done, refused)


def redrive_args(
    to: str | None, to_group: str | None, *, abandon: bool, again: bool
) -> dict[str, object]:
    """Return the arguments of dlq.redrive that say where copies go."""
    if (to is None) == (to_group is None):
        raise LocalProtocolError(
            "copies for neither or both", hint="give either `to`, a topic, or `to_group`"
        )
    aim = {"to": to} if to_group is None else {"to_group": to_group}
    return aim | {"abandon": abandon, "again": again}


def place_of(letter: Place | DeadLetter) -> list[Any]:
    """Return the place of a letter for a call."""
    if isinstance(letter, DeadLetter):
        return [letter.topic, letter.partition, letter.offset]
    return list(letter)


def try_args(letter: DeadLetter, member: str, operator: str, reason: str) -> dict[str, Any]:
    """Return the arguments of dlq.try."""
    named = {"member": member, "operator": operator, "reason": reason}
    return _named(letter) | named


def tried_args(letter: DeadLetter, reply: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of dlq.tried, after the reply to dlq.try."""
    return _named(letter) | {"number": reply["number"]}


def _named(letter: DeadLetter) -> dict[str, Any]:
    return {name: getattr(letter, name) for name in ("group", "topic", "partition", "offset")}


async def write_letters(
    call: Calls, chosen: Mapping[str, Any], writer: LetterWriter
) -> list[list[Any]]:
    """Write the letters of a group and a selection. Return what identifies those that
    can be read.
    """
    written: list[list[Any]] = []
    more: dict[str, Any] = {}
    while True:
        page = await call("dlq.list", {**chosen, **more, "limit": PAGE, "bodies": True})
        for letter in page["letters"]:
            writer.write(letter)
            if "damaged" not in letter:
                written.append([letter[name] for name in NUMBERED])
        if page["next"] is None:
            return written
        more = {"cursor": page["next"]}


async def mark_exported(
    call: Calls, group: str, written: list[list[Any]], operator: str | None, reason: str
) -> ChangedLetters:
    """Note with letters that a file has them, once it is on disk."""
    if operator is None:
        raise LocalProtocolError("a mark without an operator", hint="name yourself: operator=…")
    portions = portions_of("dlq.exported", written)
    named = {"group": group, "operator": operator, "reason": reason}
    return await change_portions(call, "dlq.exported", portions, **named)
