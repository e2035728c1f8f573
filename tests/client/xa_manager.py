"""Branches of another transaction manager at the broker, ended and prepared."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.client.real import RealBroker
from tests.client.scripted_member import fresh
from txmq.client.blocking.client import Client
from txmq.client.blocking.transaction.xa_resource import XaResource
from txmq.client.protocol.transaction.tokens import new_token
from txmq.tx.xid import Xid

Connect = Callable[..., Client]


def new_xid() -> Xid:
    return Xid(7, new_token().bytes, b"branch")


@pytest.fixture
def client(real: RealBroker, connect: Connect) -> Client:
    return connect(real.url)


@pytest.fixture
def topic() -> str:
    return fresh("t")


@pytest.fixture
def resource(client: Client) -> Iterator[XaResource]:
    """A resource; rolls back what a test leaves prepared."""
    resource = client.xa_resource(owner=fresh("owner"))
    yield resource
    for xid in resource.recover():
        resource.rollback(xid)


def ended(resource: XaResource, topic: str, *bodies: bytes, key: str | None = None) -> Xid:
    """Return a branch with these messages."""
    xid = new_xid()
    resource.start(xid)
    for body in bodies:
        resource.send(topic, body, key=key)
    resource.end(xid)
    return xid


def prepared(resource: XaResource, topic: str, *bodies: bytes) -> Xid:
    xid = ended(resource, topic, *bodies)
    assert resource.prepare(xid) == "ok"
    return xid
