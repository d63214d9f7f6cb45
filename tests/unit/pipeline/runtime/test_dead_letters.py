"""What a dead letter holds."""

from __future__ import annotations

import hashlib

from headrace.pipeline.runtime.dead_letters import letter_headers, letter_value

PLACE = {"topic": "run.admissions", "partition": 3, "offset": 17, "stage": "assemble"}


def headers(value: bytes | None, own: list[tuple[str, bytes | None]] | None = None) -> dict[str, bytes | None]:
    try:
        raise KeyError("missing")
    except KeyError as error:
        return dict(letter_headers(error, value=value, headers=own or [], **PLACE))  # type: ignore[arg-type]


def test_kafka_streams_six_headers() -> None:
    found = headers(b"x", [("hr-record", b"Failed")])
    assert {k: found[k] for k in found if k.startswith("__streams") and not k.endswith("stacktrace")} == {
        "__streams.errors.exception": b"builtins.KeyError",
        "__streams.errors.message": b"'missing'",
        "__streams.errors.topic": b"run.admissions",
        "__streams.errors.partition": b"3",
        "__streams.errors.offset": b"17",
    }
    assert b'raise KeyError("missing")' in (found["__streams.errors.stacktrace"] or b"")
    assert found["hr-record"] == b"Failed"
    assert found["hr-stage"] == b"assemble"


def test_small_values_are_kept_whole() -> None:
    for value in (None, b"", bytes(1 << 20)):
        assert letter_value(value) == value
        assert "hr-size" not in headers(value)


def test_large_values_are_cut_and_described() -> None:
    value = bytes(range(256)) * 5000
    assert letter_value(value) == value[: 64 << 10]
    found = headers(value)
    assert found["hr-size"] == str(len(value)).encode()
    assert found["hr-sha256"] == hashlib.sha256(value).hexdigest().encode()


def test_a_flood_of_headers_is_not_carried_along() -> None:
    found = headers(b"x", [("own", bytes(17 << 10))])
    assert "own" not in found
