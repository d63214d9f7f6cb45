"""GRESO: a prompt whose groups came back without variance is rolled out less and less often, before it costs anything.

Zheng et al., "Act Only When It Pays" (the code at b2778431), and AstraFlow's curator `greso` (343e8088). A prompt whose
last z groups were all easy, or all hard, is kept with probability `max(p^z, floor)`, one p for easy and one for hard;
any other group resets z. Every version the p's move by `step`: down when the share of such groups among all that came
back reached its target `alpha`, else up, within `p_low` and `p_high`. That begins after the warm-up.

| preset | easy, hard | floors | p within | targets |
|---|---|---|---|---|
| `paper` | no variance, mean above or up to 0.5 | 0.05, 0.30 | 0.01, 0.99 | 0.083, 0.167 |
| `astraflow` | the same | 0.10, 0.40 | the same | the same |
| `greso_repo` | mean from 0.98 on, up to 0.11 | 0.01 both | 0.05, 0.95 | 1/12, 1/6 |

With `greso_repo` the targets are compared with groups whose rewards are all exactly 1, or all 0.1 (`hard_reward`).

What differs from both codes: draws are hashes of seed, prompt and attempt, not a generator's next number; only complete
groups teach, by their raw rewards; groups of the prompt that are still open count as if they came back like the last;
tallies survive a restart; without `warm_up` the warm-up is over with the first prompt of the second epoch; there is no
sampling batch whose size adapts, because admission refills by deficit (protocol 3).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, ClassVar, Literal

from pydantic import Field

from headrace.pipeline.operators.operator import OperatorConfiguration
from headrace.pipeline.operators.prompt_history import PromptHistory
from headrace.pipeline.operators.prompt_operator import (
    Candidate,
    Outcome,
    PromptConfiguration,
    PromptContext,
    PromptOperator,
    draw,
)
from headrace.schemas.config import RunConfig
from headrace.schemas.errors import ConfigurationError

__all__ = ("PRESETS", "Greso", "GresoConfiguration", "GresoConstants", "near_first")

Verdict = Literal["easy", "hard", ""]
_STATE = b"state"


@dataclass(frozen=True, slots=True, kw_only=True)
class GresoConstants:
    """The numbers of a preset. ``by_mean``: the repository's form; else groups are judged by their variance."""

    by_mean: bool = False
    p_easy: float = 0.5
    p_hard: float = 0.5
    alpha_easy: float = 0.083
    alpha_hard: float = 0.167
    step: float = 0.01
    p_low: float = 0.01
    p_high: float = 0.99
    floor_easy: float = 0.05
    floor_hard: float = 0.30
    easy_from: float = 0.98
    hard_to: float = 0.11
    correct_above: float = 0.5
    hard_reward: float = 0.1


PRESETS = {
    "paper": GresoConstants(),
    "astraflow": GresoConstants(floor_easy=0.10, floor_hard=0.40),
    "greso_repo": GresoConstants(
        by_mean=True, alpha_easy=0.25 / 3, alpha_hard=0.5 / 3, p_low=0.05, p_high=0.95, floor_easy=0.01, floor_hard=0.01
    ),
}
"""Constants by name; every one can be set by its own key."""


