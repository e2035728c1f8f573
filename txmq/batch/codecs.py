"""Compression of the body column. The libraries are loaded by those who use them."""

# ruff: noqa: PLC0415 # whoever does without compression need not load it

from __future__ import annotations

from txmq.batch.header import Codec
from txmq.errors import RemoteProtocolError


def compress(codec: int, data: bytes) -> bytes:
    """`data`, compressed; NONE gives it back."""
    if codec == Codec.ZSTD:
        import zstandard

        return zstandard.ZstdCompressor().compress(data)
    if codec == Codec.LZ4:
        import lz4.frame

        return bytes(lz4.frame.compress(data))
    return data


def decompress(codec: int, data: bytes, size: int) -> bytes:
    """The `size` bytes that were compressed to `data`; never more. RemoteProtocolError where it holds anything else."""
    if codec == Codec.ZSTD:
        plain = _from_zstd(data, size)
    elif codec == Codec.LZ4:
        plain = _from_lz4(data, size)
    else:
        plain = data
    if len(plain) != size:
        raise RemoteProtocolError(f"bodies of {len(plain)} bytes in a batch that says {size}")
    return plain


def _from_zstd(data: bytes, size: int) -> bytes:
    import zstandard

    try:
        # The library believes a size in the frame before any limit it is given, so that one is compared first.
        if zstandard.get_frame_parameters(data).content_size != size:
            raise RemoteProtocolError("the compressed bodies of a batch are of another size than it says")
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RemoteProtocolError(f"the compressed bodies of a batch are damaged: {error}") from error


def _from_lz4(data: bytes, size: int) -> bytes:
    import lz4.frame

    decompressor = lz4.frame.LZ4FrameDecompressor()
    try:
        plain = bytes(decompressor.decompress(data, max_length=size + 1))
    except RuntimeError as error:
        raise RemoteProtocolError(f"the compressed bodies of a batch are damaged: {error}") from error
    if not decompressor.eof or decompressor.unused_data:
        raise RemoteProtocolError(f"the compressed bodies of a batch do not end after {size} bytes")
    return plain
