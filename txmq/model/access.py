"""Permissions: verbs on resources, the roles that bundle them, and grants.

A permission is a verb on a kind of resource. A user's roles give permissions on all
resources of a kind; a grant gives a verb, or all verbs of a role, on one resource or on
those whose names begin alike. Whatever nobody has given is denied.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from txmq.model.message import NAME_PATTERN

KINDS = ("topic", "group", "service", "cluster")
# what each kind of resource can be asked for
VERBS: dict[str, tuple[str, ...]] = {
    "topic": ("describe", "read", "write", "create", "alter", "delete"),
    "group": ("describe", "read", "operate"),
    "service": ("describe", "write", "operate"),
    "cluster": ("describe", "report", "operate", "audit", "admin"),
}
ALL_VERBS = tuple(dict.fromkeys(verb for verbs in VERBS.values() for verb in verbs))

Permission = tuple[str, str]  # verb, kind


def _role(**verbs: str) -> frozenset[Permission]:
    return frozenset((verb, kind) for kind, words in verbs.items() for verb in words.split())


# `read` shows the bodies of messages, so operators and auditors do not have it
ROLES: dict[str, frozenset[Permission]] = {
    "producer": _role(topic="describe write create", service="describe write", cluster="report"),
    "consumer": _role(topic="describe read", group="describe read", cluster="report"),
    "operator": _role(
        topic="describe create alter delete",
        group="describe operate",
        service="describe operate",
        cluster="describe report operate",
    ),
    "auditor": _role(
        topic="describe", group="describe", service="describe", cluster="describe audit"
    ),
    "admin": _role(**{kind: " ".join(verbs) for kind, verbs in VERBS.items()}),
}
ANY = "?"  # in the place of a name: at least one resource of the kind

_RESOURCE = re.compile(rf"cluster|(topic|group|service):(\*|{NAME_PATTERN}\*?)")


class Need(NamedTuple):
    """A permission that a request needs; `name` of a cluster is ""."""

    verb: str
    kind: str
    name: str = ""

    @property
    def resource(self) -> str:
        """The resource as text."""
        if self.kind == "cluster":
            return self.kind
        return f"{self.kind}:{'*' if self.name == ANY else self.name}"


ADMIN = Need("admin", "cluster")


class Grant(NamedTuple):
    """A verb or role on a resource: "cluster", "topic:NAME", or with `*` at the end all
    names that begin so.
    """

    what: str
    resource: str

    def gives(self, need: Need) -> bool:
        """Return whether the grant covers a need."""
        kind, _, pattern = self.resource.partition(":")
        if kind != need.kind or not self._has(need.verb, kind):
            return False
        if kind == "cluster" or need.name == ANY:
            return True
        if pattern.endswith("*"):
            return need.name.startswith(pattern[:-1])
        return need.name == pattern

    def _has(self, verb: str, kind: str) -> bool:
        return self.what == verb or (verb, kind) in ROLES.get(self.what, ())


def is_resource(text: str) -> bool:
    """Return whether a text names a resource, or a prefix of names."""
    return _RESOURCE.fullmatch(text) is not None


def is_grant(what: str, resource: str) -> bool:
    """Return whether the grant gives anything at all."""
    kind = resource.partition(":")[0]
    return is_resource(resource) and (
        what in VERBS[kind] or any(known == kind for _verb, known in ROLES.get(what, ()))
    )


def what_is_wrong(what: str, resource: str) -> str:
    """Return why a grant gives nothing; "" = it gives something."""
    if not is_resource(resource):
        kinds = ", ".join(f"{kind}:NAME" for kind in KINDS if kind != "cluster")
        return f"there is no resource {resource!r}: use cluster, {kinds}; NAME may end with *"
    if is_grant(what, resource):
        return ""
    kind = resource.partition(":")[0]
    roles = (role for role, given in ROLES.items() if any(known == kind for _verb, known in given))
    return f"{what!r} gives nothing on a {kind}: use {', '.join((*VERBS[kind], *roles))}"


def allows(roles: Collection[str], grants: Iterable[Grant], need: Need) -> bool:
    """Return whether roles and grants give what is needed."""
    permission = (need.verb, need.kind)
    return any(permission in ROLES.get(role, ()) for role in roles) or any(
        grant.gives(need) for grant in grants
    )
