"""The workflow ``solver_selector``: a solver answers twice, a selector picks the answer that is handed in.

Goes in: a task with a question; comes out: a trajectory with the roles ``solver_a``, ``solver_b`` and ``selector``. The
stream's reward judges both answers; above 0.5 an answer is right. What the roles earn (AstraFlow's
``code_solve_and_select``):

| A | B | selector picks | A earns | B | selector | outcome |
|---|---|---|---|---|---|---|
| right | right | either | 1 | 1 | 0.5 | 1 |
| wrong | wrong | either | 0 | 0 | 0.5 | 0 |
| right | wrong | A / B | 1 | 0 | 1 / 0 | 1 / 0 |
| wrong | right | A / B | 0 | 1 | 0 / 1 | 0 / 1 |
| any | any | nothing to be read | its own | its own | 0 | that of A |

With ``rewards = "outcome"`` every role earns 1 or 0 for the answer handed in, as the paper has it (appendix A.3).
"""

import re
from collections.abc import Mapping
from typing import ClassVar, Literal

from headrace.pipeline.workflows.team import Episode, RoleOptions, TeamOptions, beside, policies_of
from headrace.pipeline.workflows.workflow import PolicySession, Scoring, WorkflowOptions
from headrace.schemas.parts import Reward
from headrace.schemas.records import Task, Trajectory

__all__ = ("SolverSelector", "SolverSelectorOptions", "choice_of")

_TAG = re.compile(r"<\s*final\s*>\s*([AB])\s*<\s*/\s*final\s*>", re.IGNORECASE)

SOLVER = RoleOptions(
    prompt="""Solve this programming task in Python 3. Answer with one fenced ```python block that holds the complete \
program, and nothing after it.

{question}"""
)
SELECTOR = RoleOptions(
    system="""You choose between two programs. You are given a Python programming task and two solutions, A and B. \
Look for mistakes in both: the algorithm, edge cases, counting, and whether each does what the task says. Think \
step by step inside <analysis></analysis>. Then write either <final>A</final> or <final>B</final> on a line of its \
own, and nothing after it.""",
    prompt="""# Task
{question}

# Solution A
```python
{candidate_a}
```

# Solution B
```python
{candidate_b}
```

Which one is more likely correct? Both or neither may be: then take the one that you trust more. Think inside \
<analysis></analysis>, then write <final>A</final> or <final>B</final>.""",
)


class SolverSelectorOptions(TeamOptions):
    """Options of ``solver_selector``; each role is a section: ``[streams.S.workflow_options.selector]``.

    solver sees ``{question}`` and is asked twice; selector also ``{candidate_a}`` and ``{candidate_b}``.
    """

    shows: Literal["text", "code"] = "code"
    solver: RoleOptions = SOLVER
    selector: RoleOptions = SELECTOR


def choice_of(text: str) -> str:
    """``A``, ``B``, or empty when neither can be read; the last tag counts.

    >>> choice_of("<final>A</final> no, <final> b </final>"), choice_of("A")
    ('B', '')
    """
    tags = _TAG.findall(text)
    return tags[-1].upper() if tags else ""


def selector_reward(right_a: bool, right_b: bool, choice: str) -> float:
    """What the selector earns: nothing unread, half where there was nothing to choose, else whether it chose well."""
    if not choice:
        return 0.0
    if right_a == right_b:
        return 0.5
    return float(right_a if choice == "A" else right_b)


class SolverSelector:
    """See the module."""

    Options: ClassVar[type[WorkflowOptions]] = SolverSelectorOptions
    team: ClassVar[bool] = True

    def __init__(self, options: SolverSelectorOptions, policies: Mapping[str, int]) -> None:
        self._options = options
        self._roles = {"solver": options.solver, "selector": options.selector}
        self._who = policies_of(self._roles, policies, {})

    async def run(self, task: Task, engines: Mapping[int, PolicySession], rewards: Scoring) -> Trajectory:
        """Two answers at once, then the choice while both are scored."""
        episode = Episode(task, engines, rewards, options=self._options, roles=self._roles, who=self._who)
        a, b = await beside(
            episode.ask("solver_a", like="solver", needed=True), episode.ask("solver_b", like="solver", needed=True)
        )
        shown = {"candidate_a": episode.shown(a), "candidate_b": episode.shown(b)}
        selected, (earned_a, earned_b) = await beside(
            episode.ask("selector", shown), beside(episode.score(a), episode.score(b))
        )
        value_a, value_b = (sum(part.value for part in earned) for earned in (earned_a, earned_b))
        choice = choice_of(selected.text)
        chosen = selector_reward(value_a > 0.5, value_b > 0.5, choice)
        episode.count(unread=not choice, apart=(value_a > 0.5) != (value_b > 0.5), first=choice != "B")
        earned = [*earned_a, *earned_b, Reward(name="choice", value=chosen, role="selector")]
        return episode.ended(value_b if choice == "B" else value_a, earned)
