"""URLs of a broker with a user, a password file and the authority of its certificate.

Options of a source may give these beside the URL. They are names only. So a
URL may go to executors, which read the files themselves: a password is in no plan of
Spark, no page of its UI and no event log.
"""

from __future__ import annotations

import os
from typing import Final
from urllib.parse import quote, urlencode

from txmq.client.protocol.address import PASSWORD_FILE, SCHEME, TLS_SCHEME, Credentials, parse_url
from txmq.errors import ConfigError

HINT: Final = "give each of them once: in the URL, or by its option"


def full_url(
    url: str, user: str | None = None, password_file: str | None = None, ca: str | None = None
) -> str:
    """Return the URL with a user, a password file and an authority.

    Raises ConfigError for an invalid URL, or one that has them already.
    """
    parse_url(url)
    scheme = TLS_SCHEME if url.startswith(TLS_SCHEME) else SCHEME
    place, _, query = url.removeprefix(scheme).partition("?")
    given = {"password_file": password_file, "ca": ca}
    more = urlencode({name: value for name, value in given.items() if value}, safe="/")
    if user and "@" in place:
        raise ConfigError("user", "the URL has a user, too", hint=HINT)
    login = f"{quote(user, safe='')}@" if user else ""
    whole = "?".join(filter(None, (login + place, "&".join(filter(None, (query, more))))))
    parse_url(scheme + whole)
    return scheme + whole


def job_url(url: str) -> str:
    """Return the URL with the user, the password file and the authority of this
    process's environment, where it has none: executors may have another environment.
    Raises ConfigError.
    """
    known = parse_url(url)  # with the names of the environment
    user = password_file = ca = None
    if known.login is not None and "@" not in url:
        user = known.login.user
    if known.login is not None and not _has_password(known.login):
        password_file = os.environ.get(PASSWORD_FILE)
    if known.tls is not None and "ca=" not in url.partition("?")[2]:
        ca = known.tls.ca
    return full_url(url, user, password_file, ca)


def _has_password(login: Credentials) -> bool:
    return login.password is not None or login.password_file is not None
