"""SCRAM-SHA-256 (RFC 5802 and 7677): both sides of the conversation, without I/O.

The broker keeps a verifier, from which the password cannot be read. Both sides prove to
each other that they know it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import stringprep
import unicodedata
from functools import lru_cache
from typing import NamedTuple

from txmq.errors import LoginFailed

MECHANISM = "SCRAM-SHA-256"
ITERATIONS = 15_000  # of new verifiers
MIN_ITERATIONS, MAX_ITERATIONS = 4_096, 1_000_000  # that a client accepts of a broker
SALT_BYTES = 16
SHORTEST, MAX_PASSWORD = 8, 1_024  # characters: of a new one, of any
NO_BINDING = "n,,"
WRONG = "wrong user or password"
WRONG_HINT = "check both; an admin sets a new password: txmq user password NAME"

_NONCE = r"[!-+\--~]{8,128}"  # printable ASCII without a comma
_CLIENT_FIRST = re.compile(rf"([ny],,)(n=([^,\x00]{{1,255}}),r=({_NONCE}))")
_SERVER_FIRST = re.compile(
    rf"r=({_NONCE}{_NONCE}),s=([A-Za-z0-9+/]{{4,88}}={{0,2}}),i=([1-9][0-9]{{0,9}})"
)
_CLIENT_FINAL = re.compile(
    rf"(c=([A-Za-z0-9+/=]{{4,64}}),r=({_NONCE}{_NONCE})),p=([A-Za-z0-9+/]{{43}}=)"
)
_SERVER_FINAL = re.compile(r"v=([A-Za-z0-9+/]{43}=)")


class Verifier(NamedTuple):
    """Verifier of a password: all that a broker keeps of it."""

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes

    def __repr__(self) -> str:
        """Leave the keys out."""
        return f"Verifier(iterations={self.iterations})"


def prepare(password: str) -> bytes:
    """Return a password's bytes as SASLprep (RFC 4013) has them. Raises ValueError."""
    mapped = "".join(
        " " if stringprep.in_table_c12(c) else c for c in password if not stringprep.in_table_b1(c)
    )
    text = unicodedata.ucd_3_2_0.normalize("NFKC", mapped)
    if not 0 < len(text) <= MAX_PASSWORD:
        raise ValueError(f"a password has 1 to {MAX_PASSWORD} characters")
    if any(stringprep.in_table_c21_c22(c) or stringprep.in_table_c5(c) for c in text):
        raise ValueError("a password has no control characters")
    return text.encode()


@lru_cache(maxsize=64)  # connections of one client share it
def _salted(password: bytes, salt: bytes, iterations: int) -> bytes:
    return hashlib.pbkdf2_hmac("sha256", password, salt, iterations)


def new_verifier(password: str) -> Verifier:
    """Return the verifier of a password that somebody has chosen. Raises ValueError."""
    if len(password) < SHORTEST:
        raise ValueError(f"it has fewer than {SHORTEST} characters")
    return make_verifier(password)


