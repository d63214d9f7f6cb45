"""The workflow ``single_turn``: one prompt, one completion of each policy, one score.

With several policies each answers the prompt by itself, in a role that bears its index, and is scored for its own
answer.
"""

import time
from collections.abc import Mapping

from headrace.pipeline.rewards.reward import Completion
from headrace.pipeline.workflows.workflow import PolicySession, Scoring, sequence_of, trajectory_of, with_seed
from headrace.schemas.records import Task, Trajectory

__all__ = ("SingleTurn",)


class SingleTurn:
    """See the module."""

    async def run(self, task: Task, engines: Mapping[int, PolicySession], rewards: Scoring) -> Trajectory:
        """Sample and score; the reward starts when its generation ends."""
        started = time.time_ns() // 1_000_000
        sequences, scores, texts = [], [], []
        several = len(engines) > 1
        for policy, engine in engines.items():
            sampling = with_seed(task.sampling, f"{task.sampling.seed} {policy}") if several else task.sampling
            prompt = engine.encode(task.prompt)
            generation = await engine.generate(prompt, sampling)
            text = engine.decode(generation.tokens)
            role = f"policy{policy}" if several else "policy"
            sequences.append(sequence_of(policy, role, prompt, generation, sampling))
            completion = Completion(text, generation.end_reason, generation.tokens)
            scores += await rewards.score(task.prompt, completion, role=role if several else "")
            texts.append(text)
        return trajectory_of(
            task,
            sequences,
            scores,
            started_ms=started,
            prompt_text=task.prompt.prompt or "\n".join(m.content for m in task.prompt.messages),
            completion_text="\n".join(texts),
        )
