"""Environments of verifiers, classic packages and tasksets: on a stand-in, and on the library itself where it is."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import verifiers_stand_in
from chat_policy import RecordingPolicy, assert_sampled_in_context, chat_model

from headrace.connectors.datasets.prompts import PromptDataset
from headrace.connectors.model_folder import ModelFolder
from headrace.connectors.plugins import load
from headrace.connectors.verifiers import open_rows, read_description
from headrace.pipeline.capture import verifiers_host
from headrace.pipeline.rewards.reward import Completion
from headrace.pipeline.workflows.verifiers import Verifiers
from headrace.pipeline.workflows.workflow import EpisodeFailed, make_workflow
from headrace.schemas.checks import check_record
from headrace.schemas.config import StreamConfig
from headrace.schemas.errors import ConfigurationError
from headrace.schemas.parts import Reward, Sampling
from headrace.schemas.records import Prompt, Record, Task, Trajectory

FORMAT, WORKFLOW = "headrace.connectors.verifiers:open_rows", "headrace.pipeline.workflows.verifiers:Verifiers"
MODULES = ("verifiers", "datasets", "tiny_sums", "tiny_tasks")
BREAKS, HANGS, WORTHLESS = 3, 4, 5


def library() -> tuple[int, int]:
    """Version of the installed library; (0, 0) when there is none."""
    try:
        major, minor = importlib.metadata.version("verifiers").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return (0, 0)
    return int(major), int(minor)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Puts environments on the path of this process and of those that it starts, with a stand-in or without."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in MODULES}

    def forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] in MODULES]:
            del sys.modules[name]

    def made(*, stand_in: bool = True) -> Path:
        where = [verifiers_stand_in.packages(tmp_path / "packages")]
        if stand_in:
            forget()
            where.append(verifiers_stand_in.install(tmp_path / "library"))
        for one in where:
            monkeypatch.syspath_prepend(str(one))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*map(str, where), os.environ.get("PYTHONPATH", "")]))
        return where[0]

    yield made
    forget()
    sys.modules.update(before)


class Judge:
    async def score(self, prompt: Prompt, completion: Completion, *, role: str = "") -> list[Reward]:
        return [Reward(name="judge", value=float(len(completion.text)))]


def say(text: str) -> str:
    """Wrong at first, right at the second try."""
    question = text.rpartition("user\n")[0].rpartition("<|im_start|>user\n")[2] if "Try" in text else text
    numbers = question.partition("user\n")[2] or question
    first, _, second = numbers.partition("=")[0].partition("+")
    return f"{int(first) + int(second) if 'Try again.' in text else 'no idea'}<|im_end|>"


def prompts(description: Path) -> dict[int, Prompt]:
    """The prompts of an environment by their row."""
    stream = StreamConfig(dataset=str(description), format=FORMAT, shuffle=False)
    source = PromptDataset("main", stream, rewards=["exact_match"])
    return {(p := source.prompt(at)).row: p for at in range(len(source))}


def task_of(examples: dict[str, Record], prompt: Prompt) -> Task:
    found: Any = examples["Task"]
    return replace(found, sources=[], prompt=prompt, sampling=Sampling(max_new_tokens=50, seed=1))


@pytest.mark.parametrize(
    ("form", "stand_in"),
    [("classic", True), ("tasksets", True), ("classic", False), ("tasksets", False)],
    ids=["classic-stand-in", "tasksets-stand-in", "classic-library", "tasksets-library"],
)
def test_an_environment_plays_its_own_rows(
    form: str, stand_in: bool, place: Callable[..., Path], folder: ModelFolder, examples: dict[str, Record]
) -> None:
    wanted = library() >= ((0, 3) if form == "tasksets" else (0, 1)) and (form == "tasksets" or library() < (0, 4))
    if not stand_in and not wanted:
        pytest.skip(f"no verifiers with {form} is installed: pip install 'verifiers{'>=0.3' * (form == 'tasksets')}'")
    description = place(stand_in=stand_in) / f"{form}.toml"
    found = prompts(description)
    assert len(found) == 6
    assert [(m.role, m.content) for m in found[1].messages] == [("system", "Be brief."), ("user", "1+2=")]
    assert (found[1].answer, found[1].dataset) == ("3", f"{form}.toml")
    workflow = make_workflow(WORKFLOW, {"environment": str(description)})
    policies = {row: RecordingPolicy(folder, say, seed=row) for row in found if row != HANGS}

    async def run() -> dict[int, Any]:
        playing = {
            row: workflow.run(task_of(examples, found[row]), {0: policy}, Judge()) for row, policy in policies.items()
        }
        try:
            ended = await asyncio.gather(*playing.values(), return_exceptions=True)
        finally:
            await workflow.close()  # type: ignore[attr-defined]
        return dict(zip(playing, ended, strict=True))

    made = asyncio.run(run())
    for row in (0, 1, 2):
        trajectory = made[row]
        assert isinstance(trajectory, Trajectory), trajectory
        check_record(trajectory)
        assert assert_sampled_in_context(trajectory.sequences, policies[row]) == 2
        assert [part.value for part in trajectory.rewards] == [2.0]
        assert trajectory.metrics["turns"] == trajectory.metrics["calls"] == 2.0
        assert (trajectory.status, trajectory.reward, trajectory.completion_text) == ("train", 2.0, str(2 * row + 1))
    assert isinstance(made[BREAKS], EpisodeFailed) and "the environment broke" in str(made[BREAKS])
    worthless = {"classic": "its rubric gave nan, no finite number", "tasksets": "the task gave no reward"}
    assert isinstance(made[WORTHLESS], EpisodeFailed) and worthless[form] in str(made[WORTHLESS])


def test_an_episode_that_hangs_costs_its_process_and_the_next_gets_another(
    place: Callable[..., Path], folder: ModelFolder, examples: dict[str, Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifiers_host, "_CANCEL_SECONDS", 0.2)
    description = place() / "classic.toml"
    found = prompts(description)
    workflow = Verifiers(Verifiers.Options(environment=str(description), reward="both"))
    policy = RecordingPolicy(folder, say)

    async def run() -> tuple[Trajectory, int]:
        hung = asyncio.create_task(workflow.run(task_of(examples, found[HANGS]), {0: policy}, Judge()))
        while not description.with_name("hangs").exists():
            assert not hung.done(), hung.result()
            await asyncio.sleep(0.02)
        hung.cancel()
        beside = workflow.run(task_of(examples, found[1]), {0: RecordingPolicy(folder, say)}, Judge())
        with pytest.raises(EpisodeFailed, match="process was ended"):
            await beside
        made = await workflow.run(task_of(examples, found[2]), {0: RecordingPolicy(folder, say)}, Judge())
        killed = workflow._host.killed
        await workflow.close()
        return made, killed

    made, killed = asyncio.run(run())
    assert [(part.name, part.value) for part in made.rewards] == [("rubric", 2.0), ("judge", 1.0)]
    assert killed == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('environment = "no-such-package"\n', r"no_such_package cannot be imported .*install the package"),
        ('environment = "tiny-sums"\nsettings = { cuont = 1 }\n', "verifiers environment tiny-sums: TypeError"),
        ('environment = "tiny-sums"\nsettings = { grouped = true }\n', "scores the rollouts of a group together"),
        ('environment = "tiny-sums"\nsplit = "test"\n', "split: Input should be 'train' or 'eval'"),
        ('environment = "tiny-sums"\nsettings = { count = 0 }\n', "has no train rows"),
        ("tiny-sums\n", "is no TOML"),
        ('environment = "tiny-tasks"\nsplit = "eval"\n', "has one set of tasks: choose other ones by settings.taskset"),
    ],
)
def test_a_description_that_cannot_be_opened_says_why(place: Callable[..., Path], text: str, says: str) -> None:
    path = place() / "made.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=says):
        open_rows(path)


def test_they_are_plug_ins_by_name() -> None:
    assert load("headrace.datasets", "verifiers") is open_rows
    assert load("headrace.workflows", "verifiers") is Verifiers


def test_both_datasets_and_a_limit(place: Callable[..., Path]) -> None:
    path = place() / "made.toml"
    for split, limit, rows in (("train", 4, 4), ("eval", 0, 2), ("eval", 1, 1)):
        path.write_text(f'environment = "tiny-sums"\nsplit = "{split}"\nlimit = {limit}\n')
        assert len(open_rows(path)) == rows
    path.write_text('environment = "owner/Tiny-Tasks@1.2"\nlimit = 2\n')
    assert read_description(path).module == "tiny_tasks"
    assert [json.loads(p.columns["verifiers"])["idx"] for p in prompts(path).values()] == [0, 1]


def test_without_the_library_a_run_is_told_what_to_install(
    place: Callable[..., Path], examples: dict[str, Record], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    description = place() / "classic.toml"
    (tmp_path / "library" / "verifiers" / "__init__.py").write_text("raise ImportError('not here')")
    with pytest.raises(ConfigurationError, match=r"verifiers cannot be imported .*pip install verifiers"):
        open_rows(description)
    workflow = Verifiers(Verifiers.Options(environment=str(description)))
    prompt = Prompt(
        prompt_id="a", stream="main", dataset="d", row=0, epoch=0, position=0, prompt="?", columns={"verifiers": "{}"}
    )

    async def run(prompt: Prompt) -> None:
        try:
            await workflow.run(task_of(examples, prompt), {}, Judge())
        finally:
            await workflow.close()

    with pytest.raises(EpisodeFailed, match="pip install verifiers"):
        asyncio.run(run(prompt))
    with pytest.raises(EpisodeFailed, match="format = 'verifiers'"):
        asyncio.run(run(replace(prompt, columns={})))
    with pytest.raises(ConfigurationError, match="there is no description"):
        make_workflow(WORKFLOW, {"environment": str(tmp_path / "none.toml")})
