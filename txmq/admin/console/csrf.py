"""Tokens against forged requests (CSRF): no other site can send a form of the console.

A form is accepted with two things that only a page of this console gives: a cookie,
which a browser sends with requests from the same site only, and a token in the form,
which other sites cannot read. Both change with each start of the broker. The token is
that of the user, too: one user's page is of no use with another's login.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FIELD = "csrf"


class CsrfTokens:
    """The tokens of one start of the broker. `secure`: browsers reach it by TLS."""

    def __init__(self, *, secure: bool) -> None:
        self._secret = secrets.token_bytes(32)
        # brokers at other ports of this machine share the browser's cookies
        self._name = "txmq_" + self._mac("name")[:12]
        self._value = self._mac("cookie")
        self.headers = {
            "Set-Cookie": f"{self._name}={self._value}; Path=/; HttpOnly; SameSite=Strict"
            + ("; Secure" if secure else "")
        }

    def token(self, user: str | None) -> str:
        """Return the token for the forms of a user; None = the broker has no users."""
        return self._mac("anyone" if user is None else f"user {user}")

    def is_valid(self, user: str | None, token: str, cookie: Callable[[str], str]) -> bool:
        """Return whether a form comes from a page that the broker gave to this user."""
        expected = (self._value, self.token(user))
        given = (cookie(self._name), token)
        pairs = zip(expected, given, strict=True)
        return all(hmac.compare_digest(one.encode(), two.encode()) for one, two in pairs)

    def _mac(self, text: str) -> str:
        return hmac.digest(self._secret, text.encode(), "sha256").hex()
