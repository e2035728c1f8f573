"""URLs of a broker: `txmq://host:port`, or several addresses that are tried in turn.

Those of a cluster are nodes of one log; nodes tell of others (`LogIdentity.nodes`).

`txmqs://user@host:port/?ca=ca.pem` logs in and uses TLS. The password comes from
TXMQ_PASSWORD, from the file that TXMQ_PASSWORD_FILE or `password_file=` names, or from
the URL itself; where it may be seen by others, such as on a command line, it should not
be in the URL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import parse_qsl, unquote

from txmq.errors import ConfigError

SCHEME, TLS_SCHEME = "txmq://", "txmqs://"
PORT = 7650
PORT_DIGITS = 5
HINT = "use txmq://127.0.0.1:7650, or txmq://a:7650,b:7650 for addresses to try in turn"
OPTIONS = ("ca", "cert", "key", "verify", "password_file")
OPTIONS_HINT = "valid options: ca, cert, key, verify=full|ca, password_file"
PASSWORD, PASSWORD_FILE, USER = (
    "TXMQ_PASSWORD",
    "TXMQ_PASSWORD_FILE",
    "TXMQ_USER",
)  # names of variables
_LOGIN = re.compile(r"//.*@")
_PASSWORD = re.compile(r"((?:^(?!\w+:?//)|//)[^@:/]*):.*@")  # the scheme may be forgotten
_PASSWORD_OPTION = re.compile(r"(passw(?:or)?d=)[^&]*", re.IGNORECASE)  # as libpq has it


class Address(NamedTuple):
    """Host and port of a broker."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user, and where the password is."""

    user: str
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None

    def get_password(self) -> str:
        """Return the password. Raises ConfigError where there is none."""
        if self.password is not None:
            return self.password
        path = self.password_file
        if path is None and PASSWORD in os.environ:
            return os.environ[PASSWORD]
        path = path or os.environ.get(PASSWORD_FILE)
        if path is None:
            raise ConfigError(
                "url",
                f"user {self.user!r} has no password",
                hint=f"set {PASSWORD}, or {PASSWORD_FILE} to the name of a file with it",
            )
        try:
            return Path(path).read_text(encoding="utf-8").rstrip("\r\n")
        except OSError as error:
            raise ConfigError(
                path,
                f"cannot be read: {error.strerror}",
                hint="it has the password, and its owner is who runs this program",
            ) from None


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Check of the broker's certificate, and the client's own certificate.

    Without `ca` the system's authorities are trusted. `check_host` is off for
    `verify=ca`: any certificate of the authority will do.
    """

    ca: str | None = None
    cert: str | None = None
    key: str | None = field(default=None, repr=False)
    check_host: bool = True


class Addresses(tuple[Address, ...]):  # noqa: SLOT001  # tuples cannot have slots
    """The addresses of one broker in their order. Login and TLS None = without."""

    login: Credentials | None
    tls: TlsSettings | None

    def __new__(
        cls,
        addresses: Iterable[Address],
        login: Credentials | None = None,
        tls: TlsSettings | None = None,
    ) -> Self:
        made = super().__new__(cls, addresses)
        made.login, made.tls = login, tls
        return made


def parse_url(url: str | Addresses) -> Addresses:
    """Return the addresses in a URL, with login and TLS. Raises ConfigError.

    The addresses of a log that another one has told of are given as they are.
    """
    if isinstance(url, Addresses):
        return url
    scheme = next((one for one in (SCHEME, TLS_SCHEME) if url.startswith(one)), None)
    if scheme is None:
        raise ConfigError("url", f"{safe(url)!r} does not begin with {SCHEME}", hint=HINT)
    place, _, query = url.removeprefix(scheme).partition("?")
    user_text, _, hosts = place.rpartition("@")
    options = _options(query, url)
    parts = [part.removeprefix(scheme).rstrip("/") for part in hosts.split(",")]
    return Addresses(
        (_parse_address(part, url) for part in parts),
        _login(user_text, options, url),
        _tls(options, url, encrypted=scheme == TLS_SCHEME),
    )


def safe(url: str) -> str:
    """Return a URL without its password, for errors and logs."""
    return _PASSWORD_OPTION.sub(r"\1***", _PASSWORD.sub(r"\1:***@", url))


def url_at(url: str, addresses: Iterable[object]) -> str:
    """Return a URL with other addresses, with its login and its options."""
    scheme = TLS_SCHEME if url.startswith(TLS_SCHEME) else SCHEME
    place, query_mark, query = url.removeprefix(scheme).partition("?")
    login, at, _hosts = place.rpartition("@")
    return f"{scheme}{login}{at}{','.join(map(str, addresses))}{query_mark}{query}"


def place_of(url: str) -> str:
    """Return a URL without login and options: what it leads to, for findings."""
    return _LOGIN.sub("//", url.partition("?")[0]).rstrip("/")


def _options(query: str, url: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, strict_parsing=True) if query else []
    except ValueError:
        raise ConfigError("url", f"invalid options in {safe(url)!r}", hint=OPTIONS_HINT) from None
    options = dict(pairs)
    unknown = options.keys() - set(OPTIONS)
    if unknown or len(options) != len(pairs):
        name = min(unknown, default="")
        message = f"unknown or repeated option {name!r} in {safe(url)!r}"
        raise ConfigError("url", message, hint=OPTIONS_HINT)
    return options


def _login(text: str, options: dict[str, str], url: str) -> Credentials | None:
    user, colon, password = text.partition(":")
    user = unquote(user) or os.environ.get(USER, "")
    if not user:
        if colon or "password_file" in options:
            raise ConfigError("url", f"a password without a user in {safe(url)!r}", hint=HINT)
        return None
    return Credentials(user, unquote(password) if colon else None, options.get("password_file"))


def _tls(options: dict[str, str], url: str, *, encrypted: bool) -> TlsSettings | None:
    if not encrypted:
        if options.keys() - {"password_file"}:
            message = f"{safe(url)!r} has options of TLS"
            raise ConfigError("url", message, hint=f"begin it with {TLS_SCHEME}")
        return None
    verify = options.get("verify", "full")
    if verify not in {"full", "ca"} or ("key" in options and "cert" not in options):
        raise ConfigError("url", f"invalid options in {safe(url)!r}", hint=OPTIONS_HINT)
    return TlsSettings(
        options.get("ca", os.environ.get("TXMQ_CA")),
        options.get("cert"),
        options.get("key"),
        verify == "full",
    )


def node_address(text: str) -> Address | None:
    """Return the address by which a node is told of, None where it cannot be one."""
    try:
        return _parse_address(text, text)
    except ConfigError:
        return None


def _parse_address(text: str, url: str) -> Address:
    host, separator, digits = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, digits = text, str(PORT)
    port = (
        int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= PORT_DIGITS else 0
    )
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    if (
        not _is_host(host)
        or not 0 < port < 1 << 16
        or (":" in host) != bracketed
        or any(c in host for c in "/@?# ")
    ):
        raise ConfigError("url", f"{text!r} in {safe(url)!r} is not a host and port", hint=HINT)
    return Address(host, port)


def _is_host(text: str) -> bool:
    """Return False for what the resolver refuses with an error of its own: an empty
    label or one of more than 63 characters, or characters that no name has.
    """
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False
