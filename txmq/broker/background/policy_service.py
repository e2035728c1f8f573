"""Replay policies: letters that are old enough, and members with a new version of their
program, begin plans.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from txmq.core.replay.policies import (
    FirePolicy,
    ReplayPolicy,
    policies,
    policy_of,
    replayable,
    waits_for,
)
from txmq.errors import RequestRejected
from txmq.model import limits
from txmq.wire.calls.letters import DlqReplay, SelectionArgs

if TYPE_CHECKING:
    from collections.abc import Callable

    from txmq.broker.engine.engine import Engine
    from txmq.broker.engine.turn_work import TurnWork
    from txmq.core.state.consumer_groups import ConsumerGroup
    from txmq.core.steps import Steps

SEARCHED = 1_000  # letters of a tick, of which one may do


class PolicyService:
    """Begins the plans of policies. All methods belong to the reactor's thread."""

    def __init__(
        self,
        engine: Engine,
        turns: TurnWork,
        next_places: Callable[[DlqReplay, int], Steps[dict[str, Any]]],
    ) -> None:
        """`next_places` finds the next letters of a selection, at most so many."""
        self._engine, self._turns, self._next_places = engine, turns, next_places
        self._looking: set[str] = set()  # groups whose letters are being searched
        self._cursors: dict[str, str] = {}  # where a long search goes on, by group
        # groups of which letters are sought that died later than it is now
        self._ahead: set[str] = set()
        self._joined: dict[str, str] = {}  # new version of a group's members

    def member_joined(self, group: str, version: str) -> None:
        """Note the version of a member's program."""
        if version:
            self._joined[group] = version

    def tick(self) -> None:
        """Timer: look for work of each policy that waits for nothing."""
        state = self._engine.state
        for group, policy in list(policies(state)):
            if group.name in self._looking or waits_for(state, group):
                continue
            version = self._joined.get(group.name, "")
            if policy.on_version and version and version not in policy.versions:
                selection = self._selection(policy, died_before=self._engine.now())
                self._engine.submit(FirePolicy(group.name, selection.model_dump_json(), version))
            elif policy.after_us and group.letters:
                self._look(group, policy)
        self._joined = {
            name: version for name, version in self._joined.items() if self._is_new(name, version)
        }

    def _is_new(self, name: str, version: str) -> bool:
        group = self._engine.state.groups.by_name.get(name)
        policy = None if group is None else policy_of(self._engine.state, group)
        return policy is not None and policy.on_version and version not in policy.versions

    def _look(self, group: ConsumerGroup, policy: ReplayPolicy) -> None:
        """Begin a plan if the group has letters for it. Each tick searches a part."""
        if group.name in self._ahead:
            select = self._selection(policy, died_from=self._engine.now() + policy.after_us)
        else:
            died_before = self._engine.certain() - policy.after_us
            select = self._selection(policy, died_before=max(died_before, 0))
        self._looking.add(group.name)
        cursor = self._cursors.pop(group.name, None)
        args = DlqReplay(group=group.name, select=select, cursor=cursor)
        then = partial(self._found, group.name, select)
        self._turns.run(self, self._search(args), then)

    def _search(self, args: DlqReplay) -> Steps[dict[str, Any]]:
        """Search; after a failure, such as a disk that is away, a later tick does."""
        try:
            return (yield from self._next_places(args, SEARCHED))
        except Exception:
            self._looking.discard(args.group)
            raise

    def _found(
        self, group: str, select: SelectionArgs, page: dict[str, Any] | RequestRejected
    ) -> None:
        self._looking.discard(group)
        state = self._engine.state
        of = state.groups.by_name.get(group)
        if isinstance(page, RequestRejected) or of is None:  # its topic, or the group, was deleted
            return
        if replayable(state, of, page["letters"]):
            self._engine.submit(FirePolicy(group, select.model_dump_json()))
        elif page["next"] is not None:
            self._cursors[group] = page["next"]
        else:
            self._ahead ^= {group}

    def _selection(
        self, policy: ReplayPolicy, *, died_from: int = 0, died_before: int = limits.TIME
    ) -> SelectionArgs:
        """Return the policy's selection, within these times of death.

        A letter that has died far in the future did so before the clock was set back.
        It is old enough: it would wait for longer than the policy says.
        """
        chosen = SelectionArgs.model_validate_json(policy.selection)
        before, most, fewer = chosen.died_before, chosen.max_replays, policy.max_replays - 1
        own = {
            "died_from": max(died_from, chosen.died_from or 0) or None,
            "died_before": died_before if before is None else min(died_before, before),
            "max_replays": fewer if most is None else min(fewer, most),
        }
        return chosen.model_copy(update=own)
