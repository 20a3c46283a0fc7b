"""The official formats, read from bytes: IDX (MNIST) and CIFAR binary. Nothing here runs code from a file."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from sounding.errors import DataError

UNSIGNED_BYTE = 0x08  # IDX’s code of that type of numbers
CIFAR_SHAPE = (3, 32, 32)


def read_idx(content: bytes | bytearray, shape: tuple[int, ...], *, name: str) -> Tensor:
    """A gzipped IDX file of unsigned bytes with the expected shape.

    The header is two zero bytes, the type (8: unsigned byte), the number of axes, and every length as a big-endian
    32-bit integer; the values follow. Not one byte more than expected is unpacked.
    """
    header = bytes([0, 0, UNSIGNED_BYTE, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    expected = len(header) + math.prod(shape)
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        values = bytearray(unpacker.decompress(content, expected + 1))
    except zlib.error as error:
        raise DataError(f"{name} is no gzip file ({error})") from error
    if values[: len(header)] != header:
        raise DataError(f"expected {name} to begin as an IDX file of shape {shape}, got {bytes(values[:16]).hex()}")
    if len(values) != expected:
        size = "more" if len(values) > expected else str(len(values))
        raise DataError(f"expected {expected} bytes in {name}, got {size}")
    return torch.frombuffer(values, dtype=torch.uint8, offset=len(header)).reshape(shape)


def read_cifar(content: bytearray, *, label_bytes: int, classes: int, name: str) -> tuple[Tensor, Tensor]:
    """Images (samples, 3, 32, 32) and labels of a CIFAR binary file.

    A record is the label bytes and 3072 bytes: the red, green and blue planes, row by row. Of CIFAR-100's two labels
    the second, finer one is taken.
    """
    record = label_bytes + math.prod(CIFAR_SHAPE)
    if not content or len(content) % record:
        raise DataError(f"expected records of {record} bytes in {name}, got {len(content)} bytes")
    records = torch.frombuffer(content, dtype=torch.uint8).reshape(-1, record)
    labels = records[:, label_bytes - 1].long()
    if int(labels.max()) >= classes:
        raise DataError(f"expected labels below {classes} in {name}, got {int(labels.max())}")
    return records[:, label_bytes:].reshape(-1, *CIFAR_SHAPE), labels
