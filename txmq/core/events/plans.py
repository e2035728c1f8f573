"""Events of replay plans: kinds 128 to 139, 145, and 160 to 162.

Letters are (topic id, partition, offset[, ...]). What becomes of a letter that is put
back follows from the events of consumers: `apply` of those records it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from txmq.core.events.base import event
from txmq.core.events.consumers import FenceChange
from txmq.core.state.failed_rows import Move
from txmq.core.state.plans import PlanSettings

NotPlanned = tuple[int, int, int, str]  # a message, and why it will not be put back
SkippedLetter = tuple[int, int, int, int, str]  # a message, visible_at of its batch, and why


@event(128)
class PlanCreated(NamedTuple):
    """A replay plan of a group was created. `selection` is JSON; "" = a client adds
    the letters.
    """

    plan_id: int
    name: str
    group_id: int
    settings: PlanSettings
    selection: str
    by: str


@event(129)
class PlanLettersAdded(NamedTuple):
    """Failed messages were added to a plan; those with a reason are skipped.

    `scan` is where the search for more goes on. `complete`: there are no more.
    """

    plan_id: int
    letters: tuple[NotPlanned, ...]
    scan: str
    complete: bool


@event(130)
class PlanFrozen(NamedTuple):
    """The letters of a plan are fixed; `digest` is that of its manifest."""

    plan_id: int
    digest: str


@event(131)
class PlanApproved(NamedTuple):
    """Somebody else than its author approved a plan."""

    plan_id: int
    by: str


@event(132)
class PlanMoved(NamedTuple):
    """A plan went to another `state` (`PlanState`). `resume_to` is where it goes on
    after a pause; 0 = unchanged.
    """

    plan_id: int
    state: int
    why: str
    by: str
    resume_to: int = 0


@event(138)
class PlanPutBack(NamedTuple):
    """The next letters of a plan were put back, up to the key `cursor` of table
    `plan_letters`: so many `letters`, all of them that are neither `skipped` nor were
    before. Of those among `moves` the rows change, because they wait behind others of
    their keys.
    """

    plan_id: int
    group_id: int
    cursor: bytes
    letters: int
    moves: tuple[Move, ...]
    fences: tuple[FenceChange, ...]
    skipped: tuple[SkippedLetter, ...]


@event(135)
class PolicySet(NamedTuple):
    """An operator set the replay policy of a group; () = it has none any more."""

    group_id: int
    policy: tuple[Any, ...]
    by: str


@event(136)
class PolicyVersionSeen(NamedTuple):
    """A policy has seen the first version of a member's program: it makes no plan."""

    group_id: int
    version: str


@event(145)
class PolicyPlanned(NamedTuple):
    """A policy made a plan, and it has seen this `version` of a member's program, "" =
    none.
    """

    plan_id: int
    name: str
    group_id: int
    settings: PlanSettings
    selection: str
    by: str
    version: str


@event(137)
class PlanLettersLost(NamedTuple):
    """Letters that a plan had put back ended unprocessed, each for its reason."""

    plan_id: int
    group_id: int
    letters: tuple[SkippedLetter, ...]


@event(160)
class PlanLettersAbandoned(NamedTuple):
    """The next letters of a plan were abandoned, up to the key `cursor` of table
    `plan_letters`: so many `letters`, all of them that are neither `skipped` nor were
    before. The plan's `why` is the reason. `moves` are messages that waited behind
    them. Their rows change later (`PlanAbandonedSwept`).
    """

    plan_id: int
    group_id: int
    cursor: bytes
    letters: int
    moves: tuple[Move, ...]
    fences: tuple[FenceChange, ...]
    skipped: tuple[SkippedLetter, ...]


@event(161)
class PlanLettersLeft(NamedTuple):
    """Letters left a plan that was not started: they are dead letters as before."""

    plan_id: int
    group_id: int
    letters: tuple[SkippedLetter, ...]


@event(139)
class PlanSwept(NamedTuple):
    """The rows of processed letters of a plan were removed, those of these chunks:
    (topic id, partition, number).
    """

    plan_id: int
    group_id: int
    chunks: tuple[tuple[int, int, int], ...]


@event(162)
class PlanAbandonedSwept(NamedTuple):
    """The rows of a plan's abandoned letters say so, up to the key `cursor`."""

    plan_id: int
    group_id: int
    cursor: bytes


@event(134)
class PlanTidied(NamedTuple):
    """At most `most` more letters of a deleted plan were removed; the plan goes with
    the last one.
    """

    plan_id: int
    most: int
