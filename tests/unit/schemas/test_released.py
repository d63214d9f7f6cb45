"""Releases: this one reads what every earlier one wrote, as Avro says and as bytes show."""

from __future__ import annotations

import copy
import io
from typing import Any

import fastavro
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas import released
from headrace.schemas.avsc import packaged_schema
from headrace.schemas.codec import decode, encode, fingerprint, fingerprint_of, headers_of
from headrace.schemas.records import RECORD_TYPES, Record
from headrace.schemas.released import incompatibilities, main, released_schemas

RELEASES = [(version, name) for version, schemas in released_schemas().items() for name in schemas]


def test_there_is_a_release_and_it_knows_every_record_once() -> None:
    first = next(iter(released_schemas()))
    assert set(released_schemas()[first]) <= set(RECORD_TYPES)
    assert len(released_schemas()[first]) >= 30


@pytest.mark.parametrize(("version", "name"), RELEASES)
def test_backward_transitive_this_release_reads_what_each_earlier_one_wrote(version: str, name: str) -> None:
    assert incompatibilities(packaged_schema(name), released_schemas()[version][name]) == []


@pytest.mark.parametrize(("version", "name"), RELEASES)
def test_bytes_of_a_release_are_read_by_the_id_alone_and_by_the_header(
    version: str, name: str, examples: dict[str, Record]
) -> None:
    """What a release wrote is decoded today, with new fields at their defaults."""
    schema = released_schemas()[version][name]
    data = fastavro.schemaless_reader(io.BytesIO(encode(examples[name])[5:]), packaged_schema(name), schema)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), data)
    header = [("hr-schema", fingerprint_of(schema).encode())]
    read = decode(b"\0\0\0\0\1" + out.getvalue(), header)
    assert type(read).__name__ == name
    kept = {field["name"] for field in schema["fields"]}
    for field in kept & {"run", "group", "prompt_id", "batch", "policy"}:
        assert getattr(read, field) == getattr(examples[name], field)


def changed(schema: dict[str, Any], change: Any) -> dict[str, Any]:
    out = copy.deepcopy(schema)
    change(out)
    return out


BASE: dict[str, Any] = {
    "type": "record", "name": "R", "namespace": "headrace",
    "fields": [
        {"name": "a", "type": "long"},
        {"name": "t", "type": {"type": "bytes", "dtype": "int32"}},
        {"name": "o", "type": ["null", "string"], "default": None},
        {"name": "p", "type": {"type": "array", "items": {"type": "record", "name": "P", "fields": [
            {"name": "x", "type": "double"}]}}},
        {"name": "m", "type": {"type": "map", "values": "headrace.P"}},
    ],
}  # fmt: skip
HARMLESS = {
    "a field with a default": lambda s: s["fields"].append({"name": "n", "type": "long", "default": 0}),
    "another order": lambda s: s["fields"].reverse() or s["fields"].sort(key=lambda f: f["name"] == "m"),
    "words and attributes": lambda s: s.update(doc="new") or s["fields"][1]["type"].update(dtype="float32"),
    "a field less": lambda s: s["fields"].pop(0),
    "long to double": lambda s: s["fields"][0].update(type="double"),
    "made optional": lambda s: s["fields"][0].update(type=["null", "long"], default=None),
}
BREAKING = {
    "a field without a default": (lambda s: s["fields"].append({"name": "n", "type": "long"}), "n: is new"),
    "renamed": (lambda s: s["fields"][0].update(name="b"), "b: is new"),
    "another type": (lambda s: s["fields"][0].update(type="boolean"), "a: boolean cannot read long"),
    "no longer optional": (lambda s: s["fields"][2].update(type="string"), "o: string cannot read null"),
    "a part changed": (
        lambda s: s["fields"][3]["type"]["items"]["fields"][0].update(type="string"),
        "p[].x: string cannot read double",
    ),
    "another record": (lambda s: s.update(name="S"), "a S is not a R"),
}  # fmt: skip


@pytest.mark.parametrize("what", HARMLESS)
def test_changes_that_keep_old_data_readable_are_allowed(what: str) -> None:
    assert incompatibilities(changed(BASE, HARMLESS[what]), BASE) == []


@pytest.mark.parametrize("what", BREAKING)
def test_changes_that_break_old_data_are_named(what: str) -> None:
    change, says = BREAKING[what]
    assert any(says in reason for reason in incompatibilities(changed(BASE, change), BASE))


PRIMITIVES = st.sampled_from(["null", "boolean", "int", "long", "float", "double", "bytes", "string"])
TYPES = st.recursive(
    PRIMITIVES | st.lists(PRIMITIVES, min_size=1, max_size=3, unique=True),
    lambda inner: (
        st.builds(lambda items: {"type": "array", "items": items}, inner)
        | st.builds(lambda values: {"type": "map", "values": values}, inner)
    ),
    max_leaves=3,
)


@settings(max_examples=150, deadline=None)
@given(reader=TYPES, writer=TYPES)
def test_the_verdict_is_that_of_fastavro(reader: Any, writer: Any) -> None:
    """A reader that is called compatible reads one value of every branch; one that is not fails on some."""

    def record(of: Any) -> dict[str, Any]:
        return {"type": "record", "name": "R", "fields": [{"name": "f", "type": of}]}

    failed = False
    written, read = fastavro.parse_schema(record(writer)), fastavro.parse_schema(record(reader))
    for value in values(writer):
        out = io.BytesIO()
        fastavro.schemaless_writer(out, written, {"f": value})
        out.seek(0)
        try:
            fastavro.schemaless_reader(out, written, read)
        except Exception:
            failed = True
    assert bool(incompatibilities(record(reader), record(writer))) is failed


def values(schema: Any) -> list[Any]:
    """One value for every branch of a type, with arrays and maps that are not empty."""
    if isinstance(schema, list):
        kinds = [(branch, value) for branch in schema for value in values(branch)]
        return [(branch, value) if isinstance(branch, str) else value for branch, value in kinds]
    if isinstance(schema, dict):
        inner = schema.get("items", schema.get("values"))
        return [[v] if schema["type"] == "array" else {"k": v} for v in values(inner)]
    return [{"null": None, "boolean": True, "int": 1, "long": 2, "float": 0.5, "double": 0.25, "bytes": b"b",
             "string": "s"}[schema]]  # fmt: skip


def test_a_version_is_written_only_with_what_changed_and_refuses_odd_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["next"]) == 2 and main([]) == 2 and main(["../1.0.0"]) == 2
    assert "VERSION" in capsys.readouterr().err


def test_the_order_of_versions_is_that_of_numbers() -> None:
    versions = ["0.10.0", "0.9.1", "0.9.0", "1.0.0"]
    assert sorted(versions, key=released._order) == ["0.9.0", "0.9.1", "0.10.0", "1.0.0"]


def test_fingerprints_ignore_words_and_headers_carry_them(examples: dict[str, Record]) -> None:
    schema = packaged_schema("Step")
    assert fingerprint_of({**schema, "doc": "other words"}) == fingerprint("Step")
    assert dict(headers_of(examples["Step"], "r", "0"))["hr-schema"].decode() == fingerprint_of(schema)
