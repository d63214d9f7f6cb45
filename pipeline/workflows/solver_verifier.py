"""The workflow ``solver_verifier``: a solver answers, a verifier approves or rejects, a rejected answer is tried again.

Goes in: a task with a question; comes out: a trajectory with the roles ``solver``, ``verifier`` and, after a rejection,
``retry``. The stream's reward judges both answers; above 0.5 an answer is right. What the roles earn (AstraFlow's
``actor_and_verify``):

| solver | verifier says | retry | solver earns | verifier | retry | outcome |
|---|---|---|---|---|---|---|
| right | approve | | 1 | 1 | | 1 |
| right | reject | any | 1 | 0 | its own | that of the retry |
| wrong | reject | any | 0 | 1 | its own | that of the retry |
| wrong | approve | | 0 | 0 | | 0 |
| any | nothing to be read | | its own | 0 | | the solver's |

With ``rewards = "outcome"`` every role earns 1 or 0 for the final answer, as the paper has it (appendix A.3).
"""

import re
from collections.abc import Mapping
from typing import ClassVar, Literal

from headrace.pipeline.workflows.team import Episode, RoleOptions, TeamOptions, beside, policies_of
from headrace.pipeline.workflows.workflow import PolicySession, Scoring, WorkflowOptions
from headrace.schemas.parts import Reward
from headrace.schemas.records import Task, Trajectory

__all__ = ("SolverVerifier", "SolverVerifierOptions", "verdict_of")

_TAG = re.compile(r"<\s*verify\s*>\s*(approve|reject)\s*<\s*/\s*verify\s*>", re.IGNORECASE)
_WORD = re.compile(r"\b(approve|reject)\b", re.IGNORECASE)

SOLVER = RoleOptions(
    prompt="""# Task
A team of experts works on this mathematical problem:

{question}

# Your part
You are the solver of the team. Work through the problem step by step and check each step. \
End with the final answer in \\boxed{}."""
)
VERIFIER = RoleOptions(
    prompt="""# Task
A team of experts works on this mathematical problem:

{question}

# What the solver says
{attempt}

# Your part
You are the verifier of the team. Examine the solution step by step: is every step, formula and conclusion correct and \
complete? Explain what you find. Only then, at the very end, give your verdict, as exactly one of
<verify>approve</verify> if the steps and the final answer are correct, or
<verify>reject</verify> if there is any mistake."""
)
RETRY = RoleOptions(
    prompt="""# Task
A team of experts works on this mathematical problem:

{question}

# What you said before
{attempt}

# What the verifier says
{feedback}

# Your part
You are the solver of the team. Your solution was rejected. Use the objections as far as they hold, and work through \
the problem again step by step. End with the final answer in \\boxed{}."""
)


class SolverVerifierOptions(TeamOptions):
    """Options of ``solver_verifier``; each role is a section: ``[streams.S.workflow_options.verifier]``.

    solver sees ``{question}``; verifier also ``{attempt}``, what the solver said; retry also ``{feedback}``, what the
    verifier said. retry is played by the solver's policy unless it names its own.
    """

    solver: RoleOptions = SOLVER
    verifier: RoleOptions = VERIFIER
    retry: RoleOptions = RETRY
    retries: Literal[0, 1] = 1
    """Whether a rejected answer is tried again."""


def verdict_of(text: str) -> str:
    """``approve``, ``reject``, or empty when neither can be read.

    The first tag counts; without one, the word, if only one of the two occurs.

    >>> verdict_of("fine <verify> Approve </verify>"), verdict_of("I reject it"), verdict_of("approve or reject?")
    ('approve', 'reject', '')
    """
    tag = _TAG.search(text)
    if tag is not None:
        return tag[1].lower()
    words = {word.lower() for word in _WORD.findall(text)}
    return words.pop() if len(words) == 1 else ""


class SolverVerifier:
    """See the module."""

    Options: ClassVar[type[WorkflowOptions]] = SolverVerifierOptions
    team: ClassVar[bool] = True

    def __init__(self, options: SolverVerifierOptions, policies: Mapping[str, int]) -> None:
        self._options = options
        self._roles = {"solver": options.solver, "verifier": options.verifier, "retry": options.retry}
        self._who = policies_of(self._roles, policies, {"retry": "solver"})

    async def run(self, task: Task, engines: Mapping[int, PolicySession], rewards: Scoring) -> Trajectory:
        """Solve, verify while the answer is scored, and try again after a rejection."""
        episode = Episode(task, engines, rewards, options=self._options, roles=self._roles, who=self._who)
        solved = await episode.ask("solver", needed=True)
        shown = {"attempt": episode.shown(solved)}
        verified, earned = await beside(episode.ask("verifier", shown), episode.score(solved))
        verdict = verdict_of(verified.text)
        value = sum(part.value for part in earned)
        right = value > 0.5
        earned += [Reward(name="verdict", value=float(verdict == ("approve" if right else "reject")), role="verifier")]
        episode.count(approved=verdict != "reject", unread=not verdict, retried=False, first_right=right)
        if verdict == "reject" and self._options.retries:
            retried = await episode.ask("retry", {**shown, "feedback": verified.text})
            if retried.sequence is not None:
                again = await episode.score(retried)
                value = sum(part.value for part in again)
                earned += again
                episode.count(retried=True)
        return episode.ended(value, earned)
