"""The report of a run: figures worked out from its topics, written as ``report.json`` and ``report.html``.

In: the run folder (configuration, sessions) and its topics; out: one flat object of figures with fixed names, curves
and samples beside them. Definitions stand at ``Figures``; nothing is estimated.
"""

import itertools
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace.connectors.kafka import Connection
from headrace.pipeline.evaluated import EvaluationFigures
from headrace.pipeline.launch.folder import RunFolder
from headrace.pipeline.prompt_overlap import OverlapFigures, PromptOverlap
from headrace.pipeline.report_operators import operators_in_words
from headrace.pipeline.report_policies import PolicyFigures, policy_figures
from headrace.pipeline.run_records import TrajectoryHead, read_records, read_trajectory_heads
from headrace.pipeline.tally import PolicyTally, Tally
from headrace.schemas.config import RunConfig
from headrace.schemas.records import EvalResult, Manifest, Prompt, Step

__all__ = ("Curves", "Figures", "Sample", "build_figures", "loop_latencies_ms", "write_report")

_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One held-out prompt, answered by the first and by the last evaluated version."""

    prompt: str
    before: str
    reward_before: float
    after: str
    reward_after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Points over versions: (version, value)."""

    reward: list[tuple[int, float]]
    accuracy: list[tuple[int, float]]
    staleness_counts: dict[int, int]
    step_seconds: list[tuple[int, float]]
    wait_seconds: list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a run (of its first policy where they are a policy's).

    accuracy_start, accuracy_final: mean reward of the held-out samples of the lowest and of the highest evaluated
    version (sampled at the temperature of ``[eval]``). wall_seconds: launcher start to the end of its parts, summed
    over its sessions. peak_memory_bytes: the largest sum over all processes (``memory_kind``). rollouts: Trajectory
    records.
    mean_staleness: over trained items, start version of the batch less the item's oldest version, in versions.
    stale: see ``StaleBias.figures``. operators: those of the configuration in their order, in words.
    trained_tokens: sum over Steps; seconds_per_million_tokens: wall_seconds per million of them. time_split: shares of
    the trainer's time between its first and last Step. loop_latency_ms: see ``loop_latencies_ms`` (None unless depth
    is 0). mismatch: how far the log-probs of rollouts and trainer are apart, see ``_mismatch``. evaluation: avg@k,
    pass@k, the best version. overlap: held-out prompts that are training prompts too. policies: the figures of each
    policy. workflow: means of what workflows counted, over their trajectories.
    """

    run: str
    policy: str
    outcome: str
    accuracy_start: float | None
    accuracy_final: float | None
    eval_samples: int
    wall_seconds: float
    peak_memory_bytes: int
    memory_kind: str
    versions: int
    groups_opened: int
    groups_trained: int
    rollouts: int
    rollouts_per_second: float
    trained_tokens: int
    seconds_per_million_tokens: float | None
    mean_staleness: float | None
    max_staleness: int | None
    loop_latency_ms: float | None
    drops: dict[str, int]
    stale: dict[str, float]
    operators: dict[str, str]
    excluded: dict[str, int]
    dead_letters: int
    time_split: dict[str, float]
    delta_bytes_mean: float | None
    changed_share_mean: float | None
    changed_by_role: dict[str, float]
    mismatch: dict[str, float]
    evaluation: EvaluationFigures | None
    overlap: OverlapFigures | None
    policies: list[PolicyFigures]
    workflow: dict[str, float]
    command: str
    curves: Curves = field(repr=False)
    samples: list[Sample] = field(repr=False)

    def flat(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)

    def summary(self) -> list[str]:
        """The figures in a few lines for people."""
        gib = self.peak_memory_bytes / 2**30
        accuracy = f"{_shown(self.accuracy_start)} -> {_shown(self.accuracy_final)}"
        work = f"{self.wall_seconds:.0f} s, {self.rollouts} rollouts, {self.groups_trained} groups trained"
        means = f"mean staleness {_shown(self.mean_staleness)}, peak memory {gib:.2f} GiB ({self.memory_kind})"
        lines = [f"held-out accuracy (sampled) {accuracy}, {self.versions} versions", f"{work}, {means}"]
        beside = [part.summary() for part in (self.evaluation, self.overlap) if part is not None]
        lines += [line for line in beside if line]
        if self.loop_latency_ms is not None:
            lines.append(f"a step loses {self.loop_latency_ms:.0f} ms to the topics")
        if self.drops or self.dead_letters:
            told = ", ".join(f"{reason} {count}" for reason, count in sorted(self.drops.items()))
            lines.append(f"drops: {told or 'none'}; dead letters: {self.dead_letters}")
        if self.stale:
            lines.append("dropped as stale: " + ", ".join(f"{name} {value:.4g}" for name, value in self.stale.items()))
        if self.operators:
            lines.append("operators: " + ", ".join(f"{name} ({told})" for name, told in self.operators.items()))
        if len(self.policies) > 1:
            lines += [policy.summary() for policy in self.policies]
        return lines


def write_report(folder: RunFolder, connection: Connection) -> Figures:
    """Read the run's topics, write both reports, return the figures. Raises HeadraceError if they cannot be read."""
    from headrace.pipeline.report_html import page

    tally = Tally()
    for topic in ("ledger", "steps", "manifests", "evals"):
        for _, record in read_records(connection, topic):
            tally.fold(record)
    overlap = PromptOverlap()
    for _, record in read_records(connection, "prompts"):
        if isinstance(record, Prompt):
            overlap.fold(record)
    heads = list(read_trajectory_heads(connection))
    dead = sum(1 for _ in connection.read_topic("dead-letters"))
    figures = build_figures(folder, folder.read_config(), tally, heads, dead, overlap)
    # The page first: who finds the figures finds their page too.
    folder.write_whole(folder.report_html, page(figures))
    folder.write_whole(folder.report_json, json.dumps(figures.flat(), indent=2) + "\n")
    return figures


