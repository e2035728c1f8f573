"""Differences between two versions of a message, as lines of a unified diff."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import unified_diff
from hashlib import sha256
from typing import NamedTuple

MAX_COMPARED = 256 << 10  # bytes
MAX_LINES = 2_000  # comparing takes time with the square of their number


class Version(NamedTuple):
    """Parts of a message that an edit may change."""

    headers: Mapping[str, str]
    body: bytes


def diff(before: Version, after: Version, names: tuple[str, str]) -> list[str]:
    """Return the lines of a diff: headers first, then the bodies; none = no difference.

    JSON is compared in lines of its own; other bodies as text, or by their digests.
    """
    old, new = _headers(before), _headers(after)
    if before.body != after.body:
        lines = _bodies(before.body, after.body)
        old, new = old + lines[0], new + lines[1]
    return list(unified_diff(old, new, *names, lineterm=""))


def _headers(version: Version) -> list[str]:
    return [f"{name}: {value}" for name, value in sorted(version.headers.items())]


def _bodies(*bodies: bytes) -> list[list[str]]:
    if max(map(len, bodies)) <= MAX_COMPARED:
        for lines in (_json_lines, _text_lines):
            try:
                found = [lines(body) for body in bodies]
            except (ValueError, RecursionError):
                continue
            if found[0] != found[-1] and max(map(len, found)) <= MAX_LINES:
                return found
    return [[f"({len(body)} bytes, SHA-256 {sha256(body).hexdigest()})"] for body in bodies]


def _json_lines(body: bytes) -> list[str]:
    return json.dumps(json.loads(body), indent=2, ensure_ascii=False).splitlines()


def _text_lines(body: bytes) -> list[str]:
    return body.decode().split("\n")
