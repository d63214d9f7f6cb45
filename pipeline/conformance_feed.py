"""Groups to try operators on: the n-th is always the same, and together they hold what runs hold.

Out: the Admission of a group of four and its trajectories, in the order of their arrival. Rewards are equal, binary or
real; answers are short, long, cut off or repeated; every seventh group has a member that failed; prompts come again
after eleven groups unless ``fresh`` ones are asked for.
"""

from collections.abc import Iterator
from random import Random

import numpy as np

from headrace.schemas.parts import AdmittedPolicy, Sequence
from headrace.schemas.records import Admission, Trajectory

__all__ = ("ROUND", "admission_of", "trajectories_of")

MEMBERS = 4
PROMPTS = 11
ROUND = 7
"""Groups of a round; its last has the member that failed, and closes by a timer."""
_FAR_MS = 1 << 50


def admission_of(group: int, *, fresh: bool = False) -> Admission:
    """The n-th group is admitted, with its round, when the rounds before have ended; its deadline never comes."""
    return Admission(
        group=group, prompt_id=_prompt(group, fresh), stream="main", group_size=MEMBERS, extra_replicas=0,
        admitted_ms=0, deadline_ms=_FAR_MS, watermark=group - group % ROUND - 1,
        policies=[AdmittedPolicy(policy=0, min_version=0, cap=1 << 30)],
    )  # fmt: skip


def trajectories_of(group: int, *, fresh: bool = False) -> Iterator[Trajectory]:
    """The results of the n-th group, replicas in an order of their own."""
    random = Random(group)
    order = random.sample(range(MEMBERS), MEMBERS)
    answers = {replica: random.choices(range(20, 90), k=random.randint(1, 40)) for replica in range(MEMBERS)}
    if group % 3 == 0:
        answers[1] = answers[0]
    if group % (2 * PROMPTS) >= PROMPTS:  # the prompt's second visit brings an answer of the first
        answers[2] = _first_answer(group - PROMPTS)
    for replica in order:
        failed = group % ROUND == ROUND - 1 and replica == 3
        end = "length" if len(answers[replica]) > 30 else "stop"
        yield Trajectory(
            group=group, replica=replica, attempt=0, worker="w0", incarnation=1, stream="main",
            prompt_id=_prompt(group, fresh), status="excluded" if failed else "train",
            end_reason="env_error" if failed else end, reward=0.0 if failed else _reward(group, replica, random),
            tokens=0 if failed else len(answers[replica]), started_ms=0, finished_ms=1,
            error="the environment failed" if failed else "",
            sequences=[] if failed else [_sequence(answers[replica], group, end)],
        )  # fmt: skip


def _prompt(group: int, fresh: bool) -> str:
    return f"fresh-{group}" if fresh else f"prompt-{group % PROMPTS}"


def _first_answer(group: int) -> list[int]:
    random = Random(group)
    random.sample(range(MEMBERS), MEMBERS)
    return random.choices(range(20, 90), k=random.randint(1, 40))


def _reward(group: int, replica: int, random: Random) -> float:
    if group % 5 == 0:
        return float(group % 2)
    return random.random() if group % 5 == 1 else float((replica + group) % 3 == 0)


def _sequence(answer: list[int], group: int, end: str) -> Sequence:
    tokens = [1 + group % PROMPTS, *answer]
    return Sequence(
        policy=0, role="policy", prompt_length=1, end_reason=end, oldest_version=group // 8, newest_version=group // 8,
        tokens=np.array(tokens, "int32"), logprobs=np.full(len(tokens), -0.5, "float32"),
        mask=np.array([0, *[1] * len(answer)], "uint8"),
        versions=np.array([-1, *[group // 8] * len(answer)], "int32"),
    )  # fmt: skip
