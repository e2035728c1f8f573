"""The payload of a control call, as clients send it.

Apart from `registry`, whose models of all arguments take a client longer to load than
everything else that it needs.
"""

from __future__ import annotations

from txmq.wire.json import dump


def encode_call(name: str, args: dict[str, object]) -> bytes:
    """Return the payload of a call; the broker checks the arguments."""
    return dump({"call": name, "args": args})
