"""Two databases, two brokers, transactions that stop half-way, and their audit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import UUID

from psycopg2.extensions import parse_dsn

from tests.client.real import RealBroker
from tests.tx.postgres.prepared_branches import PREPARED_GIDS, gid_of, leave_prepared
from tests.tx.postgres.support import identity_of, rows
from txmq.batch import encode_one
from txmq.client.blocking.client import Client
from txmq.client.blocking.connect import connect
from txmq.client.blocking.transaction.bundle_upload import BundleUpload
from txmq.client.blocking.transaction.decisions import decide
from txmq.client.protocol.transaction.parts import split_into_parts
from txmq.client.protocol.transaction.tokens import new_token
from txmq.config.broker import XaDatabaseSettings, XaSettings
from txmq.errors import RequestRejected
from txmq.model.decider import BrokerBranch, ByHome, Decider, Participant, PostgresBranch
from txmq.model.message import Decision, Message
from txmq.recover.recoverer import XaRecoverer
from txmq.testing.wait import PATIENCE_S
from txmq.tx.xid import XaBranch
from txmq.wire.bundle import BundleDescription, PartBatch

SAFETY_S = 10.0
BY_HAND = {"operator": "ada", "reason": "the test is over"}
_topics = count(1)


class SilentDisagreement(AssertionError):
    """Databases and brokers disagree, and nothing has reported it."""


class SettableClock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class RecoveryWorld:
    """The databases by name, and the brokers; the first one is the home."""

    brokers: Sequence[RealBroker]
    clients: Sequence[Client]
    dsns: dict[str, str]
    clock: SettableClock = field(default_factory=SettableClock)
    topic: str = field(default_factory=lambda: f"xa-{next(_topics)}")
    tokens: list[UUID] = field(default_factory=list)
    _identities: dict[str, tuple[int, int]] = field(default_factory=dict)
    # transactions of other tests are none of this one's business
    since: UUID = field(default_factory=new_token)
    _closing: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, dsn in self.dsns.items():
            rows(dsn, "CREATE TABLE effects (token text PRIMARY KEY)")
            identity = identity_of(dsn)
            self._identities[name] = (identity.system_id, identity.database_oid)

    def recoverer(
        self,
        *names: str,
        dsns: dict[str, str] | None = None,
        away: str = "",
        **settings: Any,
    ) -> XaRecoverer:
        """Return a recoverer of these databases, by default all, and of all brokers.

        It hardly waits for the broker that is `away`.
        """
        known = dsns or {name: self.dsns[name] for name in names or self.dsns}
        databases = tuple(XaDatabaseSettings(name=name, dsn=dsn) for name, dsn in known.items())
        xa = XaSettings(database=databases, **{"safety_s": SAFETY_S, **settings})
        urls = [broker.url for broker in self.brokers]

        def connected(url: str) -> Client:
            return connect(url, timeout=0.1 if url == away else PATIENCE_S)

        made = XaRecoverer(xa, urls, clock=self.clock, connect=connected, since=self.since)
        self._closing.append(made.close)
        return made

    def begin(self, *, stored: int = 2, prepared: Sequence[str] = ("a", "b")) -> UUID:
        """Begin a transaction without a coordinator: some bundles and branches only."""
        token = new_token()
        self.tokens.append(token)
        for client in self.clients[:stored]:
            self.store(client, token)
        for name in prepared:
            self.prepare(name, token)
        return token

    def store(self, client: Client, token: UUID, decider: Decider | None = None) -> None:
        """Store a bundle whose message is the token; decided at home, or by
        `decider`.
        """
        home = self.clients[0].log_id
        client.call("topic.describe", names=[self.topic], create=True)
        batch = encode_one(
            Message(token.hex.encode()), producer_id=token.bytes, epoch=0, sequence=0, born_at=1
        )
        participants = self._participants(token) if client is self.clients[0] else ()
        described = BundleDescription(
            decider or ByHome(home.bytes, token.bytes), "orders", participants=participants
        )
        parts = split_into_parts(token, described, [PartBatch(self.topic, 0, 0, batch)])
        storing = BundleUpload(client._core, parts, time.monotonic() + PATIENCE_S)
        storing.send()
        storing.await_receipt()

    def _participants(self, token: UUID) -> tuple[Participant, ...]:
        databases = [
            PostgresBranch(
                *self._identities[name],
                database=parse_dsn(dsn)["dbname"],
                owner=parse_dsn(dsn)["user"],
                gid=gid,
                xid=None,
                timeline=1,
                position=1,
            )
            for name, dsn in self.dsns.items()
            for gid in (self.gid(token, name),)
        ]
        return (*databases, *(BrokerBranch(client.log_id.bytes) for client in self.clients))

    def prepare(self, name: str, token: UUID, dsn: str | None = None) -> str:
        """Prepare a branch in a database; return the gid."""
        gid = self.gid(token, name)
        leave_prepared(dsn or self.dsns[name], gid, f"INSERT INTO effects VALUES ('{token.hex}')")
        return gid

    def gid(self, token: UUID, name: str) -> str:
        return gid_of(self.clients[0].log_id, token, [*self.dsns].index(name) + 1)

    def decide(self, token: UUID, outcome: Decision) -> None:
        """Let the home broker decide, as a coordinator does."""
        decide(self.clients[0]._core, token, outcome)

    def state(self, token: UUID, broker: int = 0) -> str:
        return str(self.clients[broker].call("tx.show", token=token.hex)["state"])

    def effects(self, name: str) -> set[str]:
        """Return the tokens of visible rows."""
        return {str(token) for (token,) in rows(self.dsns[name], "SELECT token FROM effects")}

    def messages(self, broker: int) -> set[str]:
        """Return the tokens of visible messages."""
        topics = {topic["name"] for topic in self.clients[broker].call("topic.list")["topics"]}
        found = self.brokers[broker].read(self.topic) if self.topic in topics else []
        return {one.body.decode() for one in found}

    def standing(self, name: str) -> list[str]:
        return [str(gid) for (gid,) in rows(self.dsns[name], PREPARED_GIDS)]

    def journal(self, token: UUID) -> list[dict[str, Any]]:
        """Return the heuristic outcomes of a transaction at its home."""
        listed = self.clients[0].call("xa.list", heuristic=True, limit=1000)["transactions"]
        return [entry for row in listed if row["token"] == token.hex for entry in row["heuristics"]]

    def audit(self, *, stored: int = 2) -> None:
        """Require that all branches agree with the home broker or its journal.

        Raises Broken. No branch of txmq may be left prepared.
        """
        seen = {name: self.effects(name) for name in self.dsns}
        sent = [self.messages(broker) for broker in range(stored)]
        for token in self.tokens:
            committed = self.state(token) == "PUBLISHED"
            told = {entry["branch"] for entry in self.journal(token)}
            for name, tokens in seen.items():
                if (token.hex in tokens) != committed and self.gid(token, name) not in told:
                    raise SilentDisagreement(
                        f"{token.hex}: committed {committed}, and database {name} differs"
                    )
            if any((token.hex in tokens) != committed for tokens in sent):
                raise SilentDisagreement(f"{token.hex}: committed {committed}, and messages differ")
        if left := [
            gid
            for name in self.dsns
            for gid in self.standing(name)
            if XaBranch.parse(gid) is not None
        ]:
            raise SilentDisagreement(f"left prepared: {left}")

    def close(self) -> None:
        """Clean up what a failed test has left."""
        for close in self._closing:
            close()
        for client in self.clients:
            for row in client.call("xa.list", limit=1_000)["transactions"]:
                with suppress(RequestRejected):
                    client.call("tx.decide", **BY_HAND, token=row["token"], outcome="ROLLBACK")
                client.call("xa.forget", **BY_HAND, token=row["token"])
