"""Sends and half messages that wait while the disk is behind.

Everything else goes on: decisions, acks, check-backs, fetches and calls find a short
way to the disk. Each owner, a user or a host, gets one request through in its turn, of
its connections one after the other: many connections are no more than one.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from txmq.errors import RemoteProtocolError, Throttled
from txmq.wire.batched import unpack_requests
from txmq.wire.bundle import token_of_part
from txmq.wire.data_requests import Opcode, unpack_decide

if TYPE_CHECKING:
    from txmq.broker.reactor.interfaces import Clock, DiskPace, Timer
    from txmq.errors import TxmqError
    from txmq.wire.frames import Frame

SENDS = frozenset((Opcode.SEND, Opcode.SENDS))
WRITES = SENDS | {Opcode.GROUP, Opcode.GROUPS}
# a decision stays behind the half message that it is about
FOLLOWERS = frozenset((Opcode.DECIDE, Opcode.DECISIONS))
JUDGED = WRITES | FOLLOWERS
HELD_BYTES, LEAST_SHARE = 32 << 20, 1 << 20  # owners and connections have equal shares
MOST_BYTES = 2 * HELD_BYTES  # in all: an owner who comes later has a share, too
# requests and refusals of one connection, and of all: beyond, it is not read. Clients
# have 256 batches in flight.
HELD_FRAMES, MOST_FRAMES, LEAST_FRAMES = 1_024, 1 << 18, 64
REFUSAL_S = 0.01  # in which all get the same refusal
TURN_S = 0.002  # of a turn of the reactor
NO_TOKENS = frozenset[bytes]()


class Sender(Protocol):
    """A connection that requests come from."""

    @property
    def owner(self) -> str: ...
    def begin(self, frame: Frame) -> None: ...
    def refuse(self, frame: Frame, error: TxmqError) -> None: ...
    def drop_payload(self, frame: Frame) -> Frame: ...


class _Held(NamedTuple):
    frame: Frame
    since: float
    tokens: frozenset[bytes]  # of half messages
    refusal: Throttled | None = None  # in the place of the request, which has no payload then


class HeldSends:
    """The requests of all connections that wait for the disk."""

    def __init__(self, disk: DiskPace, clock: Clock) -> None:
        self._disk, self._clock = disk, clock
        self._held: dict[Sender, deque[_Held]] = {}
        # by owner, the next one first
        self._turns: dict[str, dict[Sender, None]] = {}
        self._own_bytes: Counter[Sender | str] = Counter()  # by connection, and by owner
        # of half messages, by connection: decisions are looked up among them
        self._tokens: dict[Sender, Counter[bytes]] = {}
        self._turn: Timer | None = None
        self._told: Throttled | None = None  # the newest refusal
        self._told_at = 0.0
        self.bytes = 0
        self.since: float | None = None  # by the clock: some have been waiting
        self.requests, self.seconds = 0, 0.0  # that waited, since the start
        self.refused = 0  # since the start

    def takes(self, session: Sender, frame: Frame, *, full: bool = False) -> bool:
        """Return whether a request of `JUDGED` is not to begin now: it waits, or it was
        refused. `full`: the broker has no memory for more requests under way.
        """
        own, size = self._held.get(session) if self._held else None, len(frame.payload)
        if frame.opcode in FOLLOWERS:
            if own is None or not _is_about(frame, self._tokens.get(session)):
                return False
        elif not (full or self._held) and self._disk.has_room(size):
            return False
        beyond, tokens = self._is_beyond(session, size), _tokens_in(frame)
        now = self._clock.seconds()
        if self.since is None:
            self.since = now
        if own is None:
            own = self._held[session] = deque()
            self._turns.setdefault(session.owner, {})[session] = None
        if tokens:
            self._tokens.setdefault(session, Counter()).update(tokens)
        if beyond:
            # in the order of the requests before: producers count on that
            own.append(_Held(session.drop_payload(frame), now, tokens, self._refusal(now)))
            self._disk.hurry()
            return True
        own.append(_Held(frame, now, tokens))
        self.bytes += size
        self._own_bytes[session] += size
        self._own_bytes[session.owner] += size
        self.requests += 1
        self._disk.hurry()
        return True

    def _is_beyond(self, session: Sender, size: int) -> bool:
        """Return whether there is no room for so many bytes of a connection.

        One that is alone may have all that its owner may; one that comes later has half
        as much beside it.
        """
        owner, bytes_of = session.owner, self._own_bytes
        mine = self._turns.get(owner, {})
        share = max(LEAST_SHARE, HELD_BYTES // (len(self._turns) + (owner not in self._turns)))
        beside = 0 if session in mine and len(mine) == 1 else share >> 1
        return (
            self.bytes + size > MOST_BYTES
            or bytes_of[owner] + size > share + beside
            or (session in mine and bytes_of[session] + size > max(LEAST_SHARE, share // len(mine)))
        )

    def is_crowded_by(self, session: Sender) -> bool:
        """Return whether a connection has so much waiting that no more is read."""
        own = self._held.get(session)
        return own is not None and len(own) >= min(
            HELD_FRAMES, max(LEAST_FRAMES, MOST_FRAMES // len(self._held))
        )

    def _refusal(self, now: float) -> Throttled:
        self.refused += 1
        if self._told is None or now >= self._told_at + REFUSAL_S:
            self._told_at = now
            self._told = Throttled.after(
                self._disk.seconds_for(self.bytes),
                f"the disk is behind: {self.bytes} bytes wait for it",
                hint="send less, or give the broker a faster disk",
            )
        return self._told

    def resume(self) -> None:
        """Begin requests as far as the disk has caught up."""
        self._turn = None
        until = self._clock.seconds() + TURN_S
        while self._held:
            session, size = self._next
            if not self._disk.has_room(size):
                break
            own = self._held[session]
            frame, since, tokens, refusal = own.popleft()
            self._forget_bytes(session, size)
            if tokens:
                self._forget_tokens(session, tokens)
            self._end_turn(session, goes_on=bool(own))
            now = self._clock.seconds()
            if refusal is None:
                self.seconds += now - since
                session.begin(frame)
            else:
                refuse = partial(session.refuse, frame)
                self._disk.answer_when_durable(refuse, refusal)
            if now >= until:
                break
        if not self._held:
            self.since = None
        elif self._turn is None and self._disk.has_room(self._next[1]):
            self._turn = self._clock.callLater(0, self.resume)
        else:
            self._disk.hurry()

    @property
    def _next(self) -> tuple[Sender, int]:
        """The connection whose turn it is, and the size of its request."""
        session = next(iter(next(iter(self._turns.values()))))
        return session, len(self._held[session][0].frame.payload)

    def _end_turn(self, session: Sender, *, goes_on: bool) -> None:
        """Put a connection behind the others of its owner, and the owner behind others;
        take it out unless it `goes_on`.
        """
        others = self._turns.pop(session.owner)
        del others[session]
        if goes_on:
            others[session] = None
        else:
            del self._held[session], self._own_bytes[session]
            self._tokens.pop(session, None)
        if others:
            self._turns[session.owner] = others
        else:
            del self._own_bytes[session.owner]

    def forget(self, session: Sender) -> None:
        """Forget the requests of a connection that is lost, or is to do nothing
        more.
        """
        if session in self._held:
            self._forget_bytes(session, self._own_bytes[session])
            self._end_turn(session, goes_on=False)
            if not self._held:
                self.since = None

    def _forget_bytes(self, session: Sender, size: int) -> None:
        self.bytes -= size
        self._own_bytes[session] -= size
        self._own_bytes[session.owner] -= size

    def _forget_tokens(self, session: Sender, tokens: frozenset[bytes]) -> None:
        counts = self._tokens[session]
        for token in tokens:
            counts[token] -= 1
            if not counts[token]:
                del counts[token]
        if not counts:
            del self._tokens[session]

    def view(self) -> dict[str, object]:
        """Return what waits and why, for operators."""
        return {
            "disk_behind": bool(self._held) or self._disk.is_behind,
            "waiting": self.waiting,
            "waiting_bytes": self.bytes,
            "waiting_s": round(self.waiting_s, 3),
            "waited": self.requests,
            "waited_s": round(self.seconds, 3),
            "refused": self.refused,
        }

    @property
    def waiting(self) -> int:
        """The number of requests that wait now."""
        return sum(map(len, self._held.values()))

    @property
    def waiting_s(self) -> float:
        """The seconds for which some request has been waiting, without a pause."""
        return 0.0 if self.since is None else self._clock.seconds() - self.since


def _is_about(frame: Frame, held: Counter[bytes] | None) -> bool:
    """Return whether decisions are about a half message that waits."""
    if not held:
        return False
    try:
        alone = frame.opcode == Opcode.DECIDE
        requests = [frame.payload] if alone else unpack_requests(frame.payload)
        return any(unpack_decide(payload).token in held for payload in requests)
    except RemoteProtocolError:
        return False  # whoever carries it out refuses it


def _tokens_in(frame: Frame) -> frozenset[bytes]:
    """Return the tokens of half messages; none of other or broken requests."""
    try:
        match frame.opcode:
            case Opcode.GROUP:
                return frozenset((token_of_part(frame.payload),))
            case Opcode.GROUPS:
                return frozenset(map(token_of_part, unpack_requests(frame.payload)))
    except RemoteProtocolError:
        pass  # whoever carries it out refuses it
    return NO_TOKENS
