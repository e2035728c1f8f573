"""Units of time in microseconds, the resolution of all times in state, log and wire.

`7 * DAY` is a duration, `now - 5 * SECOND` a time. Divide for coarser numbers: `DAY //
SECOND` is a day in seconds, `duration // MILLISECOND` one in milliseconds. `MIB` is in
bytes.
"""

from __future__ import annotations

from typing import Final

MILLISECOND: Final = 1_000
SECOND: Final = 1_000_000
MINUTE: Final = 60 * SECOND
HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR

MIB: Final = 1 << 20
