"""The workflow ``solver_testgen``: a solver writes a program, a tester writes cases for it, and where the program fails
one of them and the hidden tests, the solver tries again.

Goes in: a task with a question whose row has the hidden tests and a reference solution; comes out: a trajectory with
the roles ``solver``, ``tester`` and, after a failure, ``retry``. The stream's reward runs programs: on the hidden tests
with the row as it is, on generated cases with one case in the place of the row's tests; above 0.5 a program passes.
The cases are *valid* if the reference passes all of them, and *diagnostic* if they are valid and the program passes all
of them just when it passes the hidden tests. What the roles earn (AstraFlow's ``code_actor_and_verify_v3``):

| program, hidden tests | generated cases | reference | tried again | solver earns | tester | retry |
|---|---|---|---|---|---|---|
| passes | passes | passes | no | 1 | 1 | |
| fails | fails | passes | yes | 0 | 1 | its own |
| fails | passes | passes | no | 0 | 0.5 | |
| passes | fails | passes | no | 1 | 0.5 | |
| fails | fails | fails | yes | 0 | 0 | its own |
| passes | passes | fails | no | 1 | 0 | |
| any | cannot be read, or too few | | no | its own | 0 | |

The outcome is that of the last program. ``rewards = "finals"`` pays the tester 1 for a last program that passes and 1
for valid cases (``code_actor_and_verify_v2``), ``rewards = "outcome"`` pays everybody 1 or 0 for the last program, as
the paper has it (appendix A.3).
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from headrace.pipeline.rewards.reward import Completion, RewardFailed
from headrace.pipeline.workflows.team import Episode, RoleOptions, Said, TeamOptions, beside, policies_of
from headrace.pipeline.workflows.workflow import EpisodeFailed, PolicySession, Scoring, WorkflowOptions
from headrace.schemas.parts import Reward
from headrace.schemas.records import Prompt, Task, Trajectory

__all__ = ("Case", "SolverTestgen", "SolverTestgenOptions", "cases_of", "tester_reward")

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)
_LONGEST = 1 << 16

SOLVER = RoleOptions(
    prompt="""Solve this programming task in Python 3. Answer with one fenced ```python block that holds the complete \
program, and nothing after it.

{question}"""
)
TESTER = RoleOptions(
    system="""You write test cases for a Python programming task. You are given the task and a solution that may be \
wrong. Write exactly {count} valid cases that follow the task, not the solution. First think step by step about edge \
cases and likely mistakes inside <analysis></analysis>. Then give one fenced ```json block with the cases, and nothing \
after it.""",
    prompt="""# Task
{question}

# Solution
```python
{attempt}
```

