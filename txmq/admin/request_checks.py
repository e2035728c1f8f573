"""Checks of where a request comes from, and of whether it may change something.

The browser that shows the console also shows pages of other sites. Therefore a request
must name this machine as its host, so that DNS rebinding fails. It must not come from
another origin. Only a POST below `ACTIONS` changes something: it must say that it comes
from a page of its own origin, and has a token that such pages have (`console/csrf`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from txmq.admin.http_values import HttpReply, error_reply
from txmq.config.listen import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from twisted.web.http_headers import Headers

ACTIONS = b"/act/"  # what forms are sent to
FORM = "application/x-www-form-urlencoded"
HOST_HEADER = re.compile(
    r"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+)\]|(?P<plain>[A-Za-z0-9.-]+))(?::[0-9]{1,5})?"
)


class HttpAccess(NamedTuple):
    """Rules for requests: the hosts that a Host header may name beside this machine,
    the scheme of our own origin, and the login.

    `log_in` gets the peer's host and the Authorization header, and returns the rights
    of a user, None where the broker has no users. It raises LoginFailed and Throttled.
    """

    log_in: Callable[[str, str | None], object | None]
    hosts: frozenset[str] = frozenset()
    scheme: str = "http"


OPEN_ACCESS = HttpAccess(lambda _peer, _authorization: None)


def refusal_of(
    headers: Headers, method: bytes, access: HttpAccess, *, is_form: bool
) -> HttpReply | None:
    """Return the reply to a request that is refused before the login; None = it is
    not.
    """
    hosts = values_of(headers, "Host")
    if len(hosts) != 1 or not is_known_host(hosts[0], access.hosts):
        message = "the Host header does not name this machine"
        return error_reply(421, "WrongHost", message, "use 127.0.0.1 or localhost")
    if not _is_own_origin(values_of(headers, "Origin"), hosts[0], access.scheme):
        return error_reply(403, "WrongOrigin", "requests from other origins are refused")
    if is_form:
        return _refusal_of_form(headers)
    if _is_loaded_by_another_site(headers):
        message = "pages of other sites load nothing of the console"
        return error_reply(403, "WrongOrigin", message, "open the console itself")
    if method not in (b"GET", b"HEAD"):
        message = "only forms of the console change anything"
        hint = "use the console, or the command line: txmq --help"
        return error_reply(405, "ReadOnly", message, hint, {"Allow": "GET, HEAD"})
    return None


def is_known_host(host: str, known: Collection[str]) -> bool:
    """Return whether a Host header names this machine, or one of the known names."""
    match = HOST_HEADER.fullmatch(host)
    if match is None:
        return False
    name = (match["bracketed"] or match["plain"]).lower()
    return is_loopback(name) or name in known


def values_of(headers: Headers, name: str) -> list[str]:
    """Return the values of a header, whatever bytes they have."""
    values = headers.getRawHeaders(name.encode(), [])
    return [value.decode("latin-1") for value in values]


def _is_own_origin(origins: Collection[str], host: str, scheme: str) -> bool:
    schemes = {scheme}
    if not is_known_host(host, ()):  # a name of the settings: perhaps of a proxy with TLS
        schemes.add("https")
    return all(origin in {f"{one}://{host}" for one in schemes} for origin in origins)


def _is_loaded_by_another_site(headers: Headers) -> bool:
    """Return whether a page of another site loads this, as an image for instance: the
    browser adds the user's password, and a search costs the broker time. A link to the
    console may be anywhere.
    """
    sites, modes, places = (
        values_of(headers, f"Sec-Fetch-{name}") for name in ("Site", "Mode", "Dest")
    )
    is_link = modes == ["navigate"] and places == ["document"]
    return any(site not in ("same-origin", "none") for site in sites) and not is_link


def _refusal_of_form(headers: Headers) -> HttpReply | None:
    sites = values_of(headers, "Sec-Fetch-Site")
    # Old browsers send only one of the two headers. Programs send neither of them, and
    # have the command line.
    if any(site != "same-origin" for site in sites) or not (sites or headers.hasHeader("Origin")):
        message = "a form has to come from a page of this console"
        return error_reply(403, "WrongOrigin", message, "use the console, or txmq --help")
    types = values_of(headers, "Content-Type")
    if [one.partition(";")[0].strip().lower() for one in types] != [FORM]:
        return error_reply(415, "BadRequest", "this is not a form", f"send {FORM}")
    return None
