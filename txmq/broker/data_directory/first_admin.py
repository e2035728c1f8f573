"""An admin, made in the data directory of a stopped broker by its owner."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

from txmq.broker.data_directory.private_files import require_own, require_private
from txmq.broker.data_directory.storage import open_directory
from txmq.config.broker import load_broker
from txmq.core import machine
from txmq.core.events.base import KINDS, encode
from txmq.core.users import SetUser
from txmq.errors import RequestRejected

if TYPE_CHECKING:
    from pathlib import Path

    from txmq.store.filesystem import FileSystem
    from txmq.wire.scram import Verifier

BY = "the owner of the data directory"


def make_admin(fs: FileSystem, data: Path, name: str, verifier: Verifier) -> None:
    """Record an admin with this password, durably. An admin of the name gets the
    password, another user the role as well.

    Makes the directory where there is none. Raises DirectoryInUse while a broker runs,
    ConfigError where another user runs it, and what `open_directory` raises.
    """
    require_private(data)
    require_own(data)
    settings = load_broker(None, {"data": data}).broker
    opened = open_directory(fs, settings, time.time_ns() // 1_000)
    try:
        state = opened.state
        before = state.users.by_name.get(name)
        roles = tuple(sorted({"admin", *(() if before is None else before.roles)}))
        keys: Any = tuple(verifier)
        command = SetUser(name, roles, keys, BY, secrets.token_bytes(32))
        outcome = machine.decide(state, command, state.stored_at)
        if isinstance(outcome, RequestRejected):
            raise outcome
        for event in outcome.events:
            opened.log.append(
                KINDS[type(event)],
                encode(event),
                stored_at=state.stored_at,
                boot_epoch=state.boot_epoch,
            )
        flush = opened.log.cut()
        if flush is not None:
            opened.log.write(flush)
            opened.log.complete(flush)
    finally:
        opened.tables.close()
        opened.log.close()
