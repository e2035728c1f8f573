"""Which process this is: it is asked first about the transactions that it stored."""

from __future__ import annotations

import os
from functools import cache
from uuid import uuid4


@cache
def origin() -> str:
    """32 hex digits, made anew in each process."""
    return uuid4().hex


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=origin.cache_clear)
