"""The process's file handles: log, tables and databases come first, connections get
what is left.
"""

from __future__ import annotations

import resource

RESERVED = 256  # segments, tables, sockets of resolvers and of HTTP, and the child processes' pipes


def raise_limit() -> None:
    """Takes as many as the system lets the process have; what a shell sets by default
    is for people at a terminal.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def room() -> int:
    """For how many connections there are handles."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft - RESERVED
