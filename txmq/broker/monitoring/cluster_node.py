"""The node of this process in its cluster, as operators see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from txmq.model.cluster import ClusterView


class NodeNumbers(NamedTuple):
    """What a node counts and measures since its start.

    It read a record of the partition `heard_s` ago. Of a leader, the last slice that is
    certain to count was begun `unconfirmed_s` ago. `questions` are acknowledgements
    that were not certain, which the leader read on for (rule B).
    """

    leads: bool
    epoch: int
    heard_s: float
    unconfirmed_s: float
    claims: int  # read, whether they counted or not
    questions: int


class Nodes(Protocol):
    """The nodes of a shared log, as one of them knows them."""

    def view(self) -> ClusterView: ...
    def addresses(self) -> tuple[str, ...]:
        """Return where clients find the nodes, the leader first."""


class ClusterNode(Nodes, Protocol):
    """A node of a cluster."""

    def numbers(self) -> NodeNumbers: ...

    def step_down(self) -> None:
        """Drain, let another node lead, and follow."""
