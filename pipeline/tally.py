"""What a run amounts to so far, folded from its small topics: steps, credits, rewards, evaluations, workers, drops.

In: records of ``ledger``, ``steps``, ``manifests``, ``evals`` and ``demand`` in the order of their partitions; out: the
numbers that progress and the report show. The first ending record of a credit counts (protocol 3).
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from headrace.pipeline.evaluated import EvaluationTally
from headrace.pipeline.stale_bias import StaleBias
from headrace.schemas.records import (
    Batched,
    Closed,
    Demand,
    EvalResult,
    Kept,
    Manifest,
    Opened,
    Record,
    Resumed,
    Rollback,
    RunEnd,
    Skipped,
    Step,
    Stop,
    Trained,
)
from headrace.schemas.role_rewards import split_reward

__all__ = ("TALLY_TOPICS", "PolicyTally", "RewardPoint", "Tally")

TALLY_TOPICS = ("run", "ledger", "steps", "manifests", "evals", "demand")
"""Topics that a Tally is folded from."""


@dataclass(frozen=True, slots=True)
class RewardPoint:
    """Mean raw reward of the groups that ended (kept or filtered) up to a version, and how many groups that is."""

    version: int
    mean: float
    groups: int


@dataclass(slots=True)
class PolicyTally:
    """Numbers of one policy."""

    version: int = 0
    steps: list[Step] = field(default_factory=list)
    manifests: dict[int, Manifest] = field(default_factory=dict)
    opened: int = 0
    groups: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Groups that a credit was opened for, by stream."""
    rolling: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    batched: dict[int, int] = field(default_factory=dict)
    """Group to its batch, until that is trained."""
    trained: int = 0
    closed: Counter[str] = field(default_factory=Counter)
    """Reason, with the operator when one decided, to number of groups."""
    filtered_since_kept: Counter[str] = field(default_factory=Counter)
    """Groups that operators dropped since one was kept, by operator and reason."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Prompts that operators dropped, by operator."""
    skipped_since_opened: Counter[str] = field(default_factory=Counter)
    """Prompts that operators dropped since one became a group, by operator and reason."""
    rewards: list[RewardPoint] = field(default_factory=list)
    evaluations: EvaluationTally = field(default_factory=EvaluationTally)
    stopped: bool = False
    failed_ms: list[int] = field(default_factory=list)
    """Times at which groups failed since the last usable one."""
    last_failure: str = ""
    pending_rewards: list[float] = field(default_factory=list)
    stale: StaleBias = field(default_factory=StaleBias)

    def recent_reward(self) -> float | None:
        """Mean raw reward of the newest groups: those since the last version, or of the last version."""
        if self.pending_rewards:
            return sum(self.pending_rewards) / len(self.pending_rewards)
        return self.rewards[-1].mean if self.rewards else None

    def stale_bias(self) -> dict[str, float]:
        """How the groups that were dropped as stale differ from the trained ones; empty when there were none."""
        groups = sum(m.groups for m in self.manifests.values())
        tokens = sum(m.tokens for m in self.manifests.values())
        return self.stale.figures(tokens / groups if groups else None)

    def failed_since(self, time_ms: float) -> int:
        """How many groups failed one after the other, counted from a time on."""
        return sum(at >= time_ms for at in self.failed_ms)

    def accuracies(self) -> list[tuple[int, float, int]]:
        """(version, mean reward, samples) of every evaluated version, in order."""
        return [(v, sum(r.reward for r in rs) / len(rs), len(rs)) for v, rs in self.evaluations.results().items()]

    def role_rewards(self) -> dict[str, list[tuple[int, float]]]:
        """Mean reward of every role in the samples of every evaluated version, where a workflow has roles."""
        out: dict[str, list[tuple[int, float]]] = {}
        for version, results in self.evaluations.results().items():
            values: dict[str, list[float]] = {}
            for result in results:
                for role, value in split_reward(result.rewards)[1].items():
                    values.setdefault(role, []).append(value)
            for role, own in values.items():
                out.setdefault(role, []).append((version, sum(own) / len(own)))
        return out

    def staleness(self) -> Counter[int]:
        """Staleness of every item of every batch with a Step: start version less oldest version, to its count."""
        done = {step.batch for step in self.steps}
        return Counter(
            m.start_version - member.oldest_version
            for batch, m in self.manifests.items()
            if batch in done
            for member in m.members
        )


