"""The checksum of record batches."""

import pytest

from headrace.connectors.broker.crc32c import crc32c


def _reference(data: bytes) -> int:
    """Bit by bit, as the polynomial says."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_check_value_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 5119, 20_480])
def test_short_and_long_inputs_agree_with_the_definition(size: int) -> None:
    data = bytes((i * 31 + i // 7) & 255 for i in range(size))
    assert crc32c(data) == _reference(data)
