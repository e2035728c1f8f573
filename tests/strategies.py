"""Hypothesis strategies for the values of txmq."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from hypothesis import strategies as st

from txmq.batch import Codec, encode
from txmq.model import limits
from txmq.model.bundle import BundleState, DecideReceipt
from txmq.model.decider import (
    COMMITTED_WHEN_STORED,
    BrokerBranch,
    ByBroker,
    ByChecker,
    ByForeign,
    ByHome,
    ByJob,
    ByPostgres,
    PostgresBranch,
)
from txmq.model.message import Decision, Message
from txmq.wire.bundle import BundleDescription, BundlePart, PartBatch
from txmq.wire.chunks import Chunk
from txmq.wire.data_requests import (
    Ack,
    AckedRange,
    Decide,
    Fetch,
    Read,
    ReadLetters,
    Send,
    SendReceipt,
)
from txmq.wire.frames import Frame

NAME_CHARACTERS = "abcXYZ019._-"
U16, U32 = st.integers(0, (1 << 16) - 1), st.integers(0, (1 << 32) - 1)

names = st.text(NAME_CHARACTERS, min_size=1, max_size=limits.NAME).filter(
    lambda name: not name.startswith(".")
)
groups = names | st.tuples(names, names).map("@".join)
texts = st.text(st.characters(exclude_categories=["Cs"]))
keys = texts.filter(lambda text: len(text.encode()) <= limits.KEY) | st.text(
    "abc-0123456789", max_size=20
)
tags = texts.filter(lambda text: len(text.encode()) <= limits.TAG) | st.sampled_from(
    ["created", "paid", "Zürich"]
)
headers: st.SearchStrategy[Mapping[str, str]] = st.dictionaries(texts, texts, max_size=5)
times = st.integers(0, limits.TIME)
# of delivery and expiry: what is earlier is a span
moments = st.integers(limits.DURATION, limits.TIME) | st.just(0)
spans = st.timedeltas(timedelta(0), timedelta(days=3_649))
offsets = st.integers(0, limits.SEQUENCE)
ids = st.binary(min_size=16, max_size=16)
codecs = st.sampled_from(Codec)

messages = st.builds(
    Message,
    body=st.binary(max_size=100),
    key=st.none() | keys,
    tag=st.none() | tags,
    headers=st.none() | headers,
    deliver_at=st.none() | moments,
    expire_at=st.none() | moments,
    delay=st.none(),
    ttl=st.none(),
) | st.tuples(st.binary(max_size=100), spans, spans).map(
    lambda row: Message(row[0], delay=row[1], ttl=row[2])
)
message_lists = st.lists(messages, min_size=1, max_size=12)
batches = st.builds(
    encode,
    message_lists,
    producer_id=ids,
    epoch=U32,
    sequence=st.integers(0, limits.SEQUENCE - 100),
    born_at=times,
    codec=codecs,
)

frames = st.builds(
    Frame, opcode=st.integers(0, 255), status=U16, correlation=U32, payload=st.binary(max_size=200)
)

sends = st.builds(Send, names, U32, U16, st.binary(max_size=50))
send_receipts = st.builds(SendReceipt, st.integers(-1, limits.SEQUENCE), offsets, st.booleans())
printable = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=50)
decides = st.builds(
    Decide, st.sampled_from([Decision.COMMIT, Decision.ROLLBACK]), ids, U32, printable
)
decide_receipts = st.builds(DecideReceipt, st.sampled_from(BundleState), st.booleans())
fetches = st.builds(
    Fetch,
    U32,
    U32,
    U32,
    U32,
    groups,
    names,
    st.just(0) | st.integers(1, (1 << 64) - 1),
    U32,
    st.lists(names, max_size=3).map(tuple),
)
acked = st.builds(
    AckedRange, names, U32, st.integers(0, 1 << 40), st.integers((1 << 40) + 1, limits.SEQUENCE)
)
acked_ranges = st.lists(acked, max_size=5).map(tuple)
acks = st.builds(Ack, U32, groups, names, acked_ranges, acked_ranges)
letter_reads = st.builds(
    lambda partition, ends, size, plan, topic: ReadLetters(
        partition, min(ends), max(ends), size, plan, topic
    ),
    U32,
    st.sets(offsets, min_size=2, max_size=2),
    U32,
    names,
    names,
)
reads = st.builds(Read, U32, offsets, U32, U32, names, st.integers(0, (1 << 64) - 1))

system_ids = st.integers(1, (1 << 64) - 1)
positive = st.integers(1, (1 << 32) - 1)
xids = st.none() | st.integers(3, (1 << 64) - 1)
gtrids = st.binary(max_size=64)
deciders = st.one_of(
    names.map(ByChecker),
    st.tuples(system_ids, positive, positive, xids, system_ids).map(
        lambda fields: ByPostgres(*fields)
    ),
    st.tuples(ids, ids).map(lambda fields: ByHome(*fields)),
    ids.map(ByJob),
    st.tuples(st.integers(0, (1 << 31) - 1), gtrids, gtrids).map(lambda f: ByForeign(*f)),
    st.just(ByBroker()),
)
identifiers = st.text("abcXYZ_-0é", min_size=1, max_size=20)
gids = st.text("0123456789_+/=abcXYZ", min_size=1, max_size=199)
participants = st.lists(
    st.tuples(
        *(system_ids, positive, identifiers, identifiers, gids, xids, positive, system_ids)
    ).map(lambda fields: PostgresBranch(*fields))
    | ids.map(BrokerBranch),
    max_size=3,
).map(tuple)
actions = st.lists(st.tuples(st.just("ack"), names, U32, offsets), max_size=3).map(tuple)
descriptions = st.builds(
    BundleDescription, deciders, names | st.just(""), actions, times, participants
)
part_batches = st.lists(st.builds(PartBatch, names, U32, U16, batches), max_size=3).map(tuple)
digests = st.binary(min_size=32, max_size=32).filter(any)


@st.composite
def parts(draw: st.DrawFn) -> BundlePart:
    """Draw a part of a bundle, first or later, sealed or not."""
    number, sealed = draw(st.integers(0, 3)), draw(st.booleans())
    description = None if number else draw(descriptions)
    at_once = description is not None and isinstance(description.decider, COMMITTED_WHEN_STORED)
    commit = sealed and at_once and draw(st.booleans())
    digest = draw(digests) if sealed else bytes(32)
    return BundlePart(
        draw(ids), number, draw(U32), sealed, commit, digest, description, draw(part_batches)
    )


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    """Draw a chunk that covers some rows of a batch."""
    sent = draw(message_lists)
    batch = encode(sent, producer_id=draw(ids), epoch=1, sequence=0, born_at=draw(times))
    first = draw(st.integers(0, len(sent) - 1))
    rows = draw(st.integers(1, len(sent) - first))
    place = (draw(offsets), draw(times), draw(offsets), draw(U16), draw(st.integers(0, 3)))
    base, stored_at, position, attempt, flags = place
    lease = draw(st.integers(-1, limits.SEQUENCE))
    return Chunk(
        draw(names), draw(U32), base, stored_at, position, attempt, flags, lease, first, rows, batch
    )


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)
