"""Sinks fail, hang and come too late; training notices nothing of it but counts."""

import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from trainer_feed import make_config

from headrace.schemas.config import MetricsConfig, RunConfig
from headrace.schemas.errors import ConfigurationError
from headrace.trainers.sinks import fan_out
from headrace.trainers.sinks.fan_out import Sinks, open_sinks
from headrace.trainers.sinks.sink import RunInfo


class Notes:
    """A sink that keeps what it gets; ``fails`` raises in every other call, ``gate`` makes it wait."""

    def __init__(self, *, fails: bool = False, gate: threading.Event | None = None) -> None:
        self.taken: list[tuple[int, Mapping[str, float]]] = []
        self.closed = False
        self._fails, self._gate = fails, gate

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._gate is not None:
            assert self._gate.wait(30)
        if self._fails and step % 2:
            raise ConnectionError("no route to the dashboard")
        self.taken.append((step, metrics))

    def close(self) -> None:
        self.closed = True


def test_every_sink_gets_every_version_in_order_and_is_closed() -> None:
    one, two = Notes(), Notes()
    sinks = Sinks({"one": lambda: one, "two": lambda: two})
    for step in range(20):
        sinks.write(step, {"x": float(step)})
    sinks.close()
    assert one.taken == two.taken == [(step, {"x": float(step)}) for step in range(20)]
    assert one.closed and two.closed
    assert sinks.figures() == {"sinks/failed": 0.0, "sinks/dropped": 0.0}


def test_failures_are_counted_and_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    bad, good = Notes(fails=True), Notes()
    sinks = Sinks({"bad": lambda: bad, "good": lambda: good})
    for step in range(10):
        sinks.write(step, {})
    sinks.close()
    assert [step for step, _ in bad.taken] == [0, 2, 4, 6, 8] and len(good.taken) == 10
    assert sinks.figures()["sinks/failed"] == 5
    said = capfd.readouterr().err
    assert said.count("no route to the dashboard") == 1 and "metrics sink bad" in said


def test_a_sink_that_hangs_delays_nobody(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "_QUEUED", 4)
    hung, good = Notes(gate=(gate := threading.Event())), Notes()
    sinks = Sinks({"hung": lambda: hung, "good": lambda: good})
    for step in range(10):
        sinks.write(step, {})
        until = time.monotonic() + 20
        while len(good.taken) <= step and time.monotonic() < until:
            time.sleep(0.001)
    assert len(good.taken) == 10
    assert 5 <= sinks.figures()["sinks/dropped"] <= 6
    sinks.close(0.2)
    said = capfd.readouterr().err
    assert said.count("later ones are dropped") == 1 and "did not finish" in said
    gate.set()


def with_sinks(folder: Path, *names: str, **options: Any) -> RunConfig:
    config = make_config(folder / "no model", folder, "sunk")
    return config.model_copy(update={"metrics": MetricsConfig(sinks=list(names), options=options)})


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of a user's own with three sinks in it."""

    class Own(Notes):
        seen: ClassVar[list[RunInfo]] = []

        def __init__(self, info: RunInfo, *, colour: str = "") -> None:
            super().__init__()
            self.seen.append(info)

    class Away(Notes):
        def __init__(self, info: RunInfo) -> None:
            raise ConnectionError("the server is down")

    module = ModuleType("own_sinks")
    module.Own, module.Away = Own, Away  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_sinks", module)
    return module


def test_a_sink_of_ones_own_is_told_about_the_run(tmp_path: Path, plugin: ModuleType) -> None:
    open_sinks(with_sinks(tmp_path, "own_sinks:Own", **{"own_sinks:Own": {"colour": "red"}}), "main").close()
    (info,) = plugin.Own.seen
    assert (info.name, info.folder, info.project) == ("sunk-main", tmp_path / "sunk", "headrace")
    assert info.settings["backend"] == "torch" and info.settings["policy"] == "main"


def test_a_sink_that_cannot_start_is_said_and_training_goes_on(
    tmp_path: Path, plugin: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    sinks = open_sinks(with_sinks(tmp_path, "own_sinks:Away", "own_sinks:Own"), "main")
    sinks.write(1, {})
    sinks.close()
    said = capfd.readouterr().err
    assert "metrics sink own_sinks:Away: ConnectionError: the server is down" in said
    assert sinks.figures() == {"sinks/failed": 1.0, "sinks/dropped": 1.0}


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (("tensorbord",), {}, "did you mean 'tensorboard'"),
        (("own_sinks:Own", "own_sinks:Own"), {}, "twice"),
        (("own_sinks:Own",), {"own_sinks:Own": {"size": 3}}, "size"),
    ],
)
def test_mistakes_of_the_configuration_are_refused(
    tmp_path: Path, plugin: ModuleType, names: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_sinks(with_sinks(tmp_path, *names, **options), "main")


def test_secrets_and_options_of_nobody_never_get_into_a_configuration() -> None:
    with pytest.raises(ValueError, match="environment"):
        MetricsConfig(sinks=["wandb"], options={"wandb": {"api_key": "1"}})
    with pytest.raises(ValueError, match="no sink"):
        MetricsConfig(sinks=["wandb"], options={"mlflow": {}})


def test_without_sinks_there_is_nothing_to_say() -> None:
    sinks = Sinks({})
    sinks.write(1, {"x": 1.0})
    sinks.close()
    assert sinks.figures() == {}
