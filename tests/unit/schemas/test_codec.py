"""Records to bytes and back: every record, broken bytes, rules at encode, old and new schemas."""

import copy
import dataclasses
import io
import random
from typing import Any

import fastavro
import numpy as np
import pytest

from headrace.schemas import avsc, codec, parts
from headrace.schemas.errors import InvalidRecord, UndecodableRecord
from headrace.schemas.records import RECORD_TYPES, Closed, Member, Prompt, Step, Task, Trajectory

NAMES = sorted(RECORD_TYPES)


def test_there_is_an_example_of_every_record(examples):
    assert sorted(examples) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_round_trip(name, examples):
    record = examples[name]
    value = codec.encode(record)
    back = codec.decode(value, codec.headers_of(record, "first", "0.1.0"))
    assert type(back) is type(record)
    assert codec.to_plain(back) == codec.to_plain(record)
    assert codec.to_plain(codec.decode(value)) == codec.to_plain(record), "the id alone must be enough"


@pytest.mark.parametrize("name", NAMES)
def test_packaged_schema_equals_the_dataclass(name):
    assert avsc.packaged_schema(name) == avsc.schema_of(RECORD_TYPES[name])


@pytest.mark.parametrize("cls", [*RECORD_TYPES.values(), *(getattr(parts, name) for name in parts.__all__)])
def test_the_decoder_may_fill_instances_slot_by_slot(cls):
    """What a class does beyond setting its fields would be left out."""
    if dataclasses.is_dataclass(cls):
        assert "__slots__" in vars(cls) and not hasattr(cls, "__post_init__")


def test_arrays_come_back_with_their_dtypes(examples):
    sequence = codec.decode(codec.encode(examples["Trajectory"])).sequences[0]
    assert [getattr(sequence, n).dtype for n in ("tokens", "logprobs", "mask", "versions")] == [
        np.dtype("int32"),
        np.dtype("float32"),
        np.dtype("uint8"),
        np.dtype("int32"),
    ]


def test_a_foreign_avro_reader_understands_the_body(examples):
    value = codec.encode(examples["Prompt"])
    data: Any = fastavro.schemaless_reader(io.BytesIO(value[5:]), avsc.packaged_schema("Prompt"), None)
    assert value[0] == 0
    assert int.from_bytes(value[1:5], "big") == codec.schema_id("Prompt")
    assert data["prompt"] == "52436="


def test_headers_are_readable_text(examples):
    headers = dict(codec.headers_of(examples["Prompt"], "first", "0.1.0"))
    assert headers["hr-record"] == b"Prompt"
    assert headers["hr-run"] == b"first"
    assert len(headers["hr-schema"]) == 16


def _with_field(schema: dict[str, Any]) -> dict[str, Any]:
    newer = copy.deepcopy(schema)
    newer["fields"].append({"name": "added_later", "type": "string", "default": ""})
    return newer


@pytest.mark.parametrize("name", NAMES)
def test_new_writer_old_reader_and_back(name, examples):
    """A field added with a default: today's reader reads tomorrow's records, tomorrow's reads today's."""
    record, schema = examples[name], avsc.packaged_schema(name)
    newer = _with_field(schema)
    codec.add_writer_schema(copy.deepcopy(newer), 1000 + NAMES.index(name))
    plain = fastavro.schemaless_reader(io.BytesIO(codec.encode(record)[5:]), schema, newer)
    assert plain["added_later"] == ""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, newer, {**plain, "added_later": "x"})
    value = b"\0" + (1000 + NAMES.index(name)).to_bytes(4, "big") + out.getvalue()
    assert codec.to_plain(codec.decode(value)) == codec.to_plain(record)


def _without(schema: dict[str, Any], record: str, field: str) -> dict[str, Any]:
    """A copy of a schema in which a record, at any depth, lacks one field."""
    older = copy.deepcopy(schema)
    todo: list[Any] = [older]
    while todo:
        here = todo.pop()
        if isinstance(here, dict) and here.get("name") == record and "fields" in here:
            here["fields"] = [f for f in here["fields"] if f["name"] != field]
        todo += here if isinstance(here, list) else here.values() if isinstance(here, dict) else ()
    return older


def _optional(schema: Any) -> list[tuple[str, str]]:
    """(record, field) of every field with a default, at any depth."""
    if isinstance(schema, list):
        return [pair for one in schema for pair in _optional(one)]
    if not isinstance(schema, dict):
        return []
    mine = [(schema["name"], f["name"]) for f in schema.get("fields", ()) if "default" in f]
    return mine + [pair for value in schema.values() if isinstance(value, list | dict) for pair in _optional(value)]


