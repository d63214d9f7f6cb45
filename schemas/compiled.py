"""Readers and writers of the Avro form of a record, made once a class as straight Python code.

In: a dataclass of ``records`` or ``parts``, which is its own schema (``avsc``). Out: functions between bytes and
instances. A library that walks a schema builds a dictionary of every record on the way; this code goes from the bytes
to the slots and back and takes a third of the time, which is most of what a stage spends on a record. The bytes are
those that any Avro writer makes of the packaged schema. Values of other schemas are read by ``codec`` with fastavro.
"""

import types
import typing
from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from functools import cache
from operator import index
from struct import Struct
from typing import Any

import numpy as np

from headrace.schemas.errors import UndecodableRecord

__all__ = ("BYTE_ORDERS", "instance_reader", "instance_writer", "put_long", "read_long")

Reader = Callable[[bytes, int], tuple[Any, int]]
"""(value, position) to (instance, position behind it).

Raises IndexError, ValueError, EOFError, struct.error or UndecodableRecord where the bytes end or make no sense.
"""
Writer = Callable[[Any, bytearray], None]
"""(instance, bytes to append to). Raises TypeError, AttributeError, ValueError, OverflowError or struct.error."""

BYTE_ORDERS: dict[str, np.dtype[Any]] = {"int32": np.dtype("<i4"), "float32": np.dtype("<f4"), "uint8": np.dtype("u1")}
"""How arrays of a dtype travel."""
_DOUBLE = Struct("<d")
_SHORT = [(n >> 1) ^ -(n & 1) for n in range(128)] + [None] * 128
"""The long that a byte stands for; None for one that others follow."""


