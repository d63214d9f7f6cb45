"""The code and the test that a new plug-in begins with, by kind: the least that the kind's contract asks for."""

from dataclasses import dataclass

__all__ = ("PLUGINS", "Beginning")


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Texts with ``$name``, ``$cls`` and so on: of the module, of its test, and of the lines of TOML that use it.

    needs: what the package depends on. settings: what its conformance test on the command line is told. is_function:
    the plug-in is a function of the plug-in's name instead of a class.
    """

    code: str
    test: str
    toml: str
    needs: str = "headrace"
    settings: str = ""
    is_function: bool = False


def _test(settings: str = "") -> str:
    return f'''"""It keeps what every plug-in of its kind must keep."""

from headrace.connectors.conformance import assert_conforms


def test_it_conforms() -> None:
    assert_conforms("$kind", "headrace_$name.$one:$object"{settings})
'''


_WORKFLOW = '''"""The workflow $name: who says what, with which context, and what each of them earns."""

import time
from collections.abc import Mapping

from headrace.pipeline.rewards.reward import Completion
from headrace.pipeline.workflows.workflow import PolicySession, Scoring, sequence_of, trajectory_of
from headrace.schemas.records import Task, Trajectory

__all__ = ("$cls",)


class $cls:
    """One completion of the first policy, one score."""

    async def run(self, task: Task, engines: Mapping[int, PolicySession], rewards: Scoring) -> Trajectory:
        """Play the task's episode."""
        started = time.time_ns() // 1_000_000
        policy, engine = next(iter(engines.items()))
        prompt = engine.encode(task.prompt)
        generation = await engine.generate(prompt, task.sampling)
        text = engine.decode(generation.tokens)
        sequence = sequence_of(policy, "policy", prompt, generation, task.sampling)
        completion = Completion(text, generation.end_reason, generation.tokens)
        scores = await rewards.score(task.prompt, completion)
        return trajectory_of(
            task, [sequence], scores, started_ms=started, prompt_text=task.prompt.prompt, completion_text=text
        )
'''

_ENVIRONMENT = '''"""The environment $name: what it shows, what it takes, and what that is worth."""

from headrace.pipeline.environments.environment import Observation
from headrace.schemas.records import Prompt

__all__ = ("$cls",)


class $cls:
    """Shows the prompt, and ends with the first action: reward 1 for the prompt's answer."""

    def __init__(self) -> None:
        self._answer: str | None = None

    def reset(self, seed: int, prompt: Prompt) -> Observation:
        """Begin an episode; equal seed and prompt give the equal one."""
        self._answer = prompt.answer
        return Observation(prompt.prompt)

    def step(self, action: str) -> Observation:
        """Judge an action. Raises ValueError after the end."""
        if self._answer is None:
            raise ValueError("the episode has ended: call reset first")
        reward, self._answer = float(action.strip() == self._answer), None
        return Observation("", reward, done=True)

    def close(self) -> None:
        """End the episode; may be called twice."""
        self._answer = None
'''

_REWARD = '''"""The reward $name: what a completion is worth, with its formula and its source."""

from typing import ClassVar

from headrace.pipeline.rewards.reward import Completion, RewardOptions
from headrace.schemas.records import Prompt

__all__ = ("$cls", "${cls}Options")


class ${cls}Options(RewardOptions):
    """The keys of `streams.S.reward_options`, with defaults."""


class $cls:
    """1 when the completion is the prompt's answer, else 0."""

    Options: ClassVar[type[RewardOptions]] = ${cls}Options

    def __init__(self, options: ${cls}Options) -> None:
        self._given = options

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """A finite number, or several by name."""
        return float(completion.text.strip() == prompt.answer)
'''

_LOSS = '''"""The loss $name, with its formula and its source."""

from typing import ClassVar

from headrace.trainers.losses.loss import LossOptions, LossTerms, Streams, log_ratio, select

__all__ = ("$cls", "${cls}Options")


class ${cls}Options(LossOptions):
    """The keys of `trainer.loss_options`, with defaults."""


