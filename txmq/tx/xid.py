"""Names of transaction branches: Xids of X/Open, and their gids in PostgreSQL.

A gid is written as psycopg2 writes it, `{format}_{base64 of gtrid}_{base64 of bqual}`,
so that its `tpc_recover` and other tools can read it. In a gid of txmq the gtrid is
`{node}:{first 12 hex digits of the home log's id}:{token}`, and the bqual is the number
of the branch. `pg_prepared_xacts` lists the whole server, with the gids of other
coordinators. A gid that txmq would not write exactly so belongs to another coordinator,
and only its owner may finish it.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from hashlib import sha256
from typing import Final, NamedTuple, Self
from uuid import UUID

from txmq.errors import LocalProtocolError

FORMAT: Final = 0x74786D71  # "txmq"
LARGEST_FORMAT: Final = (1 << 31) - 1
LONGEST_PART: Final = 64  # bytes of a gtrid and of a bqual: XA's limit and psycopg2's
LONGEST_NODE: Final = 18  # characters: what the log and the token leave of a gtrid
MOST_BRANCHES: Final = 200  # of the participants of a bundle
LOG_DIGITS: Final = 12

_NODE: Final = re.compile(rf"(?!\.)[A-Za-z0-9._-]{{1,{LONGEST_NODE}}}")
_GTRID: Final = re.compile(
    rf"({_NODE.pattern}):([0-9a-f]{{{LOG_DIGITS}}}):([0-9a-f]{{12}}7[0-9a-f]{{3}}[89ab][0-9a-f]{{15}})"
)
_BQUAL: Final = re.compile(r"[1-9][0-9]{0,2}")
_GID: Final = re.compile(r"(0|[1-9][0-9]{0,9})_([A-Za-z0-9+/]*={0,2})_([A-Za-z0-9+/]*={0,2})")


class Xid(NamedTuple):
    """The name of a branch of any coordinator: `gtrid` names the transaction, `bqual`
    its branch.
    """

    format: int
    gtrid: bytes
    bqual: bytes

    @property
    def gid(self) -> str:
        """The gid in PostgreSQL: at most 188 characters, none of which needs
        quoting.
        """
        return f"{self.format}_{b64encode(self.gtrid).decode()}_{b64encode(self.bqual).decode()}"

    @classmethod
    def parse(cls, gid: str) -> Self | None:
        """Return the Xid with exactly this gid; None if there is none."""
        found = _GID.fullmatch(gid)
        if found is None or int(found[1]) > LARGEST_FORMAT:
            return None
        try:
            xid = cls(int(found[1]), b64decode(found[2]), b64decode(found[3]))
        except ValueError:
            return None
        return (
            xid if xid.gid == gid and max(len(xid.gtrid), len(xid.bqual)) <= LONGEST_PART else None
        )


class XaBranch(NamedTuple):
    """The name of a branch of txmq.

    `log` is the beginning of the home log's id, `node` names the service of the process
    that began the transaction, `number` counts its branches from 1.
    """

    node: str
    log: str
    token: UUID
    number: int

    @property
    def xid(self) -> Xid:
        gtrid = f"{self.node}:{self.log}:{self.token.hex}"
        return Xid(FORMAT, gtrid.encode(), str(self.number).encode())

    @property
    def gid(self) -> str:
        return self.xid.gid

    @classmethod
    def parse(cls, gid: str) -> Self | None:
        """Return the branch of a gid; None if it belongs to another coordinator."""
        xid = Xid.parse(gid)
        if xid is None or xid.format != FORMAT:
            return None
        gtrid = _GTRID.fullmatch(xid.gtrid.decode("latin-1"))
        bqual = xid.bqual.decode("latin-1")
        if gtrid is None or _BQUAL.fullmatch(bqual) is None:
            return None
        node, log, token = gtrid.groups()
        return cls(node, log, UUID(token), int(bqual))


def branches(node: str, log_id: UUID, token: UUID, count: int) -> list[XaBranch]:
    """Return the names of the branches of a transaction. Raises LocalProtocolError."""
    if _NODE.fullmatch(node) is None:
        hint = f"1 to {LONGEST_NODE} characters out of A-Z a-z 0-9 . _ -, not beginning with a dot"
        raise LocalProtocolError(f"invalid node name {node[:LONGEST_PART]!r}", hint=hint)
    if count > MOST_BRANCHES:
        raise LocalProtocolError(f"{count} branches are too many", hint=f"at most {MOST_BRANCHES}")
    return [XaBranch(node, log_digits(log_id), token, number) for number in range(1, count + 1)]


def node_of(service: str) -> str:
    """Return the default node name of a service: its name, shortened if too long."""
    if len(service) <= LONGEST_NODE:
        return service
    digest = sha256(service.encode()).hexdigest()[:8]
    return f"{service[: LONGEST_NODE - 9]}.{digest}"


def log_digits(log_id: UUID) -> str:
    """Return the digits of a log's id that stand in a gtrid."""
    return log_id.hex[:LOG_DIGITS]