def build_figures(
    folder: RunFolder,
    config: RunConfig,
    tally: Tally,
    heads: Sequence[TrajectoryHead],
    dead_letters: int,
    overlap: PromptOverlap,
) -> Figures:
    """The figures from what was read."""
    name = config.policy_names()[0]
    policy = tally.policies[0]
    sessions = folder.sessions()
    wall = sum(session.wall_seconds for session in sessions)
    accuracies = policy.accuracies()
    evals = policy.evaluations.results()
    staleness = policy.staleness()
    items = sum(staleness.values())
    tokens = sum(step.tokens for step in policy.steps)
    latencies = loop_latencies_ms(policy.steps, policy.manifests, heads) if config.policies[name].depth == 0 else []
    return Figures(
        run=config.run.id,
        policy=name,
        outcome=sessions[-1].outcome if sessions else "",
        accuracy_start=accuracies[0][1] if accuracies else None,
        accuracy_final=accuracies[-1][1] if accuracies else None,
        eval_samples=accuracies[-1][2] if accuracies else 0,
        wall_seconds=round(wall, 3),
        peak_memory_bytes=max((session.peak_memory_bytes for session in sessions), default=0),
        memory_kind=sessions[-1].memory_kind if sessions else "",
        versions=policy.version,
        groups_opened=policy.opened,
        groups_trained=policy.trained,
        rollouts=len(heads),
        rollouts_per_second=round(_per_second(heads), 2),
        trained_tokens=tokens,
        seconds_per_million_tokens=round(wall / (tokens / 1e6), 3) if tokens else None,
        mean_staleness=sum(s * n for s, n in staleness.items()) / items if items else None,
        max_staleness=max(staleness, default=None),
        loop_latency_ms=statistics.median(latencies) if latencies else None,
        drops=dict(policy.closed),
        stale=policy.stale_bias(),
        operators=operators_in_words(config, tally),
        excluded=dict(Counter(f"{h.end_reason}: {h.error.splitlines()[0][:80]}" if h.error else h.end_reason
                              for h in heads if h.status == "excluded")),
        dead_letters=dead_letters,
        time_split=time_split(policy.steps),
        delta_bytes_mean=_mean(step.delta_bytes for step in policy.steps),
        changed_share_mean=_mean(step.changed_share for step in policy.steps),
        changed_by_role=_changed_by_role(policy.steps),
        mismatch=_mismatch(policy.steps),
        evaluation=policy.evaluations.figures(config.eval),
        overlap=overlap.figures(evals[max(evals)] if evals else ()),
        policies=policy_figures(config, tally),
        workflow=_workflow(heads),
        command=sessions[0].command if sessions else "",
        curves=_curves(policy, staleness),
        samples=_samples(evals),
    )  # fmt: skip