@pytest.mark.parametrize("name", NAMES)
def test_records_of_a_writer_that_did_not_know_a_field_have_its_default(name, examples):
    """Each optional field was added once: what was written before it reads as the dataclass's default, arrays too."""
    schema, plain = avsc.packaged_schema(name), codec.to_plain(examples[name])
    body = codec.encode(examples[name])[5:]
    for number, (record, field) in enumerate(_optional(schema)):
        older = _without(schema, record, field)
        try:
            parsed = fastavro.parse_schema(copy.deepcopy(older))
        except fastavro.schema.UnknownType:
            continue  # the field is the one that writes a part out which others refer to
        data = fastavro.schemaless_reader(io.BytesIO(body), fastavro.parse_schema(copy.deepcopy(schema)), parsed)
        out = io.BytesIO()
        fastavro.schemaless_writer(out, parsed, data)
        codec.add_writer_schema(copy.deepcopy(older), 5000 + number)
        back = codec.decode(b"\0" + (5000 + number).to_bytes(4, "big") + out.getvalue())
        assert type(back) is RECORD_TYPES[name]
        if record == name:
            default = codec.to_plain(_default(RECORD_TYPES[name], field))
            assert codec.to_plain(back) == plain | {field: default}, field
            assert codec.to_plain(codec.decode(codec.encode(back))) == codec.to_plain(back)


def _default(cls: type, name: str) -> Any:
    field = next(f for f in dataclasses.fields(cls) if f.name == name)
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


@pytest.mark.parametrize("field", ["tokens", "logprobs", "mask", "versions"])
def test_a_token_array_that_was_added_later_reads_as_an_empty_one_of_its_dtype(field, examples):
    older = _without(avsc.packaged_schema("Partial"), "Sequence", field)
    parsed = fastavro.parse_schema(copy.deepcopy(older))
    schema = fastavro.parse_schema(avsc.packaged_schema("Partial"))
    data = fastavro.schemaless_reader(io.BytesIO(codec.encode(examples["Partial"])[5:]), schema, parsed)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, parsed, data)
    codec.add_writer_schema(copy.deepcopy(older), 4999)
    back = codec.decode(b"\0" + (4999).to_bytes(4, "big") + out.getvalue())
    found = getattr(back.sequences[0], field)
    assert found.size == 0
    assert found.dtype == getattr(examples["Partial"].sequences[0], field).dtype


def test_the_fingerprint_in_the_header_counts_before_the_id(examples):
    """A registry may have given the id in front of the value to any schema."""
    value = bytearray(codec.encode(examples["Prompt"]))
    value[1:5] = codec.schema_id("Step").to_bytes(4, "big")
    headers = codec.headers_of(examples["Prompt"], "first", "0.1.0")
    assert codec.to_plain(codec.decode(bytes(value), headers)) == codec.to_plain(examples["Prompt"])
    with pytest.raises(UndecodableRecord):
        codec.decode(bytes(value))


@pytest.mark.parametrize("written", [b"", b"0123456789abcdef", b"\xff\xfe", None])
def test_a_fingerprint_that_nobody_knows_leaves_the_id(written, examples):
    value = codec.encode(examples["Prompt"])
    assert codec.to_plain(codec.decode(value, [("hr-schema", written)])) == codec.to_plain(examples["Prompt"])


def test_ids_and_fingerprints_are_of_one_schema_each_and_ids_are_out_of_a_registrys_way():
    ids = {codec.schema_id(name) for name in NAMES}
    assert len(ids) == len({codec.fingerprint(name) for name in NAMES}) == len(NAMES)
    assert all(0x40000000 <= number < 0x80000000 for number in ids)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_an_array_of_half_an_entry_is_undecodable(size, examples):
    """Bytes that Avro accepts and that are no whole number of tokens."""
    schema = fastavro.parse_schema(avsc.packaged_schema("Partial"))
    data = fastavro.schemaless_reader(io.BytesIO(codec.encode(examples["Partial"])[5:]), schema, None)
    data["sequences"][0]["tokens"] = bytes(size)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, data)
    with pytest.raises(UndecodableRecord, match=f"{size} bytes are no whole number of int32 entries"):
        codec.decode(codec.encode(examples["Partial"])[:5] + out.getvalue())


@pytest.mark.parametrize(
    "over", [{"row": 2**63}, {"row": -(2**63) - 1}, {"row": None}, {"messages": 5}, {"prompt": b""}]
)
def test_values_that_avro_cannot_hold_are_invalid_and_name_the_record(over, examples):
    with pytest.raises(InvalidRecord, match="Prompt prompt 7d0c8a3e4f2b1a90"):
        codec.encode(dataclasses.replace(examples["Prompt"], **over))


