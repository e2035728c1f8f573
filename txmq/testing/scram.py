"""The form in which a PostgreSQL server keeps a password (RFC 5803), with one round of
hashing.

The rounds protect passwords that somebody could guess, and cost each new connection 3
ms: no server for tests has one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

SALT_BYTES = 16
ROUNDS = 1


def verifier(password: str) -> str:
    """What proves a random ASCII password, and does not tell it; PostgreSQL takes it
    wherever it takes a password.
    """
    salt = secrets.token_bytes(SALT_BYTES)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode("ascii"), salt, ROUNDS)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    return f"SCRAM-SHA-256${ROUNDS}:{_text(salt)}${_text(stored)}:{_text(server)}"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
