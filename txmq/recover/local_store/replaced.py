"""Stores of topics that were deleted and made again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from txmq.recover.local_store.directory import read_identity, store_path
from txmq.store.filesystem import RealFileSystem

if TYPE_CHECKING:
    from txmq.recover.local_store.values import StoreOwner


def move_aside(directory: str, owner: StoreOwner) -> str | None:
    """Rename the store of an earlier topic of the owner's name, whose messages are gone
    at the broker. Return its new path; None if the store is not such a one.
    """
    path = store_path(directory, owner)
    found = read_identity(RealFileSystem(), path)
    if found is None or found.owner.topic_id == owner.topic_id:
        return None
    if found.owner._replace(topic_id=owner.topic_id, ordered=owner.ordered) != owner:
        return None
    aside = f"{path}.{found.owner.topic_id}"
    Path(path).rename(aside)
    return aside
