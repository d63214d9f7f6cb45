"""`headrace schema` without a registry, and against none: releases are compared, and a lack of a registry is said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.pipeline.cli import schema
from headrace.pipeline.cli.main import main
from headrace.schemas import released
from headrace.schemas.avsc import packaged_schema
from headrace.schemas.records import RECORD_TYPES


def headrace(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(("schema", *words))
    return int(stopped.value.code or 0)


def test_this_release_reads_what_earlier_ones_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace("check", "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["record"] for row in rows] == list(RECORD_TYPES)
    assert {row["state"] for row in rows} == {"compatible"}
    assert headrace("check") == 0
    said = capsys.readouterr()
    assert f"{len(RECORD_TYPES)} compatible" in said.err and len(said.out.splitlines()) == len(RECORD_TYPES) + 1


def test_a_release_that_cannot_be_read_any_more_ends_the_check_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old: dict[str, Any] = packaged_schema("Head")
    old = {**old, "fields": [f for f in old["fields"] if "default" in f]}
    monkeypatch.setattr(released, "released_schemas", lambda: {"0.0.9": {"Head": old}})
    assert headrace("check", "--format", "json") == 1
    (row,) = (row for row in json.loads(capsys.readouterr().out) if row["state"] == "incompatible")
    assert row["record"] == "Head" and "release 0.0.9: policy: is new and has no default" in row["detail"]


@pytest.mark.parametrize("command", ["check", "register"])
def test_a_registry_that_is_away_is_said(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace(command, "--registry", "http://127.0.0.1:1") == 1
    assert "no schema registry answers (http://127.0.0.1:1: " in capsys.readouterr().err


def test_the_module_is_light() -> None:
    """Listing commands must not load a client."""
    assert not {"SchemaRegistry", "RECORD_TYPES", "urllib"} & set(vars(schema))