def make_verifier(
    password: str, salt: bytes | None = None, iterations: int = ITERATIONS
) -> Verifier:
    """Return the verifier of a password. Raises ValueError for one that cannot be."""
    salt = secrets.token_bytes(SALT_BYTES) if salt is None else salt
    salted = _salted(prepare(password), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    server_key = hmac.digest(salted, b"Server Key", "sha256")
    return Verifier(salt, iterations, hashlib.sha256(client_key).digest(), server_key)


def is_password(verifier: Verifier, password: str) -> bool:
    """Return whether a password is the right one, in the same time either way."""
    try:
        mine = make_verifier(password, verifier.salt, verifier.iterations)
    except ValueError:
        mine = make_verifier("x", verifier.salt, verifier.iterations)
        return hmac.compare_digest(mine.stored_key, b"")
    return hmac.compare_digest(mine.stored_key, verifier.stored_key)


def fake_verifier(secret: bytes, user: str) -> Verifier:
    """Return the verifier of a user that does not exist: always the same for a name, so
    that nobody can tell it from a real one, and no password fits.
    """
    salt = hmac.digest(secret, b"salt " + user.encode(errors="replace"), "sha256")[:SALT_BYTES]
    return Verifier(salt, ITERATIONS, secrets.token_bytes(32), secrets.token_bytes(32))


class ScramClient:
    """The client's side of one login: `first`, `final`, then `finish`."""

    def __init__(self, user: str, password: str, nonce: str | None = None) -> None:
        self._password = password
        self._nonce = nonce or secrets.token_urlsafe(18)
        name = user.replace("=", "=3D").replace(",", "=2C")
        self._bare = f"n={name},r={self._nonce}"
        self._signature = b""

    def first(self) -> str:
        """Return the first message."""
        return NO_BINDING + self._bare

    def final(self, server_first: str) -> str:
        """Return the message with the proof. Raises LoginFailed."""
        match = _SERVER_FIRST.fullmatch(server_first)
        if match is None or not match[1].startswith(self._nonce):
            raise LoginFailed("the broker's part of the login is not valid")
        rounds = int(match[3])
        if not MIN_ITERATIONS <= rounds <= MAX_ITERATIONS:
            raise LoginFailed(
                f"the broker asks for {rounds} rounds of hashing, not {MIN_ITERATIONS} to"
                f" {MAX_ITERATIONS}"
            )
        try:
            salted = _salted(prepare(self._password), _bytes(match[2]), rounds)
        except ValueError as error:
            raise LoginFailed(str(error)) from None
        client_key = hmac.digest(salted, b"Client Key", "sha256")
        server_key = hmac.digest(salted, b"Server Key", "sha256")
        final = f"c={_text(NO_BINDING.encode())},r={match[1]}"
        message = f"{self._bare},{server_first},{final}".encode()
        stored_key = hashlib.sha256(client_key).digest()
        proof = _xor(client_key, hmac.digest(stored_key, message, "sha256"))
        self._signature = hmac.digest(server_key, message, "sha256")
        return f"{final},p={_text(proof)}"

    def finish(self, server_final: str) -> None:
        """Check that the broker knows the password, too. Raises LoginFailed."""
        match = _SERVER_FINAL.fullmatch(server_final)
        if (
            match is None
            or not self._signature
            or not hmac.compare_digest(_bytes(match[1]), self._signature)
        ):
            raise LoginFailed(
                "the broker did not prove that it knows the password",
                hint="something else may answer at its address: check it, and use TLS",
            )


class ClientFirst(NamedTuple):
    """A client's first message."""

    user: str
    bare: str
    nonce: str
    header: str


def parse_client_first(text: str) -> ClientFirst:
    """Return the parts of a client's first message. Raises LoginFailed."""
    match = _CLIENT_FIRST.fullmatch(text)
    if match is None:
        raise LoginFailed("the first message of the login is not valid")
    user = match[3].replace("=2C", ",").replace("=3D", "=")
    return ClientFirst(user, match[2], match[4], match[1])


class ScramServer:
    """The broker's side of one login, for the user's verifier or a fake one."""

    def __init__(self, first: ClientFirst, verifier: Verifier, nonce: str | None = None) -> None:
        self.user = first.user
        self._first, self.verifier = first, verifier
        self._nonce = first.nonce + (nonce or secrets.token_urlsafe(18))

    def challenge(self) -> str:
        """Return the first message to the client."""
        salt, iterations, *_ = self.verifier
        return f"r={self._nonce},s={_text(salt)},i={iterations}"

    def verify(self, client_final: str) -> str | None:
        """Return the last message to the client; None = it does not know the
        password.
        """
        match = _CLIENT_FINAL.fullmatch(client_final)
        if match is None:
            return None
        bound = hmac.compare_digest(match[2], _text(self._first.header.encode()))
        fresh = hmac.compare_digest(match[3], self._nonce)
        message = f"{self._first.bare},{self.challenge()},{match[1]}".encode()
        signature = hmac.digest(self.verifier.stored_key, message, "sha256")
        client_key = _xor(_bytes(match[4]), signature)
        right = hmac.compare_digest(hashlib.sha256(client_key).digest(), self.verifier.stored_key)
        if not (bound and fresh and right):
            return None
        return f"v={_text(hmac.digest(self.verifier.server_key, message, 'sha256'))}"


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    """Return the bytes of base64. Raises LoginFailed."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise LoginFailed("a message of the login is not base64") from None


def _xor(a: bytes, b: bytes) -> bytes:
    return bytes(x ^ y for x, y in zip(a, b, strict=True))
