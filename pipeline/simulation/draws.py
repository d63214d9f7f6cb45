"""What each group of a workload is: drawn once by its number, so that every way of scheduling meets the same work."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.pipeline.simulation.plan import Plan

__all__ = ("Draws", "GroupDraw")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class GroupDraw:
    """A group's replicas: arrays (replica, turn), and one value a replica."""

    tokens: Floats
    """Tokens of every turn."""
    environment: Floats
    """Seconds of the environment after every turn."""
    hangs_in: npt.NDArray[np.int64]
    """Turn whose environment never answers; -1: none."""
    reward: Floats
    """Seconds of the reward."""
    passes: bool
    """Whether the members' rewards differ."""

    def lengths(self) -> Floats:
        """Tokens of whole episodes."""
        whole: Floats = self.tokens.sum(axis=1)
        return whole


class Draws:
    """The groups of a plan by number."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._known: dict[int, GroupDraw] = {}

    def group(self, number: int, progress: float = 0.0) -> GroupDraw:
        """The draw of a group; ``progress`` (0 to 1) is where in the run it was first asked for."""
        found = self._known.get(number)
        if found is None:
            found = self._known[number] = self._draw(number, progress)
        return found

    def forget_below(self, number: int) -> None:
        """Drop groups that nobody asks for any more."""
        for gone in [n for n in self._known if n < number]:
            del self._known[gone]

    def _draw(self, number: int, progress: float) -> GroupDraw:
        work, flow = self._plan.work, self._plan.flow
        rng = np.random.Generator(np.random.PCG64([self._plan.seed, number]))
        shape = (work.group_size + flow.extra_replicas, work.turns)
        factor = float(np.exp(rng.normal(-(work.prompt_sigma**2) / 2, work.prompt_sigma))) if work.prompt_sigma else 1.0
        if work.growth:
            factor *= float(np.interp(progress, np.linspace(0, 1, len(work.growth)), work.growth))
        tokens = work.length.draw(rng, shape) * factor
        environment = work.environment.draw(rng, shape)
        slow = rng.random(shape[0]) < work.fail_slow
        environment[slow] *= work.slow_factor
        hangs = np.where(rng.random(shape[0]) < work.fail_stop, rng.integers(0, work.turns, shape[0]), -1)
        return GroupDraw(
            tokens, environment, hangs, work.reward.draw(rng, shape[0]), bool(rng.random() < work.pass_rate)
        )
