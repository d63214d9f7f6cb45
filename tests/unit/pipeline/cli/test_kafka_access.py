"""`headrace kafka acls|users`: what they print for an administrator, and whose login they want."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headrace.pipeline.cli.main import main
from headrace.schemas.access import ROLES, grants_of


def headrace(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(("kafka", *words))
    return int(stopped.value.code or 0)


def test_rights_are_printed_as_arguments_of_kafkas_own_tool(capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace("acls", "--run", "first", "--principal", "trainer=svc-42") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(grants_of("first"))
    form = (
        r"--add --allow-principal User:\S+ --operation (Read|Write|Create|Delete|Describe|DescribeConfigs) "
        r"--(topic|group|transactional-id) first\.\S*( --resource-pattern-type prefixed)?"
    )
    assert [line for line in lines if not re.fullmatch(form, line)] == []
    assert "--add --allow-principal User:svc-42 --operation Write --topic first.steps" in lines
    assert not any("User:trainer" in line for line in lines)


def test_rights_as_json_name_role_and_principal(capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace("acls", "--run", "first", "--principal", "rollout=gpu", "--format", "json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["role"] for row in rows} == set(ROLES)
    assert {row["principal"] for row in rows if row["role"] == "rollout"} == {"User:gpu"}


@pytest.mark.parametrize("text", ["trainer", "trainer=", "nobody=x", "=x"])
def test_a_principal_of_no_role_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace("acls", "--run", "first", "--principal", text) == 78
    assert f"write ROLE=NAME with one of {', '.join(ROLES)}" in capsys.readouterr().err


def test_what_contradicts_itself_or_names_no_login_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headrace("acls", "--run", "first", "--apply", "--remove") == 78
    assert "name one of them" in capsys.readouterr().err
    for words in (("--apply",), ("--apply", "--state", str(tmp_path), "--config", "f.toml")):
        assert headrace("acls", "--run", "first", *words) == 78
        assert "whose login?" in capsys.readouterr().err
    assert headrace("acls", "--run", "First Run") == 78
    assert headrace("acls", "--run", "first", "--apply", "--state", str(tmp_path)) == 78
    assert "no cluster in" in capsys.readouterr().err


def test_the_file_with_the_login_needs_its_kafka_section_alone_and_unknown_keys_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "admin.toml"
    file.write_text('[kafka]\nbotstrap = "127.0.0.1:1"\n')
    assert headrace("acls", "--run", "first", "--apply", "--config", str(file)) == 78
    assert "unknown key kafka.botstrap; did you mean kafka.bootstrap?" in capsys.readouterr().err
    file.write_text('[kafka]\nbootstrap = "127.0.0.1:1"\nsecurity_protocol = "SASL_SSL"\n[run]\nid = "other"\n')
    assert headrace("acls", "--run", "first", "--apply", "--config", str(file)) == 78
    assert "HEADRACE_KAFKA_USERNAME is not set" in capsys.readouterr().err


def test_users_are_only_told_without_apply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "secrets"
    assert headrace("users", "--secrets", str(folder), "--principal", "source=feeder") == 0
    said = capsys.readouterr().out
    assert f"feeder: password in {folder}/source.password" in said and len(said.splitlines()) == len(ROLES)
    assert not folder.exists()
