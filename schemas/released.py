"""Schemas of releases: kept in the package, so that every release reads what earlier ones wrote; compared in CI.

``released/<version>/<Record>.avsc`` holds the schemas that a version added or changed. ``python -m
headrace.schemas.released VERSION`` writes the folder at a release. A schema may gain fields with defaults, never lose
or change one: ``incompatibilities`` says why a reader would fail on what an earlier writer wrote.
"""

import json
import re
import sys
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from headrace.schemas.avsc import packaged_schema
from headrace.schemas.records import RECORD_TYPES

__all__ = ("incompatibilities", "main", "released_schemas")

Schema = Any
_PROMOTED: dict[str, tuple[str, ...]] = {
    "long": ("int",), "float": ("int", "long"), "double": ("int", "long", "float"), "string": ("bytes",),
    "bytes": ("string",),
}  # fmt: skip
"""Primitive types of a reader -> other types of a writer that it understands (Avro's schema resolution)."""


@cache
def released_schemas() -> dict[str, dict[str, dict[str, Any]]]:
    """Version -> record name -> schema that this version brought; oldest version first."""
    folder = resources.files("headrace.schemas") / "released"
    if not folder.is_dir():
        return {}
    versions = sorted((entry for entry in folder.iterdir() if entry.is_dir()), key=lambda entry: _order(entry.name))
    return {
        version.name: {
            file.name.removesuffix(".avsc"): json.loads(file.read_text("utf-8"))
            for file in sorted(version.iterdir(), key=lambda file: file.name)
            if file.name.endswith(".avsc")
        }
        for version in versions
    }


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def incompatibilities(reader: Schema, writer: Schema) -> list[str]:
    """Why a reader with the schema ``reader`` fails on data of ``writer``; empty when it reads all of it.

    Both are schemas as JSON data. Each reason names the path of the field.
    """
    return _Check(_named(reader), _named(writer)).against(reader, writer, "")


def _named(schema: Schema) -> dict[str, Schema]:
    """Full names of the records in a schema -> their definitions."""
    out: dict[str, Schema] = {}

    def walk(part: Schema, space: str) -> None:
        if isinstance(part, list):
            for entry in part:
                walk(entry, space)
        elif isinstance(part, dict):
            here = part.get("namespace", space)
            if part.get("type") == "record":
                out[f"{here}.{part['name']}" if here else part["name"]] = part
                for field in part["fields"]:
                    walk(field["type"], here)
            for inner in ("items", "values", "type"):
                if isinstance(part.get(inner), dict | list):
                    walk(part[inner], here)

    walk(schema, "")
    return out


class _Check:
    """Avro's schema resolution over two schemas, each with its own named records."""

    def __init__(self, readers: dict[str, Schema], writers: dict[str, Schema]) -> None:
        self._readers, self._writers = readers, writers

    def against(self, reader: Schema, writer: Schema, path: str) -> list[str]:
        reader, writer = self._plain(reader, self._readers), self._plain(writer, self._writers)
        if isinstance(writer, list):
            return [reason for branch in writer for reason in self.against(reader, branch, path)]
        if isinstance(reader, list):
            found = [self.against(branch, writer, path) for branch in reader]
            return [] if [] in found else [f"{path}: no branch of {_say(reader)} reads {_say(writer)}"]
        kind, written = _kind(reader), _kind(writer)
        if kind == written == "record":
            return self._records(reader, writer, path)
        if kind == written and kind in ("array", "map"):
            inner = "items" if kind == "array" else "values"
            return self.against(reader[inner], writer[inner], f"{path}[]")
        if kind == written or written in _PROMOTED.get(kind, ()):
            return []
        return [f"{path}: {_say(reader)} cannot read {_say(writer)}"]

    def _records(self, reader: Schema, writer: Schema, path: str) -> list[str]:
        if reader["name"] != writer["name"]:
            return [f"{path}: a {reader['name']} is not a {writer['name']}"]
        written = {field["name"]: field for field in writer["fields"]}
        out = []
        for field in reader["fields"]:
            here = f"{path}.{field['name']}".lstrip(".")
            if field["name"] in written:
                out += self.against(field["type"], written[field["name"]]["type"], here)
            elif "default" not in field:
                out.append(f"{here}: is new and has no default")
        return out

    @staticmethod
    def _plain(schema: Schema, named: dict[str, Schema]) -> Schema:
        """A name resolved, an annotated primitive without its annotations."""
        if isinstance(schema, str):
            return named.get(schema, schema)
        if isinstance(schema, dict) and schema["type"] not in ("record", "array", "map"):
            return schema["type"]
        return schema


def _kind(schema: Schema) -> str:
    return schema if isinstance(schema, str) else str(schema["type"])


def _say(schema: Schema) -> str:
    if isinstance(schema, list):
        return "[" + ", ".join(_say(branch) for branch in schema) + "]"
    return schema if isinstance(schema, str) else str(schema.get("name", schema["type"]))


def main(arguments: list[str]) -> int:
    """Write the folder of a release: the schemas that differ from the newest released ones."""
    if len(arguments) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+", arguments[0]):
        sys.stderr.write("usage: python -m headrace.schemas.released VERSION\n")
        return 2
    folder = Path(__file__).resolve().parent / "released" / arguments[0]
    newest: dict[str, dict[str, Any]] = {}
    for version, schemas in released_schemas().items():
        if version != arguments[0]:
            newest.update(schemas)
    for name in RECORD_TYPES:
        schema = packaged_schema(name)
        if newest.get(name) != schema:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.avsc").write_text(json.dumps(schema, indent=2) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