def read_long(value: bytes, at: int) -> tuple[int, int]:
    """An Avro long and the position behind it."""
    number = shift = 0
    while True:
        byte = value[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at
        shift += 7
        if shift > 63:
            raise UndecodableRecord(f"a number of more than 64 bits at byte {at}")


def put_long(out: bytearray, number: Any) -> None:
    """Append an Avro long. Raises TypeError for what is no integer, OverflowError above 64 bits."""
    number = index(number)
    if not -(1 << 63) <= number < 1 << 63:
        raise OverflowError(f"{number} does not fit into 64 bits")
    rest = (number << 1) ^ (number >> 63)
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    out.append(rest)


@cache
def instance_reader(cls: type, before: str = "") -> Reader:
    """The reader of a class; fields from ``before`` on are neither read nor set."""
    return _Code(cls, before).reader()


@cache
def instance_writer(cls: type, before: str = "") -> Writer:
    """The writer of a class; fields from ``before`` on are not written."""
    return _Code(cls, before).writer()


class _Code:
    """The source text of one class's functions, and the names that it uses."""

    def __init__(self, cls: type, before: str) -> None:
        names = [f.name for f in fields(cls)]
        hints = typing.get_type_hints(cls)
        self._cls = cls
        self._fields = [(f, hints[f.name]) for f in fields(cls)[: names.index(before) if before else len(names)]]
        self._lines: list[str] = []
        self._names: dict[str, Any] = {
            "short": _SHORT, "long": read_long, "double": _DOUBLE.unpack_from, "packed": _DOUBLE.pack,
            "put_long": put_long, "array": _array, "contiguous": np.ascontiguousarray, "new": object.__new__,
            "cut": _cut, "cls": cls,
        }  # fmt: skip

    def reader(self) -> Reader:
        """The function."""
        self._say(0, "def function(value, at):")
        self._say(1, "limit = len(value)", "made = new(cls)")
        for field, hint in self._fields:
            put = f"put_{field.name}"
            self._names[put] = getattr(self._cls, field.name).__set__
            self._read(hint, field, 1, "x")
            self._say(1, f"{put}(made, x)")
        self._say(1, "return made, at")
        return self._made("read")  # type: ignore[no-any-return]

    def writer(self) -> Writer:
        """The function."""
        self._say(0, "def function(made, out):", "    put = out.append")
        for field, hint in self._fields:
            self._say(1, f"x = made.{field.name}")
            self._write(hint, field, 1, "x")
        return self._made("write")  # type: ignore[no-any-return]

    def _say(self, depth: int, *lines: str) -> None:
        self._lines += ("    " * depth + line for line in lines)

    def _made(self, what: str) -> Any:
        code = compile("\n".join(self._lines) + "\n", f"<{what} {self._cls.__name__}>", "exec")
        exec(code, self._names)
        return self._names["function"]

    def _of(self, make: Callable[[type], Any], cls: Any, what: str) -> str:
        """A name for another class's function."""
        name = f"{what}_{cls.__name__}"
        self._names[name] = make(cls)
        return name

    def _read(self, hint: Any, field: "Field[Any]", depth: int, to: str) -> None:
        """Lines that read a value into the variable ``to`` and move ``at``."""
        if "dtype" in field.metadata:
            dtype = field.metadata["dtype"]
            self._read_octets(depth, to, f"array(value[at:end], {dtype!r})", f"array(b'', {dtype!r})")
        elif hint is int:
            self._read_long(depth, to)
        elif hint is float:
            self._say(depth, f"{to} = double(value, at)[0]", "at += 8")
        elif hint is bool:
            self._say(depth, f"{to} = value[at] != 0", "at += 1")
        elif hint is str:
            self._read_octets(depth, to, "str(value[at:end], 'utf-8')", "''")
        elif hint is bytes:
            self._read_octets(depth, to, "value[at:end]", "b''")
        else:
            self._read_nested(hint, field, depth, to)

    def _read_long(self, depth: int, to: str) -> None:
        self._say(depth, f"{to} = short[value[at]]", "at += 1")
        self._say(depth, f"if {to} is None:", f"    {to}, at = long(value, at - 1)")

    def _read_octets(self, depth: int, to: str, found: str, empty: str) -> None:
        self._read_long(depth, "size")
        self._say(depth, "if size:", "    end = at + size", "    if not at < end <= limit:", "        cut(size)")
        self._say(depth + 1, f"{to} = {found}", "at = end")
        self._say(depth, "else:", f"    {to} = {empty}")

    def _read_nested(self, hint: Any, field: "Field[Any]", depth: int, to: str) -> None:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if is_dataclass(hint):
            self._say(depth, f"{to}, at = {self._of(instance_reader, hint, 'read')}(value, at)")
        elif origin is types.UnionType:
            inner = next(a for a in arguments if a is not type(None))
            name = self._of(instance_reader, inner, "read")
            self._read_long(depth, "size")
            self._say(depth, "if size == 0:", f"    {to} = None")
            self._say(depth, "elif size == 1:", f"    {to}, at = {name}(value, at)", "else:", "    cut(size)")
        elif origin in (list, dict):
            many, one = f"{to}s", f"{to}_"
            self._say(depth, f"{many} = {'{}' if origin is dict else '[]'}")
            self._read_long(depth, "count")
            self._say(depth, "while count:")
            self._say(depth + 1, "if count < 0:", "    count, (_, at) = -count, long(value, at)")
            self._say(depth + 1, "for _ in range(count):")
            if origin is dict:
                self._read(str, _PLAIN, depth + 2, "key")
            self._read(arguments[-1], _PLAIN, depth + 2, one)
            self._say(depth + 2, f"{many}[key] = {one}" if origin is dict else f"{many}.append({one})")
            self._read_long(depth + 1, "count")
            self._say(depth, f"{to} = {many}")
        else:
            raise TypeError(f"{self._cls.__name__}.{field.name}: {hint} does not travel")

    def _write(self, hint: Any, field: "Field[Any]", depth: int, x: str) -> None:
        """Lines that append the value of the variable ``x``."""
        if "dtype" in field.metadata:
            self._names[f"order_{field.name}"] = BYTE_ORDERS[field.metadata["dtype"]]
            self._say(depth, f"octets = contiguous({x}, order_{field.name}).tobytes()")
            self._write_octets(depth)
        elif hint is int:
            self._say(depth, f"if 0 <= {x} < 64:", f"    put({x} << 1)", "else:", f"    put_long(out, {x})")
        elif hint is float:
            self._say(depth, f"out += packed({x})")
        elif hint is bool:
            self._say(depth, f"put(1 if {x} else 0)")
        elif hint is str:
            self._say(depth, f"if {x} == '':", "    put(0)", "else:", f"    octets = {x}.encode()")
            self._write_octets(depth + 1)
        elif hint is bytes:
            self._say(depth, f"octets = {x}")
            self._write_octets(depth)
        else:
            self._write_nested(hint, field, depth, x)

    def _write_octets(self, depth: int) -> None:
        self._say(depth, "size = len(octets)")
        self._say(depth, "if size < 64:", "    put(size << 1)", "else:", "    put_long(out, size)", "out += octets")

    def _write_nested(self, hint: Any, field: "Field[Any]", depth: int, x: str) -> None:
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if is_dataclass(hint):
            self._say(depth, f"{self._of(instance_writer, hint, 'write')}({x}, out)")
        elif origin is types.UnionType:
            inner = next(a for a in arguments if a is not type(None))
            name = self._of(instance_writer, inner, "write")
            self._say(depth, f"if {x} is None:", "    put(0)", "else:", "    put(2)", f"    {name}({x}, out)")
        elif origin in (list, dict):
            self._say(depth, f"size = len({x})", "if size:", "    put_long(out, size)")
            if origin is dict:
                self._say(depth + 1, f"for key, one in {x}.items():")
                self._write(str, _PLAIN, depth + 2, "key")
            else:
                self._say(depth + 1, f"for one in {x}:")
            self._write(arguments[-1], _PLAIN, depth + 2, "one")
            self._say(depth, "put(0)")
        else:
            raise TypeError(f"{self._cls.__name__}.{field.name}: {hint} does not travel")


class _Plain:
    """A value within a list or a map, which has no field of its own."""

    name = "one"
    metadata: typing.ClassVar[dict[str, Any]] = {}


_PLAIN: Any = _Plain()


def _cut(size: int) -> typing.NoReturn:
    raise EOFError(f"a length or choice of {size} where there is no such thing")


def _array(octets: bytes, dtype: str) -> Any:
    order = BYTE_ORDERS[dtype]
    if len(octets) % order.itemsize:
        raise UndecodableRecord(f"{len(octets)} bytes are no whole number of {dtype} entries")
    return np.frombuffer(octets, order)
