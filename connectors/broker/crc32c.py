"""CRC-32C (Castagnoli), the checksum of Kafka record batches, without a compiled extension.

Short inputs go through a table byte by byte. Long ones are cut into 1,024 lanes that numpy steps together; the lanes'
remainders are then joined by multiplying with powers of x (the checksum is linear), about 100 MB/s. The broker only
needs it for control batches, for batches rewritten by compaction and for the last batch after an unclean stop:
batches of clients are stored as they came.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

_POLYNOMIAL = 0x82F63B78
_LANES = 1024
_VECTOR_FROM = 4096
Remainders = npt.NDArray[np.uint32]


def _build_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ _POLYNOMIAL if crc & 1 else crc >> 1
        table.append(crc)
    return tuple(table)


_TABLE = _build_table()


def _bytewise(data: bytes | bytearray | memoryview, crc: int) -> int:
    table = _TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc


@cache
def _array_table() -> Remainders:
    return np.array(_TABLE, dtype=np.uint32)


def _apply(tables: Remainders, crc: Remainders) -> Remainders:
    applied: Remainders = (
        tables[0][crc & 255] ^ tables[1][(crc >> 8) & 255] ^ tables[2][(crc >> 16) & 255] ^ tables[3][crc >> 24]
    )
    return applied


@cache
def _shift_tables(doublings: int) -> Remainders:
    """uint32 [4, 256]: what 2**doublings zero bytes make of each byte of a remainder."""
    if doublings == 0:
        basis = np.arange(256, dtype=np.uint32)[None, :] << (8 * np.arange(4, dtype=np.uint32))[:, None]
        first: Remainders = _array_table()[basis & 255] ^ (basis >> 8)
        return first
    half = _shift_tables(doublings - 1)
    return np.stack([_apply(half, half[i]) for i in range(4)])


def _shift(crc: Remainders, zeros: int) -> Remainders:
    """Remainders after `zeros` further zero bytes."""
    bit = 0
    while zeros >> bit:
        if zeros >> bit & 1:
            crc = _apply(_shift_tables(bit), crc)
        bit += 1
    return crc


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """CRC-32C of `data` as Kafka stores it (initial value and final xor all ones)."""
    if len(data) < _VECTOR_FROM:
        return _bytewise(data, 0xFFFFFFFF) ^ 0xFFFFFFFF
    per_lane = len(data) // _LANES
    body = per_lane * _LANES
    columns = np.ascontiguousarray(np.frombuffer(data, dtype=np.uint8, count=body).reshape(_LANES, per_lane).T)
    table = _array_table()
    crc = np.zeros(_LANES, dtype=np.uint32)
    crc[0] = 0xFFFFFFFF
    for column in columns:
        crc = table[(crc ^ column) & 255] ^ (crc >> 8)
    width = per_lane
    while len(crc) > 1:
        crc = _shift(crc[0::2], width) ^ crc[1::2]
        width *= 2
    return _bytewise(memoryview(data)[body:], int(crc[0])) ^ 0xFFFFFFFF
