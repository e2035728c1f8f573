"""Two databases and two brokers, transactions over them that stop half-way, and the
audit of what became of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any
from uuid import UUID

from psycopg2.extensions import parse_dsn

from tests.client.real import RealBroker
from tests.postgres.orphans import STANDS, gid_of, leave
from tests.postgres.support import identity_of, rows
from txmq.batch import encode_one
from txmq.client.blocking.client import Client, connect
from txmq.client.blocking.transaction.bundles import Storing, parts_of
from txmq.client.blocking.transaction.decisions import decide
from txmq.client.protocol.transaction.tokens import new_token
from txmq.config.broker import Xa, XaDatabase
from txmq.errors import RequestRejected
from txmq.model.message import Decision, Message
from txmq.recover.recoverer import XaRecoverer
from txmq.tx.xid import Branch
from txmq.wire.group import Description, PartBatch

SAFETY_S = 10.0
BY_HAND = {"operator": "ada", "reason": "the test is over"}
_topics = count(1)


class Broken(AssertionError):
    """The audit found databases and brokers at odds, and nobody was told."""


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class World:
    """The first of `brokers` is the home of all transactions. `dsns` by the names of
    the databases.
    """

    brokers: Sequence[RealBroker]
    clients: Sequence[Client]
    dsns: dict[str, str]
    clock: Clock = field(default_factory=Clock)
    topic: str = field(default_factory=lambda: f"xa-{next(_topics)}")
    tokens: list[UUID] = field(default_factory=list)
    _identities: dict[str, tuple[int, int]] = field(default_factory=dict)
    since: UUID = field(
        default_factory=new_token
    )  # transactions of other tests are none of this one's business
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
        patience_s: float = 10.0,
        **settings: Any,
    ) -> XaRecoverer:
        """One for these databases, or all of them, and all brokers; its clock is
        `clock`.
        """
        known = dsns or {name: self.dsns[name] for name in names or self.dsns}
        databases = tuple(XaDatabase(name=name, dsn=dsn) for name, dsn in known.items())
        xa = Xa(database=databases, **{"safety_s": SAFETY_S, **settings})
        urls = [broker.url for broker in self.brokers]
        patient = partial(connect, timeout=patience_s)
        made = XaRecoverer(xa, urls, clock=self.clock, connect=patient, since=self.since)
        self._closing.append(made.close)
        return made

    def begin(self, *, stored: int = 2, prepared: Sequence[str] = ("a", "b")) -> UUID:
        """A transaction whose coordinator is gone: stored at that many brokers,
        prepared in these databases.
        """
        token = new_token()
        self.tokens.append(token)
        for client in self.clients[:stored]:
            self.store(client, token)
        for name in prepared:
            self.prepare(name, token)
        return token

    def store(self, client: Client, token: UUID, decider: tuple[object, ...] = ()) -> None:
        """Its group at a broker, with the effect's token as the message; decided at
        home, or by `decider`.
        """
        home = self.clients[0].log_id
        client.call("topic.describe", names=[self.topic], create=True)
        batch = encode_one(
            Message(token.hex.encode()), producer_id=token.bytes, epoch=0, sequence=0, born_at=1
        )
        participants = self._participants(token) if client is self.clients[0] else ()
        described = Description(
            decider or ("home", home.bytes, token.bytes), "orders", participants=participants
        )
        parts = parts_of(token, described, [PartBatch(self.topic, 0, 0, batch)])
        storing = Storing(client.core, parts, time.monotonic() + 10)
        storing.send()
        storing.receipt()

    def _participants(self, token: UUID) -> tuple[tuple[object, ...], ...]:
        databases = [
            (
                "postgres",
                *self._identities[name],
                parse_dsn(dsn)["dbname"],
                parse_dsn(dsn)["user"],
                gid,
                None,
            )
            for name, dsn in self.dsns.items()
            for gid in (self.gid(token, name),)
        ]
        return (*databases, *(("broker", client.log_id.bytes) for client in self.clients))

    def prepare(self, name: str, token: UUID, dsn: str | None = None) -> str:
        """Its branch in a database; gives the gid."""
        gid = self.gid(token, name)
        leave(dsn or self.dsns[name], gid, f"INSERT INTO effects VALUES ('{token.hex}')")
        return gid

    def gid(self, token: UUID, name: str) -> str:
        return gid_of(self.clients[0].log_id, token, [*self.dsns].index(name) + 1)

    def decide(self, token: UUID, outcome: Decision) -> None:
        """The home broker decides, as its coordinator asks."""
        decide(self.clients[0].core, token, outcome)

    def state(self, token: UUID, broker: int = 0) -> str:
        return str(self.clients[broker].call("tx.show", token=token.hex)["state"])

    def effects(self, name: str) -> set[str]:
        """The tokens whose rows can be seen."""
        return {str(token) for (token,) in rows(self.dsns[name], "SELECT token FROM effects")}

    def messages(self, broker: int) -> set[str]:
        """The tokens whose messages can be seen."""
        topics = {topic["name"] for topic in self.clients[broker].call("topic.list")["topics"]}
        found = self.brokers[broker].read(self.topic) if self.topic in topics else []
        return {one.body.decode() for one in found}

    def standing(self, name: str) -> list[str]:
        return [str(gid) for (gid,) in rows(self.dsns[name], STANDS)]

    def journal(self, token: UUID) -> list[dict[str, Any]]:
        """The heuristics of a transaction at its home."""
        listed = self.clients[0].call("xa.list", heuristic=True, limit=1000)["transactions"]
        return [entry for row in listed if row["token"] == token.hex for entry in row["heuristics"]]

    def audit(self, *, stored: int = 2) -> None:
        """All branches of each transaction agree with its home, or the home's journal
        says which does not.

        Raises Broken. Nothing of ours may stand any more.
        """
        seen = {name: self.effects(name) for name in self.dsns}
        sent = [self.messages(broker) for broker in range(stored)]
        for token in self.tokens:
            committed = self.state(token) == "PUBLISHED"
            told = {entry["branch"] for entry in self.journal(token)}
            for name, tokens in seen.items():
                if (token.hex in tokens) != committed and self.gid(token, name) not in told:
                    raise Broken(f"{token.hex}: committed {committed}, and database {name} differs")
            if any((token.hex in tokens) != committed for tokens in sent):
                raise Broken(f"{token.hex}: committed {committed}, and messages differ")
        if left := [
            gid
            for name in self.dsns
            for gid in self.standing(name)
            if Branch.parse(gid) is not None
        ]:
            raise Broken(f"left prepared: {left}")

    def close(self) -> None:
        """What a failed test has left undecided, or to be dealt with, is not the next
        one's.
        """
        for close in self._closing:
            close()
        for client in self.clients:
            for row in client.call("xa.list", limit=1_000)["transactions"]:
                with suppress(RequestRejected):
                    client.call("tx.decide", **BY_HAND, token=row["token"], outcome="ROLLBACK")
                client.call("xa.forget", **BY_HAND, token=row["token"])
