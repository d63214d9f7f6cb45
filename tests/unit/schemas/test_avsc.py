"""Schemas from dataclasses: packed arrays, defaults on both sides, and the check of the packaged files."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import fastavro
import pytest

from headrace.schemas import avsc, records
from headrace.schemas.avsc import packaged_schema, schema_of
from headrace.schemas.records import RECORD_TYPES

NAMES = sorted(RECORD_TYPES)


def _records_in(schema: Any) -> list[dict[str, Any]]:
    """Every record definition in a schema, outermost first."""
    if isinstance(schema, list):
        return [found for one in schema for found in _records_in(one)]
    if not isinstance(schema, dict):
        return []
    if schema["type"] == "record":
        return [schema, *(found for field in schema["fields"] for found in _records_in(field["type"]))]
    return [found for key in ("items", "values", "type") if key in schema for found in _records_in(schema[key])]


@pytest.mark.parametrize("name", NAMES)
def test_a_schema_is_valid_avro_and_names_each_part_once(name: str) -> None:
    schema = schema_of(RECORD_TYPES[name])
    fastavro.parse_schema(json.loads(json.dumps(schema)))
    names = [record["name"] for record in _records_in(schema)]
    assert names[0] == name
    assert len(names) == len(set(names)), "a part is written out where it comes first and named afterwards"
    assert {record["namespace"] for record in _records_in(schema)} == {"headrace"}


@pytest.mark.parametrize("name", NAMES)
def test_what_has_a_default_in_the_dataclass_has_it_in_the_schema(name: str) -> None:
    """Otherwise a reader of tomorrow could not read the records of today."""
    fields = {field["name"]: field for field in schema_of(RECORD_TYPES[name])["fields"]}
    for field in dataclasses.fields(RECORD_TYPES[name]):
        missing = dataclasses.MISSING
        has_default = field.default is not missing or field.default_factory is not missing
        assert ("default" in fields[field.name]) == has_default, field.name


@pytest.mark.parametrize("name", NAMES)
def test_a_record_of_required_fields_alone_is_read_with_the_dataclasss_defaults(
    name: str, examples: dict[str, records.Record]
) -> None:
    """A writer that knows none of the optional fields: the reader fills in what the dataclass would."""
    schema, cls = schema_of(RECORD_TYPES[name]), RECORD_TYPES[name]
    old = {**schema, "fields": [field for field in schema["fields"] if "default" not in field]}
    if any(isinstance(field["type"], str) and "." in field["type"] for field in old["fields"]):
        pytest.skip("refers to a part that an optional field writes out")
    given = {field["name"]: getattr(examples[name], field["name"]) for field in old["fields"]}
    plain = json.loads(json.dumps(given, default=dataclasses.asdict))
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(old))), plain)
    out.seek(0)
    read: Any = fastavro.schemaless_reader(
        out, fastavro.parse_schema(json.loads(json.dumps(old))), fastavro.parse_schema(schema)
    )
    expected = cls(**given)  # type: ignore[arg-type]
    for field in dataclasses.fields(cls):
        if field.name not in given and not dataclasses.is_dataclass(getattr(expected, field.name)):
            default = getattr(expected, field.name)
            found = read[field.name].encode("latin-1") if isinstance(default, bytes) else read[field.name]
            assert found == default, field.name


def test_token_arrays_are_bytes_that_say_what_they_hold() -> None:
    sequence = next(r for r in _records_in(schema_of(records.Trajectory)) if r["name"] == "Sequence")
    types = {field["name"]: field["type"] for field in sequence["fields"]}
    packed = {name: kind for name, kind in types.items() if isinstance(kind, dict) and "dtype" in kind}
    assert packed == {
        "tokens": {"type": "bytes", "dtype": "int32", "byteorder": "little"},
        "logprobs": {"type": "bytes", "dtype": "float32", "byteorder": "little"},
        "mask": {"type": "bytes", "dtype": "uint8", "byteorder": "little"},
        "versions": {"type": "bytes", "dtype": "int32", "byteorder": "little"},
    }


def test_an_optional_part_is_null_first_so_that_null_is_its_default() -> None:
    blob = next(field for field in schema_of(records.Trajectory)["fields"] if field["name"] == "blob")
    assert blob["type"][0] == "null"
    assert blob["default"] is None


def test_the_check_names_schemas_that_differ_and_writing_mends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(avsc, "__file__", str(tmp_path / "avsc.py"))
    assert avsc.main([]) == 0
    assert sorted(path.stem for path in tmp_path.glob("*.avsc")) == NAMES
    assert avsc.main(["--check"]) == 0
    (tmp_path / "Step.avsc").write_text("{}")
    (tmp_path / "Group.avsc").unlink()
    assert avsc.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert "Group, Step" in said
    assert "python -m headrace.schemas.avsc" in said
    assert avsc.main([]) == avsc.main(["--check"]) == 0
    assert json.loads((tmp_path / "Step.avsc").read_text()) == packaged_schema("Step")
