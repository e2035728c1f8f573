"""The broker's own topics: their names begin with `_txmq.`, and nobody else makes,
changes or writes them. Where there are users, auditors read them.
"""

from __future__ import annotations

from txmq.errors import LocalProtocolError
from txmq.model.message import check_name

PREFIX = "_txmq."
AUDIT = "_txmq.audit"  # what operators did


def check_topic(name: str) -> str:
    """Return the name of a topic that a message may be sent to, if it is one. Raises
    LocalProtocolError.
    """
    if is_own(check_name(name, "topic")):
        raise LocalProtocolError(f"topic {name!r} is the broker's own", hint="choose another name")
    return name


def is_own(name: str) -> bool:
    """Return whether a topic's name is reserved for the broker."""
    return name.startswith(PREFIX)
