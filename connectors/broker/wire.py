"""Kafka's primitive types: bytes of a request in, Python values out, and back.

`Reader` and `Writer` know both encodings of strings, arrays and bytes (classic and KIP-482 "flexible"), so a handler
is written once for all versions of its request. Written here on `struct` because the packages that hold generated
protocol classes (kio, kafka-python, aiokafka) build one object per field and cost 10 to 50 times more per request.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import TypeVar

from headrace.connectors.broker.storage import FileSlice

T = TypeVar("T")
Body = list[bytes | bytearray | FileSlice]
"""A response: pieces in order, where a `FileSlice` is sent from its file without passing through Python."""

_INT8 = struct.Struct(">b")
_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_INT64 = struct.Struct(">q")


class MalformedRequest(ValueError):
    """The bytes of a request do not follow the protocol; the connection is closed."""


class Reader:
    """Walks over one request; every method returns the next value and moves on.

    Raises `struct.error`, `IndexError`, `UnicodeDecodeError` or `MalformedRequest` on truncated or wrong input.
    """

    __slots__ = ("data", "flexible", "position")

    def __init__(self, data: memoryview, flexible: bool = False, position: int = 0) -> None:
        self.data = data
        self.flexible = flexible
        self.position = position

    def int8(self) -> int:
        """Signed 8-bit integer."""
        value: int = _INT8.unpack_from(self.data, self.position)[0]
        self.position += 1
        return value

    def boolean(self) -> bool:
        """One byte, false when 0."""
        return self.int8() != 0

    def int16(self) -> int:
        """Signed 16-bit integer."""
        value: int = _INT16.unpack_from(self.data, self.position)[0]
        self.position += 2
        return value

    def int32(self) -> int:
        """Signed 32-bit integer."""
        value: int = _INT32.unpack_from(self.data, self.position)[0]
        self.position += 4
        return value

    def int64(self) -> int:
        """Signed 64-bit integer."""
        value: int = _INT64.unpack_from(self.data, self.position)[0]
        self.position += 8
        return value

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        """All fields of a fixed layout at once."""
        values = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return values

    def varint(self) -> int:
        """Unsigned base-128 integer."""
        value = shift = 0
        while True:
            byte = self.data[self.position]
            self.position += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    def _take(self, size: int) -> memoryview:
        end = self.position + size
        if end > len(self.data):
            raise MalformedRequest(f"a field of {size} bytes passes the end of the request")
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def nullable_string(self) -> str | None:
        """Text or null."""
        size = self.varint() - 1 if self.flexible else self.int16()
        return None if size < 0 else str(self._take(size), "utf-8")

    def string(self) -> str:
        """Text; null reads as the empty string."""
        return self.nullable_string() or ""

    def nullable_bytes(self) -> memoryview | None:
        """A view of bytes inside the request, or null."""
        size = self.varint() - 1 if self.flexible else self.int32()
        return None if size < 0 else self._take(size)

    def length(self) -> int:
        """Number of elements of the array that follows, -1 for a null array."""
        size = self.varint() - 1 if self.flexible else self.int32()
        if size > len(self.data):
            raise MalformedRequest(f"an array of {size} elements in a request of {len(self.data)} bytes")
        return size

    def nullable_array(self, read: Callable[[], T]) -> list[T] | None:
        """An array whose elements `read` reads, or null."""
        size = self.length()
        return None if size < 0 else [read() for _ in range(size)]

    def array(self, read: Callable[[], T]) -> list[T]:
        """An array whose elements `read` reads; null reads as empty."""
        return [read() for _ in range(self.length())]

    def tags(self) -> None:
        """Skip the tagged fields at the end of a flexible structure; nothing in other versions."""
        if not self.flexible:
            return
        for _ in range(self.varint()):
            self.varint()
            self._take(self.varint())


class Writer:
    """Builds the bytes of one response; `flexible` selects the encoding as in `Reader`."""

    __slots__ = ("buffer", "flexible")

    def __init__(self, flexible: bool = False) -> None:
        self.buffer = bytearray()
        self.flexible = flexible

    def int8(self, value: int) -> None:
        """Signed 8-bit integer; also booleans."""
        self.buffer += _INT8.pack(value)

    def int16(self, value: int) -> None:
        """Signed 16-bit integer; also error codes."""
        self.buffer += _INT16.pack(value)

    def int32(self, value: int) -> None:
        """Signed 32-bit integer."""
        self.buffer += _INT32.pack(value)

    def int64(self, value: int) -> None:
        """Signed 64-bit integer."""
        self.buffer += _INT64.pack(value)

    def varint(self, value: int) -> None:
        """Unsigned base-128 integer."""
        while value > 127:
            self.buffer.append(value & 127 | 128)
            value >>= 7
        self.buffer.append(value)

    def string(self, value: str | None) -> None:
        """Text or null."""
        if value is None:
            if self.flexible:
                self.varint(0)
            else:
                self.int16(-1)
            return
        text = value.encode()
        if self.flexible:
            self.varint(len(text) + 1)
        else:
            self.int16(len(text))
        self.buffer += text

    def blob(self, value: bytes | None) -> None:
        """Bytes or null."""
        if self.flexible:
            self.varint(0 if value is None else len(value) + 1)
        else:
            self.int32(-1 if value is None else len(value))
        if value is not None:
            self.buffer += value

    def length(self, size: int) -> None:
        """Number of elements of the array that follows."""
        if self.flexible:
            self.varint(size + 1)
        else:
            self.int32(size)

    def array(self, values: Iterable[T], write: Callable[[T], None]) -> None:
        """An array whose elements `write` writes."""
        items = list(values)
        self.length(len(items))
        for item in items:
            write(item)

    def tags(self) -> None:
        """The empty list of tagged fields of a flexible structure; nothing in other versions."""
        if self.flexible:
            self.buffer.append(0)

    def body(self) -> Body:
        """What was written, as a response."""
        return [self.buffer]