class GresoConfiguration(PromptConfiguration):
    """``preset`` gives every number that is not set. ``p_easy``, ``p_hard``: where the p's start. ``warm_up``: prompts
    offered after the first version until the p's move. ``count_in_flight``: see above. ``remember``: prompts whose
    streak is kept at most. The other keys are those of the preset.
    """

    preset: Literal["paper", "astraflow", "greso_repo"] = "paper"
    p_easy: float | None = Field(None, gt=0, lt=1)
    p_hard: float | None = Field(None, gt=0, lt=1)
    alpha_easy: float | None = Field(None, ge=0, le=1)
    alpha_hard: float | None = Field(None, ge=0, le=1)
    step: float | None = Field(None, ge=0, lt=1)
    p_low: float | None = Field(None, gt=0, lt=1)
    p_high: float | None = Field(None, gt=0, lt=1)
    floor_easy: float | None = Field(None, ge=0, le=1)
    floor_hard: float | None = Field(None, ge=0, le=1)
    easy_from: float | None = None
    hard_to: float | None = None
    correct_above: float | None = None
    hard_reward: float | None = None
    warm_up: int | None = Field(None, ge=0)
    count_in_flight: bool = True
    remember: int = Field(1_000_000, ge=1)

    def constants(self) -> GresoConstants:
        """The preset's numbers with those that are set."""
        preset = PRESETS[self.preset]
        merged: dict[str, Any] = {}
        for field in fields(preset):
            given = getattr(self, field.name, None)
            merged[field.name] = getattr(preset, field.name) if given is None else given
        return GresoConstants(**merged)


@dataclass(slots=True)
class _State:
    """What is learned of all prompts together; ``easy``, ``hard`` and ``total`` are tallies since the last version."""

    p_easy: float
    p_hard: float
    easy: int = 0
    hard: int = 0
    total: int = 0
    offered: int = 0
    """Prompts offered since the first version, until the warm-up is over."""
    started: bool = False
    armed: bool = False
    ratio_easy: float = 0.0
    ratio_hard: float = 0.0


def near_first(rewards: Sequence[float]) -> bool:
    """AstraFlow's test for no variance: every reward within ``1e-8 + 1e-5 * |first|`` of the first."""
    return bool(rewards) and all(abs(r - rewards[0]) <= 1e-8 + 1e-5 * abs(rewards[0]) for r in rewards)


