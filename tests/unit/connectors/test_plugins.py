"""Plug-ins by entry point: found, named in every error, or by module path."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from headrace.connectors import plugins
from headrace.connectors.plugins import GROUPS, installed, load
from headrace.pipeline.operators.dynamic_sampling import DynamicSampling
from headrace.schemas.errors import ConfigurationError


def test_a_name_gives_the_object_and_every_own_entry_point_loads() -> None:
    assert load("headrace.operators", "dynamic_sampling") is DynamicSampling
    assert "dynamic_sampling" in installed("headrace.operators")
    assert {"headrace.losses", "headrace.sinks"} < set(GROUPS)


def test_module_and_attribute_need_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("class Rewards:\n    length = staticmethod(len)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load("headrace.rewards", "my_rewards:Rewards.length") is len
    with pytest.raises(ConfigurationError, match=r"headrace.rewards 'my_rewards:Rewards.none' cannot be imported"):
        load("headrace.rewards", "my_rewards:Rewards.none")
    with pytest.raises(ConfigurationError, match="No module named 'nothing_there'"):
        load("headrace.rewards", "nothing_there:x")
    sys.modules.pop("my_rewards")


def test_an_unknown_name_says_the_nearest_and_what_is_installed() -> None:
    with pytest.raises(ConfigurationError, match=r"did you mean 'dynamic_sampling'\?. Installed: .*dynamic_sampling"):
        load("headrace.operators", "dynamic-sampling")
    with pytest.raises(ConfigurationError, match=r"'headrace.operator' is no group of plug-ins"):
        load("headrace.operator", "x")


def test_an_import_that_fails_names_distribution_and_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "broken_pack-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-pack\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[headrace.operators]\nbroken = not_there:Operator\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigurationError, match=r"entry point 'not_there:Operator' of distribution broken-pack\) cannot be imported"
    ):
        load("headrace.operators", "broken")


def test_two_distributions_that_claim_a_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [EntryPoint("twice", value, "headrace.losses") for value in ("a:x", "b:y")]
    monkeypatch.setattr(plugins, "_entries", lambda group, path: both)
    with pytest.raises(ConfigurationError, match=r"'twice' is declared by unknown \(a:x\) and unknown \(b:y\)"):
        load("headrace.losses", "twice")


@pytest.mark.parametrize("name", [":x", "my_rewards:", ".relative:x", "..:x", "a b:x", "my_rewards.none:x"])
def test_names_that_are_no_module_and_attribute_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rewards.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"headrace\.rewards .* cannot be imported"):
        load("headrace.rewards", name)
    sys.modules.pop("my_rewards", None)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def f(:\n", "SyntaxError"),
        ("x = nothing_there\n", "nothing_there"),
        ("import nothing_there\n", "nothing_there"),
        ("raise RuntimeError('no licence')\n", r"RuntimeError: no licence\n.*my_broken.py\", line 1"),
        ("def f():\n    return 1 / 0\nf()\n", r"division by zero\n.*line 3, in <module>\n.*\n.*line 2, in f"),
    ],
)
def test_a_module_that_cannot_be_loaded_is_named_with_the_reason(
    code: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_broken.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=rf"'my_broken:x' cannot be imported: .*{says}"):
        load("headrace.rewards", "my_broken:x")


def test_the_first_distribution_has_a_name_that_two_give_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = [EntryPoint("same", "math:sqrt", "headrace.losses")] * 2
    monkeypatch.setattr(plugins, "_entries", lambda group, path: twice)
    assert load("headrace.losses", "same").__name__ == "sqrt"
    assert list(installed("headrace.losses")) == ["same"]


@pytest.mark.parametrize("group", GROUPS)
def test_every_entry_point_of_our_own_loads(group: str) -> None:
    own = {name: entry for name, entry in installed(group).items() if entry.value.startswith("headrace.")}
    for name, entry in own.items():
        assert load(group, name) is entry.load()
