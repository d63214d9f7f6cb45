"""What a simulated run comes to, over the steps after its warm-up."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ("Outcome", "StepSeen")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """One step of a trainer. Times in seconds since the start."""

    ended: float
    waited: float
    trained: float
    groups: int
    members: int
    tokens: float
    staleness: list[int]
    """Of every member: start version of the batch less its oldest version."""
    engines: int
    """Engines at work when it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Figures of a run of one policy (of the first, where there are several, but for ``step_seconds``: the slowest).

    step_seconds: mean time from one step to the next. samples_per_second, tokens_per_second: trained ones. wait_share:
    share of its time that the trainer waits for a batch. busy_share: share of the time in which an engine runs
    anything. started_share, tasks_share: tokens and tasks that were started over those that were trained. length_ratio:
    mean length of what was trained over that of all that was admitted; 1 is without bias. engine_seconds: engines times
    time.
    """

    step_seconds: float
    first_batch_seconds: float
    samples_per_second: float
    tokens_per_second: float
    wait_share: float
    busy_share: float
    mean_staleness: float
    max_staleness: int
    started_share: float
    tasks_share: float
    length_ratio: float
    lost_groups: dict[str, int]
    engine_seconds: float
    seconds: float
    steps: Sequence[StepSeen] = field(repr=False)

    def flat(self) -> dict[str, Any]:
        """As JSON data, without the steps."""
        return {name: value for name, value in asdict(self).items() if name != "steps"}


def spans(steps: Sequence[StepSeen], warm_up: int) -> tuple[float, Sequence[StepSeen]]:
    """When measuring begins, and the steps that are measured."""
    return (steps[warm_up - 1].ended if warm_up else 0.0), steps[warm_up:]
