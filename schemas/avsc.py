"""Avro schemas from the record dataclasses, and the packaged ``*.avsc`` files.

The dataclass is the one source: ``python -m headrace.schemas.avsc`` writes the files, ``--check`` compares them.
Token arrays become ``bytes`` with ``dtype`` and ``byteorder`` attributes, which Avro readers ignore. Every field with a
default has it in the schema too, so that old readers and new writers understand each other both ways.
"""

import dataclasses
import json
import sys
import types
import typing
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from headrace.schemas.records import RECORD_TYPES

__all__ = ("NAMESPACE", "main", "packaged_schema", "schema_of")

NAMESPACE = "headrace"
_SCALARS: dict[Any, str] = {int: "long", float: "double", bool: "boolean", str: "string", bytes: "bytes"}


def schema_of(cls: type) -> dict[str, Any]:
    """The Avro schema of a record class as plain JSON data; nested parts are written out where they come first."""
    schema: dict[str, Any] = _record(cls, set())
    return schema


def packaged_schema(name: str) -> dict[str, Any]:
    """The schema in the packaged file ``<name>.avsc``."""
    data: dict[str, Any] = json.loads((resources.files("headrace.schemas") / f"{name}.avsc").read_text("utf-8"))
    return data


def _record(cls: type, seen: set[str]) -> Any:
    if cls.__name__ in seen:
        return f"{NAMESPACE}.{cls.__name__}"
    seen.add(cls.__name__)
    hints = typing.get_type_hints(cls)
    doc = (cls.__doc__ or "").split("\n", 1)[0]
    fields = [_field(f, hints[f.name], seen) for f in dataclasses.fields(cls)]
    return {"type": "record", "name": cls.__name__, "namespace": NAMESPACE, "doc": doc, "fields": fields}


def _field(f: "dataclasses.Field[Any]", hint: Any, seen: set[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"name": f.name, "type": _type(hint, f, seen)}
    if f.default is not dataclasses.MISSING:
        out["default"] = f.default.decode("latin-1") if isinstance(f.default, bytes) else f.default
    elif f.default_factory is not dataclasses.MISSING:
        value = f.default_factory()
        if isinstance(value, np.ndarray):
            out["default"] = ""
        else:
            out["default"] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
    return out


def _type(hint: Any, f: "dataclasses.Field[Any]", seen: set[str]) -> Any:
    if "dtype" in f.metadata:
        return {"type": "bytes", "dtype": f.metadata["dtype"], "byteorder": "little"}
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return {"type": "array", "items": _type(arguments[0], f, seen)}
    if origin is dict:
        return {"type": "map", "values": _type(arguments[1], f, seen)}
    if origin is types.UnionType:
        return ["null", *(_type(a, f, seen) for a in arguments if a is not type(None))]
    return _record(hint, seen)


def main(arguments: list[str]) -> int:
    """Write every schema file beside this module, or with ``--check`` say which differ (exit status 1)."""
    folder = Path(__file__).resolve().parent
    wrong = []
    for name, cls in RECORD_TYPES.items():
        path, text = folder / f"{name}.avsc", json.dumps(schema_of(cls), indent=2) + "\n"
        if "--check" in arguments:
            wrong += [name] if not path.exists() or path.read_text("utf-8") != text else []
        else:
            path.write_text(text, "utf-8")
    if wrong:
        sys.stderr.write(
            f"schemas that differ from their dataclass: {', '.join(wrong)}; run python -m headrace.schemas.avsc\n"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
