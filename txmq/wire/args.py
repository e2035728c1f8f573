"""What the arguments of control calls are made of."""

from __future__ import annotations

import binascii
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from txmq import limits
from txmq.wire.json import WireModel

Name = Annotated[str, StringConstraints(pattern=rf"^[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{limits.NAME - 1}}}$")]
Text = Annotated[str, StringConstraints(max_length=4_096)]
Reason = Annotated[str, StringConstraints(min_length=1, max_length=4_096)]
Limit = Annotated[int, Field(ge=1, le=10_000)]


def _hex_token(text: str) -> str:
    try:
        if len(binascii.unhexlify(text)) == 16:  # a UUID
            return text
    except binascii.Error:
        pass
    raise ValueError("a token is 32 hexadecimal digits")


Token = Annotated[str, AfterValidator(_hex_token)]


class Args(WireModel):
    """Arguments of a call."""