@dataclass(slots=True)
class Tally:
    """Numbers of a run by policy index, and its workers by name."""

    policies: dict[int, PolicyTally] = field(default_factory=lambda: defaultdict(PolicyTally))
    workers: dict[str, Demand] = field(default_factory=dict)
    ended: bool = False
    """The run's end mark has been read."""
    rollbacks: list[int] = field(default_factory=list)
    """Times of Rollback records."""

    def rollbacks_since(self, time_ms: float) -> int:
        """How many Rollback records were written at or after a time."""
        return sum(at >= time_ms for at in self.rollbacks)

    def fold(self, record: Record, timestamp_ms: int = -1) -> None:
        """Take one record with Kafka's time of it; those of no interest are ignored."""
        match record:
            case Demand():
                self.workers[record.worker] = record
            case EvalResult():
                self.policies[record.policy].evaluations.fold(record)
            case Manifest():
                self.policies[record.policy].manifests.setdefault(record.batch, record)
            case Step():
                policy = self.policies[record.policy]
                policy.version = max(policy.version, record.version)
                policy.steps.append(record)
            case Resumed():
                policy = self.policies[record.policy]
                policy.version = max(policy.version, record.version)
            case RunEnd():
                self.ended = True
            case Rollback():
                self.rollbacks.append(timestamp_ms)
            case Stop():
                self.policies[record.policy].stopped = True
            case Skipped():
                self.policies[record.policy].skipped[record.operator] += 1
                self.policies[record.policy].skipped_since_opened[f"{record.operator}: {record.reason}"] += 1
            case Opened() | Kept() | Closed() | Batched() | Trained():
                _fold_credit(self.policies[record.policy], record, timestamp_ms)
                self.policies[record.policy].stale.fold(record)
            case _:
                pass


def _fold_credit(policy: PolicyTally, record: Opened | Kept | Closed | Batched | Trained, timestamp_ms: int) -> None:
    match record:
        case Opened():
            policy.opened += 1
            policy.skipped_since_opened.clear()
            policy.groups[record.stream].add(record.group)
            policy.rolling.add(record.group)
        case Kept():
            if record.group in policy.rolling:
                policy.rolling.discard(record.group)
                policy.kept.add(record.group)
                policy.pending_rewards.append(record.raw_mean)
                policy.failed_ms.clear()
                policy.filtered_since_kept.clear()
        case Closed():
            if record.group in policy.rolling or record.group in policy.kept or record.group in policy.batched:
                if record.reason == "filtered":
                    policy.pending_rewards.append(record.raw_mean)
                    policy.failed_ms.clear()
                    policy.filtered_since_kept[f"{record.operator}: {record.detail.partition(':')[0]}"] += 1
                elif record.reason == "failed":
                    policy.failed_ms.append(timestamp_ms)
                    policy.last_failure = record.detail
                policy.rolling.discard(record.group)
                policy.kept.discard(record.group)
                policy.batched.pop(record.group, None)
                policy.closed[f"{record.reason} ({record.operator})" if record.operator else record.reason] += 1
        case Batched():
            for group in record.groups:
                if group in policy.kept:
                    policy.kept.discard(group)
                    policy.batched[group] = record.batch
        case Trained():
            done = [group for group, batch in policy.batched.items() if batch <= record.batch]
            for group in done:
                del policy.batched[group]
            policy.trained += len(done)
            if policy.pending_rewards:
                values, policy.pending_rewards = policy.pending_rewards, []
                policy.rewards.append(RewardPoint(record.version, sum(values) / len(values), len(values)))
