"""The environment ``code``: the policy writes Python, sees what it printed, and ends with ``<answer>``.

Goes in: actions with a fenced block to run or an answer; comes out: output with a verdict, and reward 1 for an answer
that equals the prompt's. Every program runs in the sandbox; nothing is kept from one to the next.
"""

import re

from headrace.pipeline.environments.environment import EnvironmentOptions, Observation
from headrace.pipeline.environments.sandbox import Sandbox, SandboxOptions, Verdict
from headrace.schemas.records import Prompt

__all__ = ("CodeEnvironment", "CodeEnvironmentOptions")

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)```", re.S)


class CodeEnvironmentOptions(EnvironmentOptions):
    """Options of ``code``."""

    turns: int = 8
    """Programs of an episode; after the last one only an answer is left."""
    shown: int = 2000
    """Characters of output that an observation shows."""
    sandbox: SandboxOptions = SandboxOptions()


class CodeEnvironment:
    """The policy writes Python, sees what it printed, and ends with an answer. Raises SandboxMissing."""

    Options = CodeEnvironmentOptions

    def __init__(self, options: CodeEnvironmentOptions | None = None) -> None:
        self._options = options or CodeEnvironmentOptions()
        self._sandbox = Sandbox(self._options.sandbox)
        self._prompt: Prompt | None = None
        self._left = 0

    def reset(self, seed: int, prompt: Prompt) -> Observation:
        """The prompt's own text begins the episode."""
        self._prompt, self._left = prompt, self._options.turns
        return Observation(prompt.prompt)

    def step(self, action: str) -> Observation:
        """Run the last block of an action, or judge its answer. Raises ValueError after the end."""
        if self._prompt is None:
            raise ValueError("the episode has ended: call reset first")
        if answers := _ANSWER.findall(action):
            right = answers[-1].strip() == self._prompt.answer.strip()
            self._prompt = None
            return Observation("", float(right), done=True, details={"verdict": "right" if right else "wrong"})
        blocks = _BLOCK.findall(action)
        if not blocks or not self._left:
            self._prompt = None
            said = "neither a program nor an answer" if self._left else "no answer after the last program"
            return Observation("", 0.0, done=True, details={"verdict": said})
        self._left -= 1
        verdict = self._sandbox.run(blocks[-1])
        return Observation(self._shown(verdict), details={"verdict": str(verdict), "isolation": verdict.isolation})

    def close(self) -> None:
        """End the episode."""
        self._prompt = None

    def _shown(self, verdict: Verdict) -> str:
        text = (verdict.output + verdict.errors)[: self._options.shown]
        return f"<output verdict={verdict.kind!r}>\n{text.rstrip()}\n</output>"
