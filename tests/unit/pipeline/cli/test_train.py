"""``headrace train``: words and folders; what it trains is tested where trainers run."""

import json
from pathlib import Path

import pytest

from headrace.pipeline.cli.main import main
from headrace.pipeline.cli.train import Training, _existing, _new, _span
from headrace.pipeline.launch.folder import RunFolder
from headrace.pipeline.launch.parts import log_trainer_part
from headrace.pipeline.launch.prepare import resolve
from headrace.schemas.config import RunConfig, dump_config
from headrace.schemas.errors import ConfigurationError


def recorded(root: Path, *policies: str) -> Path:
    """A run folder with its configuration."""
    config = RunConfig.model_validate(
        {
            "run": {"id": "sort-1", "folder": str(root)},
            "policies": {name: {"model": "m"} for name in policies or ("main",)},
            "streams": {"main": {"dataset": "none.jsonl"}},
        }
    )
    RunFolder.of(config).create()
    dump_config(config, RunFolder.of(config).config)
    return config.run_folder()


def fine(config: RunConfig) -> None:
    """A check that refuses nothing."""


@pytest.mark.parametrize(
    ("text", "span"), [("", (1, 0)), ("1:40", (1, 40)), (":40", (1, 40)), ("3:", (3, 0)), ("7", (7, 7)), (":", (1, 0))]
)
def test_ranges(text: str, span: tuple[int, int]) -> None:
    assert _span(text) == span


@pytest.mark.parametrize("text", ["0:4", "5:4", "a:b", "1:b", "1-4", "-1:3", "1:2:3"])
def test_ranges_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="A:B"):
        _span(text)


def test_a_training_gets_a_folder_beside_the_run(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    before = run.joinpath("config.json").read_bytes()
    folder, config, training = _new(str(run), ["trainer.loss=cispo", "trainer.lr=1e-5"], "2:9", "", fine)
    assert folder.path.parent == tmp_path and folder.path.name.startswith("sort-1-again-")
    assert (config.trainer.loss, config.trainer.lr, config.run.id) == ("cispo", 1e-5, folder.path.name)
    assert training == Training(recorded=str(run), policy="main", first=2, last=9)
    again, same, told = _existing(str(folder.path))
    assert (again, same, told) == (folder, config, training)
    assert json.loads(folder.training.read_text())["overrides"] == ["trainer.loss=cispo", "trainer.lr=1e-5"]
    assert run.joinpath("config.json").read_bytes() == before


def test_settings_that_a_trainer_would_refuse_leave_no_folder(tmp_path: Path) -> None:
    def refuse(config: RunConfig) -> None:
        raise ConfigurationError(f"no loss {config.trainer.loss}")

    run = recorded(tmp_path)
    with pytest.raises(ConfigurationError, match="no loss cispoo"):
        _new(str(run), ["trainer.loss=cispoo"], "", "", refuse)
    assert list(tmp_path.iterdir()) == [run]


def test_an_id_and_a_folder_of_ones_own(tmp_path: Path) -> None:
    run = recorded(tmp_path / "runs")
    folder, _, _ = _new(str(run), ["run.id=mine", f"run.folder={tmp_path / 'else where'}"], "", "main", fine)
    assert folder.path == tmp_path / "else where" / "mine"
    with pytest.raises(ConfigurationError, match="exists"):
        _new(str(run), ["run.id=mine", f"run.folder={tmp_path / 'else where'}"], "", "main", fine)
    with pytest.raises(ConfigurationError, match="exists"):
        _new(str(run), ["run.id=sort-1"], "", "main", fine)
    with pytest.raises(ConfigurationError, match="its checkpoints must stay"):
        _new(str(run), ["run.id=sort-1", f"run.folder={tmp_path / 'else where'}"], "", "main", fine)


def test_policies_are_those_of_the_run(tmp_path: Path) -> None:
    run = recorded(tmp_path, "a", "b")
    with pytest.raises(ConfigurationError, match="policies a, b"):
        _new(str(run), [], "", "", fine)
    with pytest.raises(ConfigurationError, match="policies a, b"):
        _new(str(run), [], "", "c", fine)
    with pytest.raises(ConfigurationError, match="cannot be added"):
        _new(str(run), ["policies.c.model=m"], "", "a", fine)
    assert _new(str(run), [], "", "b", fine)[2].policy == "b"


def test_a_training_is_no_run_and_a_run_no_training(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    with pytest.raises(ConfigurationError, match="no training from the log"):
        _existing(str(run))
    folder, _, _ = _new(str(run), ["run.id=mine"], "", "", fine)
    with pytest.raises(ConfigurationError, match="headrace train --resume"):
        resolve([str(folder.path)], [], resume=True)
    folder.training.write_text('{"recorded": 1')
    with pytest.raises(ConfigurationError, match="no training from the log"):
        _existing(str(folder.path))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "--from-batches RUN"),
        (("--from-batches", "a", "--resume", "b"), "--from-batches RUN"),
        (("--from-batches", "nowhere"), "is no run folder"),
        (("--resume", "nowhere"), "is no run folder"),
        (("--from-batches", "a", "--from", "3"), "add --resume"),
        (("--resume", "a", "trainer.lr=1"), "give no others"),
    ],
    ids=str,
)
def test_wrong_words_are_refused(words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(("train", *words))
    assert stopped.value.code == 78
    assert says in capsys.readouterr().err


def test_the_part_runs_as_many_ranks_as_the_trainer(tmp_path: Path) -> None:
    _, config, _ = _new(str(recorded(tmp_path)), ["trainer.ranks=2", "run.id=two"], "", "", fine)
    part = log_trainer_part(config, tmp_path / "config.json", "main", ("--first", "3"))
    assert (part.name, part.role) == ("trainer-main", "trainer")
    assert "torch.distributed.run" in part.command and part.command[-2:] == ("--first", "3")
    assert "headrace.trainers.from_log" in part.command
