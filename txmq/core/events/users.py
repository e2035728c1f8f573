"""Events of users and their permissions. The log holds no passwords."""

from __future__ import annotations

from typing import NamedTuple

from txmq.core.events.base import event


@event(204)
class UserSet(NamedTuple):
    """A user was added, or has other roles or another password; grants stay.

    `verifier` is (salt, iterations, stored key, server key) of SCRAM-SHA-256, empty =
    the user has no password and logs in by a certificate.
    """

    name: str
    roles: tuple[str, ...]
    verifier: tuple[bytes, int, bytes, bytes] | tuple[()]
    by: str


@event(205)
class UserDeleted(NamedTuple):
    """A user and all grants of this user are gone."""

    name: str
    by: str


@event(206)
class AccessGranted(NamedTuple):
    """A user got a verb or a role on a resource."""

    user: str
    what: str
    resource: str
    by: str


@event(207)
class AccessRevoked(NamedTuple):
    """A grant was taken back."""

    user: str
    what: str
    resource: str
    by: str


@event(208)
class LoginSecretMade(NamedTuple):
    """The secret behind the salts of users that do not exist, made with the first
    user.
    """

    secret: bytes


@event(210)
class QuotaSet(NamedTuple):
    """A user has these limits: the fields of `txmq.model.quota.Quota`."""

    name: str
    quota: tuple[int, ...]
    by: str


@event(211)
class TopicOwned(NamedTuple):
    """A user has made a topic, which counts for the user's quota."""

    topic_id: int
    user: str


@event(214)
class ProducerOwned(NamedTuple):
    """A user's session has sent as this producer, which belongs to the user from here
    on.
    """

    producer: bytes
    user: str


@event(212)
class TokenMade(NamedTuple):
    """A user has a token for HTTP. The log has its SHA-256 digest; a token is random
    enough for that.
    """

    user: str
    token: str
    digest: bytes
    expire_at: int
    by: str


@event(213)
class TokenRevoked(NamedTuple):
    """A user's token is valid no more."""

    user: str
    token: str
    by: str


@event(209)
class DenialNoted(NamedTuple):
    """A user was denied something: only with an audit message, and nothing else
    changes.
    """

    user: str
    verb: str
    resource: str
