"""SCRAM verifiers of PostgreSQL passwords (RFC 5803), with one round of hashing.

The rounds protect weak passwords, and cost each connection 3 ms. The passwords of test
servers are random.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

SALT_BYTES = 16
ROUNDS = 1


def verifier(password: str) -> str:
    """Return the verifier of an ASCII password.

    PostgreSQL accepts it wherever it accepts a password.
    """
    salt = secrets.token_bytes(SALT_BYTES)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode("ascii"), salt, ROUNDS)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    return f"SCRAM-SHA-256${ROUNDS}:{_text(salt)}${_text(stored)}:{_text(server)}"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
