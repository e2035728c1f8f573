"""Drain of spools without an owner, by a command or a program that only does that."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from txmq.client.blocking.connect import connect
from txmq.errors import RequestTimeout
from txmq.recover.spool import retry_refused


class DrainResult(NamedTuple):
    """Messages that were sent, that still wait, and that the broker refused."""

    sent: int
    left: int
    refused: int


def drain_spools(
    url: str, directory: str, *, timeout: float, service: str | None = None, refused: bool = False
) -> DrainResult:
    """Send what waits in the spools without an owner below a directory.

    With `refused`, try those messages again, too, that the broker refused. Spools of a
    live process are left to it. Raises StoreError where the directory cannot be used.
    """
    if refused:
        retry_refused(directory)
    with connect(url, service=service, spool=directory) as client:
        waiting, already_refused = client.spool.waiting, client.spool.refused
        with suppress(RequestTimeout):  # the result tells
            client.spool.wait(timeout)
        left, now_refused = client.spool.waiting, client.spool.refused - already_refused
    return DrainResult(waiting - left - now_refused, left, now_refused)
