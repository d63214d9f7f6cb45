"""When ``headrace run`` asks the trainers' own code about the settings: unless the run has begun with the same ones."""

from pathlib import Path

import pytest

from headrace.pipeline.cli.run import run
from headrace.pipeline.launch import launcher, prepare
from headrace.schemas.config import RunConfig, dump_config, load_config


class Begun(Exception):
    """The launcher was reached."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The learning rates that the trainers were asked about; a launcher begins nothing."""
    rates: list[float] = []

    def begin(config: RunConfig, **_: object) -> None:
        raise Begun

    monkeypatch.setattr(prepare, "check_trainers", lambda config: rates.append(config.trainer.lr))
    monkeypatch.setattr(launcher, "Launcher", begin)
    return rates


def started(*words: str, resume: bool) -> None:
    with pytest.raises(Begun):
        run([*words], resume=resume, rollback=-1, discard=False, dry_run=False)


def test_a_run_that_goes_on_with_other_settings_is_asked_about_and_one_with_the_same_is_not(
    asked: list[float], tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'[run]\nid = "one"\nfolder = "{tmp_path}"\n[policies.main]\nmodel = "m"\n'
        '[streams.main]\ndataset = "d.jsonl"\n[trainer]\nlr = 1e-4\n'
    )
    started("@", str(file), resume=False)
    assert asked == [1e-4]
    folder = tmp_path / "one"
    folder.mkdir()
    dump_config(prepare.resolve([str(file)], [], resume=False), folder / "config.json")
    assert load_config([folder / "config.json"]).trainer.lr == 1e-4
    started(str(folder), resume=True)
    started("@", str(file), resume=True)
    assert asked == [1e-4], "nothing has changed"
    started(str(folder), "trainer.lr=2e-4", resume=True)
    assert asked == [1e-4, 2e-4]
