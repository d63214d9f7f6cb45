"""The Task record of a piece of work that a worker has been chosen for (protocol 2, 5)."""

from headrace.pipeline.credits import OpenGroup
from headrace.pipeline.evaluation import EVALUATION_STREAM
from headrace.pipeline.leases import Work, Worker
from headrace.pipeline.workflows.streams import evaluated_stream, evaluated_with
from headrace.schemas.config import RunConfig
from headrace.schemas.parts import PolicyBound, Sampling, Source
from headrace.schemas.records import Prompt, Task

__all__ = ("TaskWriter",)


class TaskWriter:
    """Builds Tasks with a run's workflow and sampling parameters."""

    def __init__(self, config: RunConfig) -> None:
        rollout = config.rollout
        self._config = config
        self._sampling = Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_new_tokens=rollout.max_new_tokens,
        )
        self._beside = [evaluated_with(config, policy) for policy in range(len(config.policies))]
        self._evaluation = Sampling(
            temperature=config.eval.temperature,
            top_p=config.eval.top_p,
            top_k=config.eval.top_k,
            max_new_tokens=config.eval.max_new_tokens or rollout.max_new_tokens,
        )

    def task(self, work: Work, worker: Worker, group: OpenGroup | None, heldout: list[Prompt], now_ms: int) -> Task:
        """The Task of leased work; ``group`` is its open group, None for an evaluation sample."""
        members: list[Source] = []
        sources: list[Source] = []
        if work.kind == "eval":
            prompt, stream, workflow = heldout[work.detail["prompt"]], EVALUATION_STREAM, self._workflow(work)
            evaluated = work.detail["policy"]
            bounds = [
                PolicyBound(policy=p, min_version=v, pinned=p == evaluated and worker.role == "eval")
                for p, v in self.evaluation_bounds(work).items()
            ]
        else:
            assert group is not None, f"{work.kind} work of group {work.group} outlived its group"
            prompt, stream = group.prompt, group.stream
            workflow = self._config.streams[stream].workflow
            bounds = [PolicyBound(policy=p, min_version=v) for p, v in group.bounds.items()]
            sources = [Source(topic="prompts", partition=0, offset=group.offset)]
            members = [Source(topic=t, partition=p, offset=o) for t, p, o in work.detail.get("members", ())]
        return Task(
            kind=work.kind, group=work.group, replica=work.replica, attempt=work.attempt, stream=stream,
            worker=worker.name, incarnation=worker.incarnation, sequence=work.sequence, issued_ms=now_ms,
            deadline_ms=work.deadline_ms, partial=work.partial, workflow=workflow, policies=bounds, prompt=prompt,
            sampling=self._evaluation if work.kind == "eval" else self._sampling, members=members, sources=sources,
        )  # fmt: skip

    def evaluation_bounds(self, work: Work) -> dict[int, int]:
        """Min version per policy of an evaluation, the evaluated one first; those beside it are as they come."""
        policy, version = work.detail["policy"], work.detail["version"]
        return {p: version if p == policy else 0 for p in self._beside[policy]}

    def _workflow(self, work: Work) -> str:
        """The workflow of the first stream that trains the evaluated policy."""
        return self._config.streams[evaluated_stream(self._config, work.detail["policy"])].workflow
