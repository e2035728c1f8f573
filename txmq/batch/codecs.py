"""Compression of the body column. A library is imported at its first use."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from txmq.batch.header import Codec
from txmq.errors import ConfigError, RemoteProtocolError

PACKAGES = {  # module, distribution
    Codec.ZSTD: ("zstandard", "zstandard"),
    Codec.LZ4: ("lz4.frame", "lz4"),
}


class Compression(NamedTuple):
    """Codec of a client, and the total body size of a batch above which it applies."""

    codec: Codec = Codec.NONE
    threshold: int = 0

    def codec_for(self, size: int) -> Codec:
        """Return the codec for a batch whose bodies have `size` bytes in total."""
        return self.codec if size > self.threshold else Codec.NONE


NO_COMPRESSION = Compression()


@cache
def codec_library(codec: int) -> Any:  # noqa: ANN401  # one of two modules, which have nothing in common
    """Return the module of a codec. Raises ConfigError where it is not installed."""
    module, package = PACKAGES[Codec(codec)]
    try:
        return import_module(module)
    except ImportError as error:
        hint = (
            f"run `pip install {package}` at every producer, broker and consumer of such messages"
        )
        raise ConfigError(
            "compression", f"the package {package} is not installed", hint=hint
        ) from error


def compress(codec: int, data: bytes) -> bytes:
    """Return `data` compressed; codec NONE returns it as it is."""
    if codec == Codec.ZSTD:
        return bytes(codec_library(codec).ZstdCompressor().compress(data))
    if codec == Codec.LZ4:
        return bytes(codec_library(codec).compress(data))
    return data


def decompress(codec: int, data: bytes, size: int) -> bytes:
    """Return the `size` bytes that `data` was compressed from.

    At most `size` bytes are ever allocated. Raises RemoteProtocolError where the result
    has another size, ConfigError where the library is missing.
    """
    if codec == Codec.ZSTD:
        plain = _from_zstd(data, size)
    elif codec == Codec.LZ4:
        plain = _from_lz4(data, size)
    else:
        plain = data
    if len(plain) != size:
        raise RemoteProtocolError(
            f"the bodies of a batch have {len(plain)} bytes, its header says {size}"
        )
    return plain


def _from_zstd(data: bytes, size: int) -> bytes:
    zstandard = codec_library(Codec.ZSTD)
    try:
        # zstandard trusts the size in the frame more than any limit that it is given:
        # compare that size first.
        if zstandard.get_frame_parameters(data).content_size != size:
            raise RemoteProtocolError(
                "the compressed bodies of a batch have another size than its header says"
            )
        return bytes(zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise RemoteProtocolError(
            f"the compressed bodies of a batch are damaged: {error}"
        ) from error


def _from_lz4(data: bytes, size: int) -> bytes:
    decompressor = codec_library(Codec.LZ4).LZ4FrameDecompressor()
    try:
        plain = bytes(decompressor.decompress(data, max_length=size + 1))
    except RuntimeError as error:
        raise RemoteProtocolError(
            f"the compressed bodies of a batch are damaged: {error}"
        ) from error
    if not decompressor.eof or decompressor.unused_data:
        raise RemoteProtocolError(f"the compressed bodies of a batch do not end after {size} bytes")
    return plain