class $cls:
    """`-A new / behave`, token by token."""

    Options: ClassVar[type[LossOptions]] = ${cls}Options
    corrects_staleness = True
    needs_reference = False

    def __init__(self, options: ${cls}Options) -> None:
        self.options = options

    def __call__(self, streams: Streams) -> LossTerms:
        """The loss per token; what stands at masked positions is never looked at."""
        ratio = log_ratio(streams.new, streams.behave, streams.mask, self.options.log_ratio_limit).exp()
        loss = -select(streams.advantages, streams.mask) * select(ratio, streams.mask)
        return LossTerms(loss=loss, sums={"ratio": select(ratio.detach(), streams.mask).sum()})
'''

_ADVANTAGE = '''"""The advantage $name, with its formula and its source."""

from typing import ClassVar

from headrace.trainers.advantages.advantage import AdvantageOptions, GroupRewards, singletons

__all__ = ("$cls", "${cls}Options")


class ${cls}Options(AdvantageOptions):
    """The keys of `trainer.advantage_options`, with defaults."""


class $cls:
    """`R - mean` over the group."""

    Options: ClassVar[type[AdvantageOptions]] = ${cls}Options

    def __init__(self, options: ${cls}Options) -> None:
        self.options = options

    def __call__(self, group: GroupRewards) -> list[float]:
        """One value per trained member."""
        if group.count <= 1:
            return singletons(group, self.options)
        return [reward - group.mean for reward in group.rewards]
'''

_ENGINE = '''"""The engine $name: it samples completions and labels every token with the version that sampled it."""

from headrace.connectors.engines.scripted import ScriptedEngine

__all__ = ("$cls",)


class $cls(ScriptedEngine):
    """Begins as the engine without a model; put your own behind `add`, `step`, `abort` and `load_weights`."""
'''

_DATASET = '''"""The dataset format $name: rows by number, whatever they lie in."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.connectors.datasets.rows import BadRow

__all__ = ("$cls",)


class $cls:
    """A text file with one prompt a line, as the column `prompt`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = path.read_bytes().splitlines()

    def __len__(self) -> int:
        """Lines."""
        return len(self._lines)

    def read(self, number: int) -> Mapping[str, Any]:
        """A line as a row. Raises BadRow for one that is no text."""
        try:
            return {"prompt": self._lines[number].decode("utf-8")}
        except UnicodeDecodeError as error:
            raise BadRow(f"not UTF-8 at byte {error.start}", self._lines[number]) from None

    def where(self, number: int) -> str:
        """Where a row stands, for messages."""
        return f"{self._path} line {number + 1}"
'''

_DATASET_TEST = '''"""It keeps what every dataset format must keep."""

from pathlib import Path

from headrace.connectors.conformance import assert_conforms


def test_it_conforms(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\\ntwo\\nthree\\n")
    assert_conforms("datasets", "headrace_$name.dataset:$cls", {"path": str(file)})
'''

PLUGINS = {
    "workflows": Beginning(code=_WORKFLOW, test=_test(), toml='[streams.main]\nworkflow = "$name"'),
    "environments": Beginning(
        code=_ENVIRONMENT, test=_test(), toml='[streams.main.workflow_options]\nenvironment = "$name"'
    ),
    "rewards": Beginning(code=_REWARD, test=_test(), toml='[streams.main]\nreward = "$name"'),
    "losses": Beginning(code=_LOSS, test=_test(), toml='[trainer]\nloss = "$name"', needs="headrace[train]"),
    "advantages": Beginning(
        code=_ADVANTAGE, test=_test(), toml='[trainer]\nadvantage = "$name"', needs="headrace[train]"
    ),
    "engines": Beginning(code=_ENGINE, test=_test(), toml='[rollout]\nengine = "$name"'),
    "datasets": Beginning(
        code=_DATASET, test=_DATASET_TEST, toml='[streams.main]\nformat = "$name"', settings=" path=FILE"
    ),
}
"""Kind to how a plug-in of it begins."""
