"""Plays one task from its workflow to an acknowledged result, whatever goes wrong on the way.

Goes in: a task; comes out: a Trajectory, an EvalResult or a Score in its topic. An episode that fails, is refused or
passes its deadline gives an excluded trajectory with the reason, never silence: its group must end.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from headrace.connectors.engines.engine import EngineFailed, PromptTooLong, changes
from headrace.pipeline.rewards.reward import RewardFailed
from headrace.pipeline.rewards.scorer import Scorer
from headrace.pipeline.rollout.delivery import Delivery, excluded
from headrace.pipeline.rollout.episode import Episode
from headrace.pipeline.rollout.group_scores import MembersReader, score_group
from headrace.pipeline.rollout.sampler import Sampler, Session
from headrace.pipeline.workflows.streams import evaluated_stream, workflow_of
from headrace.pipeline.workflows.workflow import (
    EpisodeFailed,
    PolicySession,
    Workflow,
    make_workflow,
    trajectory_of,
    with_seed,
)
from headrace.schemas.config import RunConfig
from headrace.schemas.parts import Sequence, Source
from headrace.schemas.records import EvalResult, Task, Trajectory

__all__ = ("Episodes",)


class Episodes:
    """The episodes of a worker.

    ``counts``: results by kind and status, failures by their name, sequences that may not be trained by what changes
    their distribution, and tokens that were taken over from earlier attempts. recall: gives the sequences that the
    Partial named by a task holds. members: reads the trajectories that a score task is about.
    """

    def __init__(
        self,
        config: RunConfig,
        samplers: Mapping[int, Sampler],
        scorer: Scorer,
        delivery: Delivery,
        recall: Callable[[Task], Awaitable[list[Sequence]]] | None = None,
        *,
        members: MembersReader | None = None,
    ) -> None:
        self._suite = config.eval.suite
        self._seed = config.run.seed
        self._samplers = samplers
        self._scorer = scorer
        self._delivery = delivery
        self._recall = recall
        self._members = members
        self._evaluating = [evaluated_stream(config, policy) for policy in range(len(config.policies))]
        self._workflows: dict[str, Workflow] = {}
        """By stream and name."""
        self.counts: Counter[str] = Counter()
        for name, stream in config.streams.items():
            self._workflows[f"{name} {stream.workflow}"] = workflow_of(config, name)

    async def play(self, task: Task, place: Source) -> None:
        """Run the task and return when its result is acknowledged."""
        task.sources.insert(0, place)
        if task.kind == "score":
            self.counts["score"] += 1
            await self._delivery.score(await score_group(task, self._scorer, self._members))
            return
        if task.sampling.seed < 0:
            # the same attempt of the same replica samples the same tokens from the same weights
            name = f"{self._seed} {task.kind} {task.group} {task.replica} {task.attempt}"
            task = replace(task, sampling=with_seed(task.sampling, name))
        trajectory = await self._trajectory(task)
        self.counts[f"{task.kind} {trajectory.status}"] += 1
        if task.kind == "eval":
            await self._delivery.evaluation(self._evaluation(task, trajectory))
        else:
            await self._delivery.trajectory(trajectory)

    async def _trajectory(self, task: Task) -> Trajectory:
        started = _now_ms()
        episode = Episode(task)
        try:
            async with asyncio.timeout((task.deadline_ms - started) / 1000) as limit:
                if task.partial >= 0 and self._recall is not None:
                    episode = Episode(task, await self._recall(task))
                sessions: dict[int, PolicySession] = {
                    bound.policy: Session(bound.policy, self._samplers[bound.policy], bound, episode)
                    for bound in task.policies
                }
                trajectory = await self._workflow(task).run(task, sessions, self._scorer)
                self._count_sequences(trajectory, episode)
                return trajectory
        except TimeoutError as failure:
            name, reason = "deadline", "env_timeout"
            error = f"the task's deadline passed after {_now_ms() - started} ms"
            if not limit.expired():
                name, error = "workflow", f"workflow {task.workflow} raised TimeoutError: {failure}"
        except EngineFailed:  # a fault of this worker: it ends, and the task goes elsewhere
            raise
        except PromptTooLong as failure:
            name, reason, error = "prompt_too_long", "abort", f"prompt_too_long: {failure}"
        except RewardFailed as failure:
            name, reason, error = "reward", "env_error", str(failure)
        except EpisodeFailed as failure:
            name, reason, error = "episode", failure.end_reason, str(failure)
        except Exception as failure:  # the seam to workflows: what a plug-in raises ends its episode and no other
            name, reason = "workflow", "env_error"
            error = f"workflow {task.workflow} raised {type(failure).__name__}: {failure}"
        finally:
            for sampler in self._samplers.values():
                sampler.leave(episode)
        self.counts[f"failed: {name}"] += 1
        if self.counts[f"failed: {name}"] <= 5:
            where = f"{task.kind} group {task.group} replica {task.replica} attempt {task.attempt}"
            sys.stderr.write(f"rollout: {where} is excluded: {error.encode('utf-8', 'backslashreplace').decode()}\n")
        return excluded(trajectory_of(task, [], [], started_ms=started, end_reason=reason), error)

    def _count_sequences(self, trajectory: Trajectory, episode: Episode) -> None:
        if episode.served:
            self.counts["tokens taken over"] += episode.served
        for sequence in trajectory.sequences:
            if not sequence.trainable:
                self.counts[f"not trainable: {', '.join(changes(sequence.sampling)) or 'not known tokens'}"] += 1

    async def close(self) -> None:
        """Free what the workflows hold."""
        for workflow in self._workflows.values():
            if (close := getattr(workflow, "close", None)) is not None:
                await close()

    def _workflow(self, task: Task) -> Workflow:
        """The workflow of the task's stream, or of the stream that its policy is evaluated in."""
        stream = self._evaluating[task.policies[0].policy] if task.kind == "eval" else task.stream
        key = f"{stream} {task.workflow}"
        if key not in self._workflows:
            self._workflows[key] = make_workflow(task.workflow, {})
        return self._workflows[key]

    def _evaluation(self, task: Task, trajectory: Trajectory) -> EvalResult:
        """The result of an evaluation task: the version asked for, and the versions that sampled it."""
        bound = task.policies[0]
        made = [s.versions[s.versions >= 0] for s in trajectory.sequences if s.policy == bound.policy]
        seen = [int(v) for versions in made if versions.size for v in (versions.min(), versions.max())]
        untrained = self._samplers[bound.policy].version
        return EvalResult(
            policy=bound.policy,
            suite=self._suite,
            prompt_id=trajectory.prompt_id,
            replica=trajectory.replica,
            version=bound.min_version,
            oldest_version=min(seen, default=untrained),
            newest_version=max(seen, default=untrained),
            reward=trajectory.reward,
            tokens=sum(s.tokens.size - s.prompt_length for s in trajectory.sequences),
            end_reason=trajectory.end_reason,
            finished_ms=trajectory.finished_ms,
            error=trajectory.error,
            prompt_text=trajectory.prompt_text,
            completion_text=trajectory.completion_text,
            rewards=trajectory.rewards,
            sources=trajectory.sources,
        )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