class Greso(PromptOperator):
    """Drops prompts that will probably bring no variance: the reasons are ``probably_easy`` and ``probably_hard``."""

    Configuration: ClassVar[type[OperatorConfiguration]] = GresoConfiguration

    def __init__(self, configuration: GresoConfiguration) -> None:
        self._given = configuration
        self.constants = configuration.constants()
        if self.constants.p_low > self.constants.p_high:
            raise ConfigurationError(f"greso: p_low {self.constants.p_low:g} is above p_high {self.constants.p_high:g}")
        self.state = _State(self.constants.p_easy, self.constants.p_hard)
        self._streaks = PromptHistory(configuration.remember)

    def check(self, streams: Sequence[str], config: RunConfig) -> None:
        """Groups of one have no variance, whatever they bring: every prompt would be taken for easy or hard."""
        single = [name for name in streams if config.streams[name].group_size == 1]
        if single and not self.constants.by_mean:
            raise ConfigurationError(
                f"greso judges prompts by the variance within their groups, and streams.{single[0]}.group_size is 1: "
                "take groups of 2 or more, preset = 'greso_repo', or leave it out"
            )

    def open(self, context: PromptContext) -> None:
        """Read streaks, p's and tallies; p's are brought within their bounds."""
        self._streaks.load(context.store())
        saved = context.store().get(_STATE)
        if saved is not None:
            self.state = _State(*json.loads(saved))
            self.state.p_easy = self._bounded(self.state.p_easy)
            self.state.p_hard = self._bounded(self.state.p_hard)

    def process(self, candidate: Candidate, context: PromptContext) -> None:
        """Admit, or drop by a draw."""
        self._count_offer(candidate, context)
        verdict, streak = self._streaks.get(candidate.prompt) or ("", 0)
        if not verdict:
            context.admit()
            return
        waiting = candidate.in_flight if self._given.count_in_flight else 0
        keep = self.keep_probability(verdict, streak + waiting)
        second = self.constants.by_mean and verdict == "hard"
        drawn = draw(context.seed, candidate.prompt, int(second))
        if self.keeps(drawn, keep):
            context.admit()
            return
        open_too = f" and {waiting} still open" if waiting else ""
        told = f"{streak} groups in a row were {verdict}{open_too}; kept with {keep:.4f}, drew {drawn:.4f}"
        context.drop(f"probably_{verdict}", told)

    def keep_probability(self, verdict: str, streak: int) -> float:
        """``max(p^streak, floor)`` of easy or hard prompts."""
        easy = verdict == "easy"
        p = self.state.p_easy if easy else self.state.p_hard
        return max(p**streak, self.constants.floor_easy if easy else self.constants.floor_hard)

    def keeps(self, drawn: float, keep: float) -> bool:
        """Whether a draw from [0, 1) keeps; the two codes look at opposite ends of it."""
        return drawn >= 1 - keep if self.constants.by_mean else drawn < keep

    def outcome(self, outcome: Outcome, context: PromptContext) -> None:
        """Learn from a complete group."""
        rewards = outcome.rewards
        if not outcome.complete or not rewards or not all(map(isfinite, rewards)):
            context.metrics.count("outcomes_ignored", operator="greso")
            return
        verdict, counted = self.judged(rewards)
        if verdict:
            before, streak = self._streaks.get(outcome.prompt) or ("", 0)
            now = streak + 1 if before == verdict else 1
            self._streaks.put(outcome.prompt, (verdict, now), context.store())
        else:
            self._streaks.forget(outcome.prompt, context.store())
        self.state.total += 1
        self.state.easy += counted == "easy"
        self.state.hard += counted == "hard"
        self._save(context)

    def judged(self, rewards: Sequence[float]) -> tuple[Verdict, Verdict]:
        """What a group says of its prompt, and what it counts as in the tallies."""
        mean, c = sum(rewards) / len(rewards), self.constants
        if c.by_mean:
            verdict: Verdict = "easy" if mean >= c.easy_from else "hard" if mean <= c.hard_to else ""
            alike = rewards[0] if min(rewards) == max(rewards) else None
            return verdict, "easy" if alike == 1 else "hard" if alike == c.hard_reward else ""
        if not near_first(rewards):
            return "", ""
        verdict = "easy" if mean > c.correct_above else "hard"
        return verdict, verdict

    def moved(self, version: int, context: PromptContext) -> None:
        """Move the p's by the tallies since the version before."""
        s, c = self.state, self.constants
        s.started = True
        s.armed = s.armed or self._given.warm_up == 0
        if s.total:
            s.ratio_easy, s.ratio_hard = s.easy / s.total, s.hard / s.total
            if s.armed:
                s.p_easy = self._bounded(s.p_easy + (-c.step if s.ratio_easy >= c.alpha_easy else c.step))
                s.p_hard = self._bounded(s.p_hard + (-c.step if s.ratio_hard >= c.alpha_hard else c.step))
        s.easy = s.hard = s.total = 0
        self._save(context)
        for verdict, p, ratio in (("easy", s.p_easy, s.ratio_easy), ("hard", s.p_hard, s.ratio_hard)):
            context.metrics.gauge("greso_p", p, verdict=verdict)
            context.metrics.gauge("greso_share", ratio, verdict=verdict)
        context.metrics.gauge("prompts_remembered", len(self._streaks), operator="greso")

    def streak(self, outcome_or_candidate: Outcome | Candidate) -> tuple[str, int]:
        """Verdict and length of a prompt's streak; ``("", 0)`` without one."""
        verdict, streak = self._streaks.get(outcome_or_candidate.prompt) or ("", 0)
        return verdict, streak

    def _count_offer(self, candidate: Candidate, context: PromptContext) -> None:
        """Notice the end of the warm-up."""
        s, warm_up = self.state, self._given.warm_up
        if s.armed or not s.started:
            return
        if warm_up is None:
            s.armed = candidate.prompt.epoch > 0
            if not s.armed:
                return
        else:
            s.offered += 1
            s.armed = s.offered >= warm_up
        self._save(context)

    def _bounded(self, p: float) -> float:
        return min(max(p, self.constants.p_low), self.constants.p_high)

    def _save(self, context: PromptContext) -> None:
        values = [getattr(self.state, field.name) for field in fields(self.state)]
        context.store().put(_STATE, json.dumps(values, separators=(",", ":")).encode())
