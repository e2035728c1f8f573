"""Changes of bytes that leave them nearly right."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

EDGES = (0, 1, *(2**bits - less for bits in (7, 8, 15, 16, 31, 32, 63, 64) for less in (0, 1)))
REPLACED = (b"\x00", b"\xff", b"'", b'"', b"{", b"]", b"\n", b"\x1b[2J", b"..", b"NaN", b"1e999")


def changed(random: Random, some: Sequence[bytes]) -> bytes:
    """Return one of these, with up to four changes."""
    data = bytearray(random.choice(some))
    for _ in range(random.choice((0, 1, 1, 1, 2, 4))):
        change(random, data)
    return bytes(data)


def change(random: Random, data: bytearray) -> None:
    """Flip, overwrite, cut, insert, repeat, or delete something."""
    at = random.randrange(len(data) + 1)
    match random.randrange(6):
        case 0 if data:
            data[at % len(data)] ^= 1 << random.randrange(8)
        case 1:
            size = random.choice((1, 2, 4, 8))
            number = random.choice(EDGES) % (1 << 8 * size)
            data[at : at + size] = number.to_bytes(size, "little")
        case 2:
            del data[at:]
        case 3:
            data[at:at] = random.choice(REPLACED)
        case 4:
            data[at:at] = data[: random.randrange(64)]
        case _:
            del data[at : at + random.randrange(1, 9)]
