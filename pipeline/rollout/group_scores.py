"""Score tasks: the members of a group are read where they lie and judged together by a reward of group scope.

Goes in: a task with the places of the members; comes out: a Score with parts for each, and with the reason for each
that could not be judged. A group none of whose members could be judged has a Score with an error, and fails.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from headrace.connectors.kafka import Connection
from headrace.connectors.kafka_errors import KafkaFailure
from headrace.pipeline.rewards.reward import Completion, RewardFailed
from headrace.pipeline.rewards.scorer import Scorer
from headrace.schemas.errors import ConfigurationError, UndecodableRecord
from headrace.schemas.parts import MemberScore, Source
from headrace.schemas.records import Score, Task, Trajectory

__all__ = ("MembersReader", "read_members", "score_group")

MembersReader = Callable[[Sequence[Source]], list[Trajectory]]
"""Reads the trajectories at some places; blocks, and raises KafkaFailure."""

_READ_SECONDS = 20.0


def read_members(connection: Connection, places: Sequence[Source]) -> list[Trajectory]:
    """The trajectories at these places, in their order; those that are gone are left out.

    Raises KafkaFailure and UndecodableRecord.
    """
    wanted = {(p.partition, p.offset) for p in places}
    found: dict[tuple[int, int], Trajectory] = {}
    for partition, offset in sorted(wanted):
        records = connection.read_topic(
            "trajectories", {partition: offset}, until={partition: offset + 1}, timeout=_READ_SECONDS
        )
        for raw in records:
            record = raw.decoded()
            if raw.offset == offset and isinstance(record, Trajectory):
                found[partition, offset] = record
    return [found[p.partition, p.offset] for p in places if (p.partition, p.offset) in found]


async def score_group(task: Task, scorer: Scorer, read: MembersReader | None) -> Score:
    """Judge the members of a group; whatever goes wrong is in the Score, by member where it is one's own."""
    try:
        members = await asyncio.to_thread(read, task.members) if read is not None else []
        completions = [Completion(m.completion_text, m.end_reason, _sampled(m)) for m in members]
        values = await scorer.score_group(task.prompt, completions)
    except (RewardFailed, ConfigurationError, KafkaFailure, UndecodableRecord) as error:
        return _score(task, scorer, error=str(error))
    scores: list[MemberScore] = []
    for member, value in zip(members, values, strict=True):
        if isinstance(value, RewardFailed):
            scores.append(MemberScore(replica=member.replica, name="", value=0.0, error=_sayable(str(value))))
        else:
            scores += [
                MemberScore(replica=member.replica, name=p.name, value=p.value, detail=_sayable(p.detail))
                for p in value
            ]
    if all(s.error for s in scores):
        why = scores[0].error if scores else "there is none"
        return _score(task, scorer, error=f"no member could be judged: {why}")
    return _score(task, scorer, scores=scores)


def _sampled(member: Trajectory) -> npt.NDArray[np.int32]:
    """The trained tokens of a trajectory; none when they lie in the object store."""
    parts = [s.tokens[s.mask == 1] for s in member.sequences]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)


def _score(task: Task, scorer: Scorer, *, error: str = "", scores: Sequence[MemberScore] = ()) -> Score:
    return Score(
        group=task.group,
        worker=task.worker,
        finished_ms=time.time_ns() // 1_000_000,
        error=_sayable(error),
        scores=list(scores),
        metrics=scorer.spent(),
        sources=task.sources,
    )


def _sayable(text: str) -> str:
    return text[:2000].encode("utf-8", "backslashreplace").decode()
