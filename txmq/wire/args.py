"""What the arguments of control calls are made of."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from txmq import limits
from txmq.wire.json import WireModel

Name = Annotated[str, StringConstraints(pattern=rf"^[A-Za-z0-9_-][A-Za-z0-9._-]{{0,{limits.NAME - 1}}}$")]
Text = Annotated[str, StringConstraints(max_length=4_096)]
Reason = Annotated[str, StringConstraints(min_length=1, max_length=4_096)]
Limit = Annotated[int, Field(ge=1, le=10_000)]


def _token(text: str) -> str:
    """Without its hyphens."""
    if TOKEN.fullmatch(text) is None:
        raise ValueError("a token is 32 hexadecimal digits, or those of a UUID with its hyphens")
    return text.replace("-", "").lower()


TOKEN = re.compile(r"[0-9a-fA-F]{32}|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
Token = Annotated[str, AfterValidator(_token)]


class Args(WireModel):
    """Arguments of a call. There are many kinds and a process checks few: each gets its validator at its first use."""

    model_config = ConfigDict(defer_build=True)
