"""Every limit of the formats (docs/FORMATS.md), in one place; bytes, unless the name
says otherwise.

A broker tells its clients the two that matter to them (`FRAME`, `MESSAGE`) in its
hello.
"""

from __future__ import annotations

MESSAGE = 4 << 20  # one body: larger data belongs in a store, its address in a message
BATCH = (
    16 << 20
)  # a batch as it is sent, and its bodies uncompressed: so a bomb never grows past what is allowed plain
BATCH_ROWS = 1_000_000
PART_ROWS = 4_096  # of a part of a group
DELAYED_ROWS = 1_024  # of a batch with times of delivery: the broker takes it apart, row by row
FRAME = BATCH + (64 << 10)  # a batch of full size and any header around it
FRAME_BEFORE_HELLO = 4 << 10  # a stranger gets no more memory than this

NAME = 127  # topic, consumer group, service, member
KEY = 1_024
TAG = 127
HEADER_PAIRS = 64
HEADERS = 32 << 10

# microseconds to the end of the year 9999, where calendars of Python and Spark end
TIME = 253_402_300_799_999_999
SPAN = (
    3_650 * 24 * 3_600 * 1_000_000
)  # of deliver_at and expire_at: what is shorter is a span, not a time
SEQUENCE = (1 << 63) - 1  # sequences and offsets fit in a signed 64-bit column

JSON_DEPTH = 32  # nothing of ours nests deeper than 6
ERROR_TEXT = (
    400  # characters of an error or a hint on the wire: both must fit in a frame before the hello
)