def test_arrays_travel_whatever_their_order_and_layout(examples, make_sequence):
    """Big-endian and strided arrays are written as the little-endian bytes of the same numbers."""
    tokens = np.arange(8, dtype=">i4")[::2]
    logprobs = np.array([[0.0, -9], [0, -9], [-0.5, -9], [-0.25, -9]])[:, 0]
    sequence = make_sequence(tokens=tokens, logprobs=logprobs)
    back = codec.decode(codec.encode(dataclasses.replace(examples["Partial"], sequences=[sequence]))).sequences[0]
    assert back.tokens.tolist() == [0, 2, 4, 6]
    assert back.logprobs.tolist() == [0, 0, -0.5, -0.25]


@pytest.mark.parametrize("name", NAMES)
def test_every_prefix_and_random_damage_ends_in_a_clear_error_or_a_record(name, examples):
    value = codec.encode(examples[name])
    for cut in range(len(value)):
        with pytest.raises(UndecodableRecord):
            codec.decode(value[:cut])
    dice = random.Random(name)
    for _ in range(300):
        broken = bytearray(value)
        for _ in range(dice.randint(1, 4)):
            broken[dice.randrange(len(broken))] = dice.randrange(256)
        try:
            codec.decode(bytes(broken))
        except UndecodableRecord:
            continue


@pytest.mark.parametrize("value", [None, b"", b"{}", b"\x01\0\0\0\x01abc", b"\0\0\0\0\x01abc", bytes(range(256))])
def test_garbage_is_undecodable(value):
    with pytest.raises(UndecodableRecord):
        codec.decode(value)


def test_extra_bytes_after_the_record_are_refused(examples):
    with pytest.raises(UndecodableRecord, match="2 bytes follow the Prompt"):
        codec.decode(codec.encode(examples["Prompt"]) + b"xx")


def _trajectory(examples, make_sequence, **over) -> Trajectory:
    return dataclasses.replace(examples["Trajectory"], sequences=[make_sequence(**over)])


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"logprobs": np.zeros(3, "float32")}, "logprobs has 3 entries for 4 tokens"),
        ({"mask": np.zeros(5, "uint8")}, "mask has 5 entries for 4 tokens"),
        ({"versions": np.zeros(0, "int32")}, "versions has 0 entries for 4 tokens"),
        ({"logprobs": np.array([0, 0, np.nan, 0], "float32")}, r"logprobs\[2\] is nan"),
        ({"logprobs": np.array([0, 0, 0, -np.inf], "float32")}, r"logprobs\[3\] is -inf"),
        ({"versions": np.array([-1, -1, -1, 8], "int32")}, "has no policy version"),
        ({"oldest_version": 3}, "oldest_version is 3, the tokens say 7"),
        ({"end_reason": "bored"}, "end_reason 'bored' is none of"),
    ],
)
def test_a_broken_sequence_may_not_travel(over, message, examples, make_sequence):
    with pytest.raises(InvalidRecord, match=message) as caught:
        codec.encode(_trajectory(examples, make_sequence, **over))
    assert "Trajectory" in str(caught.value)
    assert "group 5 replica 0" in str(caught.value)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_rewards_may_not_travel(reward, examples):
    with pytest.raises(InvalidRecord, match="reward is"):
        codec.encode(dataclasses.replace(examples["Trajectory"], reward=reward))
    with pytest.raises(InvalidRecord, match="shaped_reward is"):
        codec.encode(dataclasses.replace(examples["Member"], shaped_reward=reward))
    with pytest.raises(InvalidRecord, match="loss is"):
        codec.encode(dataclasses.replace(examples["Step"], loss=reward))


@pytest.mark.parametrize(
    ("name", "over"),
    [
        ("Task", {"kind": "x"}),
        ("Closed", {"reason": "x"}),
        ("Member", {"status": "x"}),
        ("Trajectory", {"status": "x"}),
    ],
)
def test_closed_lists_are_closed(name, over, examples):
    with pytest.raises(InvalidRecord, match="'x' is none of"):
        codec.encode(dataclasses.replace(examples[name], **over))


def test_a_lone_surrogate_is_named(examples):
    with pytest.raises(InvalidRecord, match="lone surrogate"):
        codec.encode(dataclasses.replace(examples["Prompt"], prompt="a\ud800b"))


def test_a_wrong_type_is_an_invalid_record(examples):
    with pytest.raises(InvalidRecord, match="Prompt"):
        codec.encode(dataclasses.replace(examples["Prompt"], row="three"))


def test_classes_named_here_exist():
    assert {Closed, Member, Prompt, Step, Task, Trajectory} <= set(RECORD_TYPES.values())