# Form of the answer
JSON of this shape, for {count} cases; each entry of "inputs" is the list of arguments of one call:
{"inputs": [[...], [...]], "outputs": [..., ...]}""",
)
RETRY = RoleOptions(
    prompt="""Solve this programming task in Python 3. Answer with one fenced ```python block that holds the complete \
program, and nothing after it.

{question}

This solution of yours failed:

{attempt}

{feedback}"""
)


class SolverTestgenOptions(TeamOptions):
    """Options of ``solver_testgen``; each role is a section: ``[streams.S.workflow_options.tester]``.

    solver sees ``{question}``; tester also ``{attempt}`` and ``{count}``; retry ``{attempt}`` and ``{feedback}``, the
    cases that failed. rewards: see the module. cases: how many the tester has to write. tests_column: where the
    stream's reward finds a row's tests; empty: in its answer. case_form: what takes their place for a generated case:
    ``calls`` is ``{"inputs": [[...]], "outputs": [...]}``, ``stdin`` is ``[{"input": text, "output": text}]``.
    reference_column: the reference solution, or a JSON list of several, of which one has to pass.
    """

    rewards: Literal["roles", "finals", "outcome"] = "roles"  # type: ignore[assignment]
    shows: Literal["text", "code"] = "code"
    solver: RoleOptions = SOLVER
    tester: RoleOptions = TESTER
    retry: RoleOptions = RETRY
    cases: int = Field(2, ge=1, le=32)
    tests_column: str = ""
    case_form: Literal["calls", "stdin"] = "calls"
    reference_column: str = "solution"


@dataclass(frozen=True, slots=True)
class Case:
    """One generated case: the arguments of a call, and what it should give."""

    arguments: Any
    output: Any


def cases_of(text: str, count: int) -> list[Case]:
    """The first ``count`` cases of an answer; empty when it holds no such JSON or fewer.

    The last fenced block counts, else the text from the first to the last brace.

    >>> cases_of('{"inputs": [[1], [2]], "outputs": [2, 4]}', 2)
    [Case(arguments=[1], output=2), Case(arguments=[2], output=4)]
    >>> cases_of('{"inputs": [[1]], "outputs": [2]}', 2), cases_of("no", 1)
    ([], [])
    """
    blocks = _FENCED.findall(text)
    begin, end = text.find("{"), text.rfind("}")
    given = blocks[-1] if blocks else text[begin : end + 1] if 0 <= begin < end else ""
    if not given or len(given) > _LONGEST:
        return []
    try:
        data = json.loads(given)
    except (ValueError, RecursionError):
        return []
    inputs, outputs = (data.get(k) if isinstance(data, dict) else None for k in ("inputs", "outputs"))
    if not isinstance(inputs, list) or not isinstance(outputs, list) or min(len(inputs), len(outputs)) < count:
        return []
    return [Case(a, o) for a, o in zip(inputs[:count], outputs[:count], strict=True)]


def tester_reward(*, hidden: bool, generated: bool, valid: bool) -> float:
    """Half for valid cases, half for cases that are valid and judge the program as the hidden tests do."""
    return 0.5 * valid + 0.5 * (valid and generated == hidden)


class SolverTestgen:
    """See the module."""

    Options: ClassVar[type[WorkflowOptions]] = SolverTestgenOptions
    team: ClassVar[bool] = True

    def __init__(self, options: SolverTestgenOptions, policies: Mapping[str, int]) -> None:
        self._options = options
        self._roles = {"solver": options.solver, "tester": options.tester, "retry": options.retry}
        self._who = policies_of(self._roles, policies, {"retry": "solver"})

    async def run(self, task: Task, engines: Mapping[int, PolicySession], rewards: Scoring) -> Trajectory:
        """Solve, test while the hidden tests run, run the cases, and try again where both say so."""
        episode = Episode(task, engines, rewards, options=self._options, roles=self._roles, who=self._who)
        references = self._references(task.prompt)
        solved = await episode.ask("solver", needed=True)
        shown = {"attempt": episode.shown(solved), "count": str(self._options.cases)}
        tested, earned = await beside(episode.ask("tester", shown), episode.score(solved))
        value = sum(part.value for part in earned)
        hidden = value > 0.5
        cases = cases_of(tested.text, self._options.cases)
        failed: list[Case] = []
        valid = False
        if cases:
            failed, valid = await beside(
                self._failed(episode, cases, solved.completion), self._one_passes(episode, cases, references)
            )
        made = tester_reward(hidden=hidden, generated=not failed, valid=valid) if cases else 0.0
        episode.count(unread=not cases, valid=valid, retried=False, first_right=hidden)
        if failed and not hidden:
            retried = await episode.ask("retry", {**shown, "feedback": _told(failed)})
            if retried.sequence is not None:
                again = await episode.score(retried)
                value = sum(part.value for part in again)
                earned += again
                episode.count(retried=True)
        if self._options.rewards == "finals":
            made = float(value > 0.5) + float(valid)
        return episode.ended(value, [*earned, Reward(name="cases", value=made, role="tester")])

    def _references(self, prompt: Prompt) -> list[str]:
        """The reference solutions of a row. Raises EpisodeFailed when it has none."""
        column = self._options.reference_column
        given = prompt.columns.get(column, "")
        found: Any = given
        if given.startswith("["):
            with suppress(ValueError):
                found = json.loads(given)
        references = found if isinstance(found, list) else [given]
        if not references or not all(isinstance(one, str) and one for one in references):
            raise EpisodeFailed(
                f"the row has no reference solution in column {column!r}: set workflow_options.reference_column; its "
                f"columns are {', '.join(map(repr, prompt.columns)) or 'none'}"
            )
        return references

    async def _failed(self, episode: Episode, cases: list[Case], completion: Completion) -> list[Case]:
        """The cases that a program does not pass; one that the reward cannot run is not passed."""
        said = Said("", completion.text, completion.end_reason, completion, None)
        failed = []
        for case in cases:
            try:
                parts = await episode.score(said, prompt=self._with_case(episode.prompt, case))
            except RewardFailed:
                parts = []
            if sum(part.value for part in parts) <= 0.5:
                failed.append(case)
        return failed

    async def _one_passes(self, episode: Episode, cases: list[Case], references: list[str]) -> bool:
        """Whether one of the reference solutions passes all cases."""
        for reference in references:
            if not await self._failed(episode, cases, Completion(reference, "stop", np.empty(0, np.int32))):
                return True
        return False

    def _with_case(self, prompt: Prompt, case: Case) -> Prompt:
        """The row with one generated case in the place of its tests."""
        if self._options.case_form == "calls":
            tests = json.dumps({"inputs": [case.arguments], "outputs": [case.output]})
        else:
            tests = json.dumps([{"input": _text(case.arguments), "output": _text(case.output)}])
        column = self._options.tests_column
        if not column:
            return replace(prompt, answer=tests)
        return replace(prompt, columns={**prompt.columns, column: tests})


def _told(cases: list[Case]) -> str:
    """The cases that failed, in words."""
    lines = [f"- for {json.dumps(c.arguments)} it should give {json.dumps(c.output)}" for c in cases]
    return "\n".join(["It did not pass these cases:", *lines])


def _text(value: Any) -> str:
    """A value as a program reads or prints it: text as it is, a list line by line, the rest as JSON."""
    if isinstance(value, list):
        return "\n".join(_text(one) for one in value)
    return value if isinstance(value, str) else json.dumps(value)