def loop_latencies_ms(
    steps: Sequence[Step], manifests: Mapping[int, Manifest], heads: Iterable[TrajectoryHead]
) -> list[float]:
    """What each step of a synchronous run loses to the topics, in milliseconds.

    For consecutive Steps k-1 and k: the time between their ends, less the trainer's step and publish seconds of k, less
    the span of the rollouts of batch k (first start to last end over all trajectories of the batch's groups). What is
    left is every record's way: Step to schedule, tasks to the worker, trajectories to groups, batch to the trainer.
    """
    spans: dict[int, tuple[int, int]] = {}
    for head in heads:
        first, last = spans.get(head.group, (head.started_ms, head.finished_ms))
        spans[head.group] = (min(first, head.started_ms), max(last, head.finished_ms))
    lost = []
    for before, step in itertools.pairwise(steps):
        manifest = manifests.get(step.batch)
        groups = {member.group for member in manifest.members} & spans.keys() if manifest else set()
        if not groups or step.batch != before.batch + 1:
            continue
        rolled = max(spans[g][1] for g in groups) - min(spans[g][0] for g in groups)
        trained = 1000 * (step.step_seconds + step.publish_seconds)
        lost.append(step.finished_ms - before.finished_ms - trained - rolled)
    return lost


def time_split(steps: Sequence[Step]) -> dict[str, float]:
    """Shares of the trainer's time from the first Step to the last: waiting for a batch, step, publishing, the rest."""
    if len(steps) < 2:
        return {}
    whole = (steps[-1].finished_ms - steps[0].finished_ms) / 1000
    later = steps[1:]
    parts = {
        "wait_for_batch": sum(s.wait_seconds for s in later),
        "step": sum(s.step_seconds for s in later),
        "publish": sum(s.publish_seconds for s in later),
    }
    if whole <= 0:
        return {}
    shares = {name: round(seconds / whole, 4) for name, seconds in parts.items()}
    return {**shares, "other": round(max(0.0, 1 - sum(shares.values())), 4)}


def _curves(policy: PolicyTally, staleness: Counter[int]) -> Curves:
    return Curves(
        reward=[(point.version, round(point.mean, 5)) for point in policy.rewards],
        accuracy=[(version, round(value, 5)) for version, value, _ in policy.accuracies()],
        staleness_counts=dict(sorted(staleness.items())),
        step_seconds=[(step.version, round(step.step_seconds, 4)) for step in policy.steps],
        wait_seconds=[(step.version, round(step.wait_seconds, 4)) for step in policy.steps],
    )


def _samples(evals: Mapping[int, Sequence[EvalResult]]) -> list[Sample]:
    """The first prompts, in the order of their ids, that both the first and the last evaluated version answered."""
    if len(evals) < 2:
        return []
    first: dict[str, EvalResult] = {}
    last: dict[str, EvalResult] = {}
    for found, version in ((first, min(evals)), (last, max(evals))):
        for result in evals[version]:
            found.setdefault(result.prompt_id, result)
    return [
        Sample(
            prompt=first[key].prompt_text,
            before=first[key].completion_text,
            reward_before=first[key].reward,
            after=last[key].completion_text,
            reward_after=last[key].reward,
        )
        for key in sorted(first.keys() & last.keys())[:_SAMPLES]
    ]


def _per_second(heads: Sequence[TrajectoryHead]) -> float:
    if not heads:
        return 0.0
    span = max(h.finished_ms for h in heads) - min(h.started_ms for h in heads)
    return 1000 * len(heads) / span if span > 0 else 0.0


def _mismatch(steps: Sequence[Step]) -> dict[str, float]:
    """Mean, or largest of names in ``max``, over the steps that had tokens of their own version to compare."""
    values: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, value in step.metrics.items():
            if name.startswith("mismatch") and value > 0:
                values[name].append(value)
    return {name: max(v) if name.endswith("max") else sum(v) / len(v) for name, v in values.items()}


def _workflow(heads: Sequence[TrajectoryHead]) -> dict[str, float]:
    """Mean of every figure over the usable trajectories that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for head in heads:
        if head.status == "train":
            for name, value in head.metrics.items():
                values[name].append(value)
    return {name: sum(v) / len(v) for name, v in values.items()}


def _changed_by_role(steps: Sequence[Step]) -> dict[str, float]:
    """Mean share of changed weights a version, by role of the tensors."""
    values: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, value in step.metrics.items():
            if name.startswith("changed/"):
                values[name.removeprefix("changed/")].append(value)
    return {name: sum(v) / len(v) for name, v in values.items()}


def _mean(values: Iterable[float]) -> float | None:
    kept = list(values)
    return sum(kept) / len(kept) if kept else None


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
