"""TensorBoard reads back what was written, also after the trainer was killed and started again."""

from pathlib import Path

import pytest

from headrace.trainers.sinks.sink import RunInfo
from headrace.trainers.sinks.tensorboard import TensorBoard

pytest.importorskip("tensorboard", reason="the extra 'tensorboard' is not installed")


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {
        tag: [(event.step, round(event.value, 5)) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }


def test_scalars_by_version(tmp_path: Path) -> None:
    info = RunInfo(project="p", run="r", policy="main", folder=tmp_path, settings={"lr": 1e-3, "loss": "grpo"})
    first = TensorBoard(info)
    first.write(1, {"reward/mean": 0.25, "time/step": 1.5})
    first.write(2, {"reward/mean": 0.5})  # and killed: never closed
    second = TensorBoard(info)
    second.write(3, {"reward/mean": 0.75})
    second.close()
    assert read(tmp_path / "tensorboard" / "main") == {
        "reward/mean": [(1, 0.25), (2, 0.5), (3, 0.75)],
        "time/step": [(1, 1.5)],
    }
    first.close()


def test_another_folder(tmp_path: Path) -> None:
    info = RunInfo(project="p", run="r", policy="main", folder=tmp_path)
    sink = TensorBoard(info, folder=str(tmp_path / "elsewhere"))
    sink.write(1, {"loss": 2.0})
    sink.close()
    assert read(tmp_path / "elsewhere") == {"loss": [(1, 2.0)]}
