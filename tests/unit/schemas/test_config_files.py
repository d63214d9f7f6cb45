"""Files and overrides of every shape: what is read, in which order it counts, and the words for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.config import PolicyConfig, RunConfig, load_config, read_config
from headrace.schemas.errors import ConfigurationError

LEAST = {"run": {"id": "first"}, "policies": {"main": {"model": "m"}}, "streams": {"main": {"dataset": "d.jsonl"}}}


@pytest.fixture
def least(tmp_path: Path) -> Path:
    """A run of which everything else is a default."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps(LEAST))
    return path


def test_a_json_file_may_stand_for_a_toml_file(least: Path, tmp_path: Path) -> None:
    over = tmp_path / "over.toml"
    over.write_text("[trainer]\nlr = 0.5\n")
    assert load_config([least, over]).trainer.lr == 0.5
    assert load_config([over, least]).trainer.lr == 0.5, "sections are merged, not replaced"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.json", b"[1, 2]", "x.json holds a list, not sections"),
        ("x.json", b"null", "x.json holds a NoneType, not sections"),
        ("x.json", b"{", "x.json is not JSON"),
        ("x.json", b"[" * 100_000, "x.json is not JSON"),
        ("x.toml", b"a = ", "x.toml is not TOML"),
        ("x.toml", b"[run]\n[run]\n", "x.toml is not TOML"),
        ("x.toml", b"\xff", "x.toml is not TOML"),
        ("x.toml", b"run = 5", "run: "),
        ("x.toml", b"[policies]\nmain = 5", "policies.main: "),
    ],
)
def test_files_that_hold_no_configuration_are_named(
    least: Path, tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=says):
        load_config([least, path])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("rollout.options.x=5", 5),
        ("rollout.options.x=0.5", 0.5),
        ("rollout.options.x=true", True),
        ("rollout.options.x=[1, 'a']", [1, "a"]),
        ("rollout.options.x={a = 1}", {"a": 1}),
        ("rollout.options.x='5'", "5"),
        ("rollout.options.x=plain text", "plain text"),
        ("rollout.options.x=a=b", "a=b"),
        ("rollout.options.x=", ""),
        (" rollout.options.x =5", 5),
    ],
)
def test_an_overrides_value_is_toml_or_else_text(least: Path, text: str, value: Any) -> None:
    found = load_config([least], [text]).rollout.options["x"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("=5", "not of the form key=value"),
        ("", "not of the form key=value"),
        ("-x=5", "not of the form key=value"),
        ("run.id.x=5", "id is not a section"),
        ("trainer..lr=5", "not of the form key=value"),
        (".trainer.lr=5", "not of the form key=value"),
        ("trainer.lr.=5", "not of the form key=value"),
        ("trianer.lr=5", "unknown key trianer; did you mean trainer"),
        ("trainer=torch", "trainer: "),
        ("streams.main.group_size=0", "streams.main.group_size: "),
        ("streams.main.group_siz=4", "did you mean streams.main.group_size"),
        ("policies.main.trainer.backnd=torch", "backnd"),
        ("rollout.top_p=0", "rollout.top_p: "),
        ("rollout.top_p=1.5", "rollout.top_p: "),
        ("eval.priority=now", "eval.priority: "),
        ("trainer.betas=[0.9]", "trainer.betas"),
        ("policies.main.replay=1", "policies.main.replay: "),
        ("policies.main.depth=inf", "policies.main.depth: .*finite"),
        ("trainer.lr=nan", "trainer.lr: .*finite"),
    ],
)
def test_overrides_that_cannot_be_are_refused_in_words(least: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        load_config([least], [override])


def test_every_fault_is_told_at_once(least: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_config([least], ["trainer.lr=-1", "rollout.top_p=2", "eval.nonsense=1"])
    said = str(caught.value)
    assert all(name in said for name in ("trainer.lr", "rollout.top_p", "eval.nonsense"))
    assert said.count(str(least)) == 3


def test_a_later_override_wins_over_an_earlier_one(least: Path) -> None:
    assert load_config([least], ["trainer.lr=1", "trainer.lr=2"]).trainer.lr == 2


@pytest.mark.parametrize("missing", ["policies", "streams"])
@pytest.mark.parametrize("empty", [False, True])
def test_a_run_without_policies_or_streams_is_none(tmp_path: Path, missing: str, empty: bool) -> None:
    data = {key: value for key, value in LEAST.items() if key != missing} | ({missing: {}} if empty else {})
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(ConfigurationError, match="at least one" if empty else missing):
        load_config([tmp_path / "run.json"])


@pytest.mark.parametrize("content", ["", "[]", "{}", "{", "null"])
def test_a_broken_configuration_of_a_run_folder_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        read_config(tmp_path / "config.json")
    with pytest.raises(ConfigurationError, match="cannot read"):
        read_config(tmp_path / "none.json")


@given(st.floats(0, 20), st.integers(0, 5), st.integers(-1, 40))
def test_the_staleness_bound_is_never_below_what_depth_and_lag_need(depth: float, lag: int, bound: int) -> None:
    """A >= ceil(d) + lag is checked at start (protocol 4); at depth 0 the bound is the lag, whatever is set."""
    policy = {"model": "m", "depth": depth, "lag": lag, "max_staleness": bound}
    try:
        config = RunConfig.model_validate({**LEAST, "policies": {"main": policy}})
    except ValueError:
        assert depth > 0
        assert 0 <= bound < depth + lag + 1
        return
    found = config.policies["main"]
    least = -int(-depth // 1) + lag
    assert found.staleness_bound() >= least
    assert found.staleness_bound() == (lag if depth == 0 else least if bound < 0 else bound)
    assert found.batches_ahead() == (0 if depth == 0 else 1)


def test_a_bound_of_zero_depth_ignores_what_is_set() -> None:
    assert PolicyConfig(model="m", depth=0, max_staleness=9, lag=2, ahead=3).staleness_bound() == 2
    assert PolicyConfig(model="m", depth=0, ahead=3).batches_ahead() == 0
