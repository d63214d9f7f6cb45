"""What a dead letter holds."""

from __future__ import annotations

import hashlib

import pytest

from headrace.pipeline.runtime.dead_letters import UnusableFlood, UnusableShare, letter_headers, letter_value
from headrace.schemas.errors import ConfigurationError

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


def test_a_share_of_unusable_records_is_borne_and_a_flood_is_not() -> None:
    share = UnusableShare(window=10, share=0.5)
    for n in range(200):
        if n % 2:
            share.usable("trajectories")
        else:
            share.unusable("trajectories", f"run.trajectories[0]@{n}", ValueError("bad"))
    share.usable("trajectories")
    share.usable("admissions")
    with pytest.raises(UnusableFlood) as caught:
        for n in range(10):
            share.unusable("trajectories", f"run.trajectories[0]@{n}", ValueError("bad"))
    said = str(caught.value)
    assert "6 of the last 10 records of trajectories" in said
    assert "ValueError: bad" in said
    assert "run.trajectories[0]@" in said
    assert "runtime.max_unusable_share=1" in said
    assert isinstance(caught.value, ConfigurationError), "the launcher does not start the part again"


def test_a_few_bad_records_at_the_start_are_no_flood_and_topics_count_alone() -> None:
    share = UnusableShare(window=200, share=0.5)
    for n in range(100):
        share.unusable("a", f"a@{n}", ValueError())
        share.unusable("b", f"b@{n}", ValueError())
    with pytest.raises(UnusableFlood, match="101 of the last 101 records of b"):
        share.unusable("b", "b@101", ValueError())


def test_whoever_allows_all_gets_all() -> None:
    share = UnusableShare(window=5, share=1.0)
    for n in range(50):
        share.unusable("a", f"a@{n}", ValueError())
