"""Compression of the body column. The libraries are loaded by those who use them."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from txmq.batch.header import Codec
from txmq.errors import ConfigError, RemoteProtocolError

PACKAGES = {
    Codec.ZSTD: ("zstandard", "zstandard"),
    Codec.LZ4: ("lz4.frame", "lz4"),
}  # module, distribution


class Compression(NamedTuple):
    """What a client does with the bodies of a batch that have together more than `over`
    bytes.
    """

    codec: Codec = Codec.NONE
    over: int = 0

    def of(self, size: int) -> Codec:
        """The codec of a batch whose bodies have so many bytes."""
        return self.codec if size > self.over else Codec.NONE


PLAIN = Compression()


@cache
def library(codec: int) -> Any:  # one of two modules, which have nothing in common
    """The module behind a codec. Raises ConfigError where it is not installed."""
    module, package = PACKAGES[Codec(codec)]
    try:
        return import_module(module)
    except ImportError as error:
        hint = f"pip install {package}, wherever messages are sent, stored or consumed that are compressed so"
        raise ConfigError(
            "compression", f"the package {package} is not installed", hint=hint
        ) from error


def compress(codec: int, data: bytes) -> bytes:
    """`data`, compressed; NONE gives it back."""
    if codec == Codec.ZSTD:
        return bytes(library(codec).ZstdCompressor().compress(data))
    if codec == Codec.LZ4:
        return bytes(library(codec).compress(data))
    return data


def decompress(codec: int, data: bytes, size: int) -> bytes:
    """The `size` bytes that were compressed to `data`; never more.

    RemoteProtocolError where it holds anything else, ConfigError where the library is
    missing.
    """
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
    zstandard = library(Codec.ZSTD)
    try:
        # The library believes a size in the frame before any limit it is given, so that
        # one is compared first.
        if zstandard.get_frame_parameters(data).content_size != size:
            raise RemoteProtocolError(
                "the compressed bodies of a batch are of another size than it says"
            )
        return bytes(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise RemoteProtocolError(
            f"the compressed bodies of a batch are damaged: {error}"
        ) from error


def _from_lz4(data: bytes, size: int) -> bytes:
    decompressor = library(Codec.LZ4).LZ4FrameDecompressor()
    try:
        plain = bytes(decompressor.decompress(data, max_length=size + 1))
    except RuntimeError as error:
        raise RemoteProtocolError(
            f"the compressed bodies of a batch are damaged: {error}"
        ) from error
    if not decompressor.eof or decompressor.unused_data:
        raise RemoteProtocolError(f"the compressed bodies of a batch do not end after {size} bytes")
    return plain
