"""Limits of the formats (docs/FORMATS.md); in bytes, unless the name says otherwise.

The hello of a broker names the two limits that clients need: `FRAME` and `MESSAGE`.
"""

from __future__ import annotations

from txmq.model.units import DAY

MESSAGE = 4 << 20  # one body; larger data belongs in a store, its address in a message
# A batch as it is sent, and also its bodies uncompressed: a decompression bomb never
# grows larger than a plain batch.
BATCH = 16 << 20
BATCH_ROWS = 1_000_000
PART_ROWS = 4_096  # of a part of a bundle
DELAYED_ROWS = 1_024  # of a batch with times of delivery: the broker takes it apart, row by row
FRAME = BATCH + (64 << 10)  # a batch of full size and any header around it
FRAME_BEFORE_HELLO = 4 << 10  # memory that an unknown peer can use
# of records that are not on disk: sends wait beyond
UNFLUSHED = 64 << 20

NAME = 127  # topic, consumer group, service, member
KEY = 1_024
TAG = 127
HEADER_PAIRS, HEADERS = 64, 32 << 10  # of a user
# of a message: with contexts of traces, and the origin of a copy (`model/origin.py`)
ALL_HEADER_PAIRS, ALL_HEADERS = HEADER_PAIRS + 16, HEADERS + (4 << 10)

# microseconds to the end of the year 9999, where calendars of Python and Spark end
TIME = 253_402_300_799_999_999
# deliver_at and expire_at below this are durations, not times
DURATION = 3_650 * DAY
SEQUENCE = (1 << 63) - 1  # sequences and offsets fit in a signed 64-bit column

JSON_DEPTH = 32  # txmq's own JSON nests 6 deep at most
# Characters of an error or a hint on the wire: both must fit in a frame before the
# hello.
ERROR_TEXT = 400

FLUSH_MS, FLUSH_MESSAGES = 3_600_000, 1_000_000_000  # at most, of a flush policy
