"""CRC-32C (Castagnoli), the checksum of Kafka record batches, without a compiled extension.

Short inputs go through a table byte by byte, long ones through numpy (`crc32c_lanes`, loaded when first needed). The
broker only needs it for control batches, for batches rewritten by compaction and for the last batch after an unclean
stop: batches of clients are stored as they came.
"""

from __future__ import annotations

_POLYNOMIAL = 0x82F63B78
_VECTOR_FROM = 4096


def _build_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ _POLYNOMIAL if crc & 1 else crc >> 1
        table.append(crc)
    return tuple(table)


TABLE = _build_table()
"""Remainder of each byte."""


def _bytewise(data: bytes | bytearray | memoryview, crc: int) -> int:
    table = TABLE
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """CRC-32C of `data` as Kafka stores it (initial value and final xor all ones)."""
    crc, done = 0xFFFFFFFF, 0
    if len(data) >= _VECTOR_FROM:
        from headrace.connectors.broker.crc32c_lanes import remainder

        crc, done = remainder(data)
    return _bytewise(memoryview(data)[done:], crc) ^ 0xFFFFFFFF
