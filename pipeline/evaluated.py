"""What evaluations amount to: avg@k and pass@k of every version, and which version is the best by a named metric.

In: EvalResults of one policy; out: figures. A sample that failed is no sample (it is counted, never reward 0), and a
version of which a metric could not be taken on every held-out prompt is not compared by it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

from headrace.schemas.config import EvalConfig
from headrace.schemas.records import EvalResult

__all__ = ("AVERAGE", "Best", "Evaluated", "EvaluationFigures", "EvaluationTally", "pass_at_k")

AVERAGE = "avg"
"""Name of the mean reward of all samples, avg@k."""


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Chance that at least one of ``k`` samples is right, of ``samples`` drawn of which ``solved`` are.

    The unbiased estimate of Chen et al., Evaluating Large Language Models Trained on Code (2021), 2.1. Needs
    ``k <= samples``.
    """
    return 1.0 - comb(samples - solved, k) / comb(samples, k)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One evaluated version of a policy.

    prompts: those with a usable sample. samples, failed: usable samples, and those that ended in an error. other: share
    of usable samples with a token of another version than was asked for (never on workers that only evaluate).
    metrics: ``avg``, the mean reward over samples; ``pass@K``, the mean over prompts of the chance that one of K
    samples is solved. whole: the metrics that could be taken on all of the policy's held-out prompts.
    """

    version: int
    prompts: int
    samples: int
    failed: int
    other: float
    metrics: Mapping[str, float]
    whole: frozenset[str]


@dataclass(frozen=True, slots=True)
class Best:
    """The version that a metric is highest at; of equals the first."""

    version: int
    metric: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFigures:
    """A policy's evaluations for the report.

    metrics: name -> [first version, last version]. curves: name -> (version, value). best: None without ``eval.best``
    or a version to compare. failed: samples that ended in an error. other: as in ``Evaluated``, over all versions.
    """

    versions: list[int]
    samples: int
    failed: int
    other: float
    metrics: dict[str, list[float]]
    curves: dict[str, list[tuple[int, float]]]
    best: Best | None
    asked: str = ""
    """``eval.best``."""

    def summary(self) -> str:
        """One line for people; empty when nothing beyond the accuracy is to be said."""
        told = [f"{name} {first:.3f} -> {last:.3f}" for name, (first, last) in self.metrics.items() if name != AVERAGE]
        if self.best is not None:
            told.append(f"best version {self.best.version} by {self.best.metric} ({self.best.value:.3f})")
        elif self.asked:
            told.append(f"no best version: none has a result for every sample, and {self.asked} for every prompt")
        if self.failed:
            told.append(f"{self.failed} samples failed")
        if self.other:
            told.append(f"{self.other:.0%} of the samples with tokens of later versions")
        return f"evaluation: {', '.join(told)}" if told else ""


class EvaluationTally:
    """The evaluations of one policy as they come; of several results for one sample a usable one counts, the first."""

    def __init__(self) -> None:
        self._usable: dict[int, dict[tuple[str, int], EvalResult]] = defaultdict(dict)
        self._failed: dict[int, set[tuple[str, int]]] = defaultdict(set)
        self._prompts: set[str] = set()

    def fold(self, result: EvalResult) -> None:
        """Take one result."""
        key = (result.prompt_id, result.replica)
        self._prompts.add(result.prompt_id)
        if result.error:
            self._failed[result.version].add(key)
        else:
            self._usable[result.version].setdefault(key, result)

    def results(self) -> dict[int, list[EvalResult]]:
        """The usable results of every version that has some, in the order of versions."""
        return {version: list(found.values()) for version, found in sorted(self._usable.items())}

    def evaluated(self, config: EvalConfig) -> list[Evaluated]:
        """Every version that has a usable sample, in order."""
        return [self._version(version, results, config) for version, results in self.results().items()]

    def whole(self, config: EvalConfig) -> list[int]:
        """Versions of which every sample has a result, in order."""
        wanted = len(self._prompts) * config.samples
        keys = {v: self._usable[v].keys() | self._failed[v] for v in {*self._usable, *self._failed}}
        return sorted(version for version, found in keys.items() if len(found) >= wanted)

    def best(self, config: EvalConfig) -> Best | None:
        """The version to keep by ``eval.best``, among those evaluated whole; None when there is none."""
        done = set(self.whole(config))
        name = config.best
        ones = [one for one in self.evaluated(config) if one.version in done and name in one.whole]
        if not ones:
            return None
        top = max(ones, key=lambda one: (one.metrics[name], -one.version))
        return Best(top.version, name, top.metrics[name])

    def figures(self, config: EvalConfig) -> EvaluationFigures | None:
        """For the report; None when nothing was evaluated."""
        ones = self.evaluated(config)
        if not ones:
            return None
        samples = sum(one.samples for one in ones)
        curves = {
            name: [(one.version, round(one.metrics[name], 5)) for one in ones if name in one.metrics]
            for name in {**ones[0].metrics, **ones[-1].metrics}
        }
        return EvaluationFigures(
            versions=[one.version for one in ones],
            samples=samples,
            failed=sum(len(found - self._usable[version].keys()) for version, found in self._failed.items()),
            other=sum(one.other * one.samples for one in ones) / samples,
            metrics={name: [line[0][1], line[-1][1]] for name, line in curves.items()},
            curves=curves,
            best=self.best(config),
            asked=config.best,
        )

    def _version(self, version: int, results: Sequence[EvalResult], config: EvalConfig) -> Evaluated:
        counts: dict[str, list[int]] = {}
        for result in results:
            count = counts.setdefault(result.prompt_id, [0, 0])
            count[0] += 1
            count[1] += result.reward >= config.solved_at
        metrics = {AVERAGE: sum(result.reward for result in results) / len(results)}
        whole = {AVERAGE} if len(counts) == len(self._prompts) else set[str]()
        for k in _ks(config):
            able = [(samples, solved) for samples, solved in counts.values() if samples >= k]
            if able:
                metrics[f"pass@{k}"] = sum(pass_at_k(n, c, k) for n, c in able) / len(able)
            if len(able) == len(self._prompts):
                whole.add(f"pass@{k}")
        return Evaluated(
            version=version,
            prompts=len(counts),
            samples=len(results),
            failed=len(self._failed[version] - self._usable[version].keys()) if version in self._failed else 0,
            other=sum(r.oldest_version != version or r.newest_version != version for r in results) / len(results),
            metrics=metrics,
            whole=frozenset(whole),
        )


def _ks(config: EvalConfig) -> list[int]:
    """Powers of two up to the number of samples, that number, and the one that the best version is chosen by."""
    powers = {1 << power for power in range(config.samples.bit_length())}
    named = {int(config.best.removeprefix("pass@"))} if config.best.startswith("pass@") else set[int]()
    return sorted({config.samples, *powers, *named})
