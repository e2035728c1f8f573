"""An exhaustive search: each state that steps lead to, once, the nearest ones first."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, NamedTuple, Protocol, Self, TypeVar


class World(Protocol):
    """A state, with what its steps need."""

    def key(self) -> Hashable:
        """Return what tells states apart."""

    def steps(self) -> Iterable[tuple[str, Self]]:
        """Return the states after each step that is possible, with the step's name."""

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""

    def check_end(self) -> None:
        """Raise AssertionError if something is left to do where no step is possible."""


W = TypeVar("W", bound=World)


class Result(NamedTuple):
    """How much was found: states, steps by the first word of their names."""

    states: int
    steps: Counter[str]


class InvariantBroken(AssertionError):
    """An invariant does not hold; the text has the shortest way to it."""


class Search(Generic[W]):
    """The search from one state.

    `sometimes` has conditions by name. Each has to hold in some state, or what it names
    was not searched at all. `watch` sees each state.
    """

    def __init__(
        self,
        start: W,
        sometimes: Mapping[str, Callable[[W], bool]],
        watch: Callable[[W], None] | None = None,
    ) -> None:
        self._start, self._watch = start, watch
        self._missing = dict(sometimes)
        self._ways: dict[Hashable, tuple[Hashable, str]] = {}

    def run(self, most: int) -> Result:
        """Explore everything. Raises AssertionError, as for more than `most` states."""
        waiting = deque([self._start])
        self._ways[self._start.key()] = (None, "")
        steps: Counter[str] = Counter()
        while waiting:
            world = waiting.popleft()
            key = world.key()
            self._check(world.check, key)
            if self._watch is not None:
                self._watch(world)
            nexts = self._steps_of(world, key)
            for name, after in nexts:
                steps[name.partition(" ")[0]] += 1
                self._note(after)
                if (next_key := after.key()) not in self._ways:
                    self._ways[next_key] = (key, name)
                    waiting.append(after)
            if not nexts:
                self._check(world.check_end, key)
            assert len(self._ways) <= most, f"more than {most} states"
        assert not self._missing, f"never: {', '.join(self._missing)}"
        return Result(len(self._ways), steps)

    def _steps_of(self, world: W, key: Hashable) -> list[tuple[str, W]]:
        nexts: list[tuple[str, W]] = []
        self._check(lambda: nexts.extend(world.steps()), key)
        return nexts

    def _check(self, check: Callable[[], None], key: Hashable) -> None:
        try:
            check()
        except AssertionError as error:
            raise InvariantBroken(f"{error}, after: {', '.join(self._way_to(key))}") from error

    def _note(self, world: W) -> None:
        for name in [name for name, holds in self._missing.items() if holds(world)]:
            del self._missing[name]

    def _way_to(self, key: Hashable) -> list[str]:
        names = []
        while (way := self._ways[key])[1]:
            key = way[0]
            names.append(way[1])
        return names[::-1]
